"""How bytes and small notices move between two agents.

Decides the verbs (register, connect, prepare, post, poll, notify) and turns what a library says
into a few states and typed errors. Refuses to know requests, blocks and messages.

Reading path: `interface` (the verbs, and what each promises), `nixl` (over NIXL, the only file that
imports it), `memory` and `memory_network` (real bytes copied inside a process, with hooks that
hold, fail, drop, reorder and double), `sides` (checks that both share), `logging_kept`.

Common changes: a verb or a promise touches `interface`, both implementations and the suite that
holds them to it, tests/transport/test_conformance.py. A new NIXL exception is a row in
`nixl._MEANINGS`; a backend's name for its number of threads, an entry beside it.
"""

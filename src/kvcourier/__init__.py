"""Moves KV cache between prefill and decode instances over NIXL, by pull and by push.

Decides nothing itself: each package below says in its docstring what it decides and what it refuses
to know, which file to read first, and which files change together.

Reading path: `ids`, `errors`, `config` (the words), then `layout` (which bytes go where), `core`
(what happens next), `transport` (how bytes move), `runtime` (threads and sockets around them). On
top: `engine` (computes), `router` (dispatches), `probe` and `demo` (measure and show), `cli`.
docs/architecture.md has the whole picture, docs/protocol.md the messages.

Common changes: a new package is given its place in the import contracts of pyproject.toml and a row
in docs/architecture.md. A new setting goes into `config` (or the package's own), into `cli`, and by
`python docs/tables.py` into docs/configuration.md. A new exception goes into the tree in `errors`.
"""

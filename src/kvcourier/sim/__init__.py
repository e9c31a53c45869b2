"""Whole worlds on virtual time: the real core and couriers, real bytes, a plan of what goes wrong.

Decides what happens around instances: a network, clients, engines, clocks, crashes. Refuses to
imitate what it can run: endpoints, couriers and the core are those of `runtime` and `core`, with
`runtime.surroundings` as the only seam, and bytes move through `transport.memory`.

Reading path: `worlds` (runs a range of seeds), `draw` (a plan from a seed), `faults` (what may go
wrong, as data), `world` (a plan brought about), `invariants` and `timeliness` (what must hold all
the same), `instance` (a place, a life at a time), `engine`, `scheduler`, `blocks`, `content` and
`memory` (an engine that computes real bytes), `router` (clients and legs), `network`,
`side_channel` and `data_path` (what arrives when), `timeline` (virtual time), `shrink` (the faults
that matter). `fleet` has a router of its own, which decides by the pure functions of
`kvcourier.router`; `binding` measures with it.

Common changes: a new fault is a class in `faults`, brought about by `network` or `world`, and drawn
in `draw`; a new invariant goes into `invariants`; a new message of the protocol needs nothing here.
"""

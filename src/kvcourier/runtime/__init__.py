"""Threads, sockets and clocks around the pure core.

Decides when to look where, how one engine's call reaches every rank, and how the ranks' reports
become one. Refuses to decide anything about a transfer, and never lets an engine's step wait for
the network.

Reading path: `interface` (the endpoint as an engine sees it) and `reports`, `courier` (the loop of
one rank) with what comes to it by `engine_calls`, `incoming` (peers' messages) and `handshakes`,
`side_channel` and `handshake_server` (ZMQ, by way of `zmq_sockets`), `greeting` (who listens
somewhere), `contacts` (connected peers), `mapping_cache` (from a post command to descriptors),
`rank` (one rank's parts, put together), `endpoint` (all ranks of an instance in one process),
`requests` (from reports of ranks to reports of the instance), `engine_link` (an engine whose
scheduler is another process), `questions` and `asking` (what operators and routers ask on the side
channel, at either end), `metrics`, `surroundings` (clock, sockets and threads, which a simulator
replaces).

Common changes: a new command of the core is a case in `courier`; a new call of engines goes through
`interface`, `endpoint` and the engine's fake in tests/engine/fake_endpoint.py; a new metric goes
into `metrics` and docs/metrics.md; a new socket or frame concerns `side_channel` or
`handshake_server` alone.
"""

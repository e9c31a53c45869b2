"""What happens next in a transfer, and who owns which blocks. Pure: events in, commands out.

Decides matching, leases, when to post, what is received, what a peer is told, and when blocks go
back to the engine. Refuses to know clocks, threads, sockets, chance, logs, NIXL and engines: time
and ids come in as values, and what is to be done goes out as commands.

Reading path: `events` and `commands` (inputs and outputs), `endpoint` (the four verbs), `lifecycle`
(all states and transitions), `outcomes`. Then one side: its records, the class that knows all of
them, which one is meant, and the way of one.
- `holds`, `holder`; `hold_table` with `rendezvous` and `foretold`; `registrations` and `askers`
  (who wants it), `deliveries` and `witness` (what they get), `renewals` with `leases` (what keeps
  it), `partings` and `hold_endings` (when its blocks go back).
- `wants`, `wanter`; `want_table`; `words` and `connections` (it is queued), `receipts` with `asks`,
  `coverage`, `checks` and `repairs` (it has blocks), `recalls` and `want_endings` (when they go
  back). What holders say comes in by `answers` and `heartbeats`.

Shared by both: `workspace`, `peers`, `flights`, `deadlines`, `stories`. At the border: `messages`,
`handshake`, `params`; `histories` and `token_proof` say how much of an offered history a prompt may
use.

Common changes:
- a state or transition: the table and `EXITS_BY_TIME` in `lifecycle`, the side that takes it, the
  generated section of docs/protocol.md;
- a message or field: `messages` (a default for a new field), its golden bytes in tests/core/golden,
  the dispatch in `endpoint` and `answers`, the table in docs/protocol.md;
- an event or command: `events` or `commands`, `endpoint`, `runtime.courier`, and tests/pair.py;
- a key of `kv_transfer_params`: `params`, `runtime.endpoint`, `router.legs`, docs/protocol.md;
- something counted: `workspace.Counted`, `runtime.metrics`, docs/metrics.md.
"""

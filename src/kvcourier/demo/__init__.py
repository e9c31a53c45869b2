"""A prefill and a decode instance on this machine, compared with a single one.

Decides which processes run, what they are asked, and when the result counts as good. Refuses to
know how an instance or the router works: it sees them as any client does.

Reading path: `run.py` (the order of events), `client.py` (one request and what its reader sees),
`traffic.py` (what a transfer did), `report.py` (medians, table, JSON, verdict), `prompts.py`,
`processes.py` (children that are always stopped; the end-to-end tests use it too).

Common changes: a new column goes through `client.Answer` or `traffic.Traffic`, then
`report.py`.
"""

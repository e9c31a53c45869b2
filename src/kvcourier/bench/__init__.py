"""Routers, modes and the choices inside a transfer, compared under load.

Decides loads, the order of turns, statistics and what a report shows. Refuses to know how an
instance or a router works: it sees them as any client does.

Reading path: `plan.py` (arrival times, prompts, turns), `stats.py` (intervals, verdicts),
`samples.py` (what one request took), `timeline.py` (stories), `choices.py` (combinations and their
flags), `report.py` (rows, JSON); all of these are pure. Then `client.py`, `load.py`, `target.py`,
`pair.py` and `session.py` (one turn), `sweep.py`, `compare.py`, `ablate.py`, `interleave.py` and
`run.py` (runs), `tables.py`, `charts.py`, `page.py` (what is shown).

Common changes: a new quantity is a line of `samples.METRICS`; a new flag or value of a choice is a
line of `choices.FLAGS` or `choices.ROWS`; a new entry of a story becomes a span by a line of
`timeline._RULES`.
"""

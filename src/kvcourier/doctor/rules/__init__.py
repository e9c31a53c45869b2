"""From facts to findings, one file a subject. Pure.

Decides what is wrong, how bad that is and what to do about it. Refuses to ask anybody.

Reading path: `reach.py` (is everybody there), `fit.py` (do P and D belong together), `nodes.py`
(their machines and libraries), `router.py` (who sends them requests), `timing.py` (leases,
time-outs, clocks), `moving.py` (do bytes move, and the right ones), `load.py` (caches, posting,
failures so far).

Common changes: a new check is a function from facts to findings and a line in
`doctor/checks.py`, where docs/doctor.md has a row for each.
"""

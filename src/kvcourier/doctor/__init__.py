"""What is wrong with a P, a D and what is between them, before users find out.

Decides what is asked, what it means and what to do about it. Refuses to know how an instance or a
router works: it asks them as a client, a peer or an operator would.

Reading path: `findings.py` (what is said), `facts.py` (what was found out), `checks.py` (all
questions), `rules` (how they are answered); these are pure. Then `pages.py` and `side_channel.py`
(how it is asked), `exposition.py` (metrics), `gather.py` (what is asked of whom), `attempts.py`
(what is tried), `prompting.py` (a prompt through P and D), `errands.py`, `parent.py` and `child.py`
(a process for what takes NIXL), `fetching.py` and `scratch.py` (being a D for two prompts),
`local.py` (this machine), `report.py` (text and JSON).

Common changes: a new check is a rule, a line of `checks.CHECKS` and a row in docs/doctor.md; what
it needs to know is a field of `facts`, filled by `gather`.
"""

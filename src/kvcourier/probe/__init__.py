"""Time to first token, as a client of any OpenAI server sees it.

Decides what is asked, what is timed and which numbers sum it up. Refuses to know what serves the
answers: it sees HTTP only.

Reading path: `run.py`, from `run_probe` down.

Common changes: a new setting is a field of `ProbeConfig` and a flag in `cli/probe.py`; a new figure
is a field of `Sample` and of what `run.py` shows and returns.
"""

"""Time to first token, as a client of any OpenAI server sees it.

Reading path: `run.py`, from `run_probe` down.

Common changes: a new setting is a field of `ProbeConfig` and a flag in `cli/probe.py`.
"""

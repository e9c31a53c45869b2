"""The controlled change: is a candidate better than what runs now, on the traffic there is?

Decides whether the traffic is such that the change can help, what the measurements say of it, what
they do not say, and how to switch on and back. Refuses to know how load is made and timed, which
is `bench`'s.

Reading path: `traffic.py` (a log of requests as bursts), `fitness.py` (can the change help here?),
`decision.py` (what the ratios say), `switching.py` (the flags), all of them pure; then `run.py`.

Common changes: another format of logs is a line of `traffic.FORMATS`; another reason why a change
cannot help is a function in `fitness.RULES`.
"""

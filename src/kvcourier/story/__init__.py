"""One transfer, as the router, P and D saw it, on one clock.

Decides how the accounts of several processes become one timeline. Refuses to know what the entries
mean: whoever tells them decides that.

Reading path: `accounts` (what was told, and on which clock), `timeline` (one order of it all):
both pure. Then `ask` (over HTTP), `side_channel` (for vLLM) and `show` (for a terminal).

Common changes: another way to ask is another function beside those of `ask` that returns `Asked`.
"""

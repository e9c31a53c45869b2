"""Time to first token, as a client of any OpenAI server sees it.

Reading path: `client.py` (one streamed completion; the demo uses it too), `prompts.py` (prompts of
a wanted number of tokens, for a tokenizer that we do not have), `measure.py` (the order of
requests), `summary.py` (median and spread).

Common changes: a new figure goes through `client.Answer` and `summary.py`.
"""

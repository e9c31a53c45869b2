"""The embedded engine: real models and a real paged KV cache, small, on any machine.

Decides what is computed and when. Refuses to know how KV travels between instances.

Reading path: api (requests and events), scheduler and blocks (pure), kv_cache and attention (the
paged memory and the function that transformers models call), engine (the thread that joins them).
A new setting touches config; a new kind of attention touches attention and, if it caches something
else, kv_cache and models.
"""

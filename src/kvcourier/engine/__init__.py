"""The embedded engine: real models and a real paged KV cache, small, on any machine.

Decides what is computed and when. Refuses to know how KV travels between instances.

Reading path: `api` (requests and events), `scheduler`, `loans` and `blocks` (pure), `kv_cache` and
`attention` (the paged memory and the function that transformers models call), `models` and
`random_model` (where models come from), `runner` and `sampler` (one step), `admission` (what can
never be served), `inbox` and `live` (what the thread is told, and what it keeps of a request),
`kv_exchange` (what an endpoint is told, and what it reports) with `turns` (what is kept and fetched
of conversations) and `streaming` (how far a prompt is), `engine` (the thread that joins them). The
OpenAI server is `server`; `text` turns tokens into text that can be streamed.

Common changes: a new setting touches `config`, `cli.serve` and `cli.instance`; a new kind of
attention touches `attention` and, if it caches something else, `kv_cache` and `models`; a new phase
of a request touches `scheduler` and `kv_exchange` or `engine`; a new sampling parameter `api`,
`sampler`, `admission` and `server.sampling`.
"""

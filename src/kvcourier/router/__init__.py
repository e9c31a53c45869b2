"""The OpenAI-compatible router in front of prefill and decode instances.

Decides which instances serve a call, what each is sent and when, and what the client gets if one
fails. Refuses to know models, prompts and KV caches: what only an instance can judge, it judges.

Reading path: `dispatch` (what happens on each event of a dispatch), `events` (its words), `legs`
(what each instance is sent), `intake` (what a client may ask), `policy` (which instances serve it),
`prompts` and `load` (what a policy goes by), `breaker` (who is left alone), `conversations`
(what a turn leaves for the next): these are pure. Then
`client_call` and `exchange` (one client call), `attempt` (drives one dispatch of it) with its parts
`pairing` (who serves it), `running_legs` (what each has to do), `watches` (when to bind D, and when
another) and `client_answer` (what the client gets), `upstream` (one leg over HTTP), `cancelling`
(a leg that is given up loses no connection), `instances` (what is known of each instance), `sides`
(who is there), `membership` (who comes and goes), `state_questions` (what a turn leaves, where its
answer does not say), `services` (what all calls share), `answers` (what the router itself says),
`app`, `pages` and `admin` (routes), `config`, `metrics`.

Nothing is re-exported here, so that reading settings does not load an HTTP stack:
`app.create_app(config.RouterConfig(...))` is the way in.

Common changes: a new policy is an entry in `policy.POLICIES` and a row in docs/routing.md; a new
kind of failure is an entry in `events.STATUS_OF` and the place that raises it; a new key towards
the instances goes into `legs` and its golden test.
"""

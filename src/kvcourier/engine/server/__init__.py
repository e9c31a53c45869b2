"""The OpenAI HTTP server of the embedded engine.

Reading path: `app` (routes), `job` (what a request asks for; uses `body`, `prompts`, `sampling`),
`generation` (a job on the engine), `render` and `answer` (what the client sees), `draining` (out of
service without breaking what runs).

Common changes: a new request field is declared in `kvcourier.openai` and read in `sampling` or
`job`; a field that we must refuse is an entry of the table in `body`; a new error is a row in
`errors`.
"""

from kvcourier.engine.server.app import create_app
from kvcourier.engine.server.generation import ServedEngine

__all__ = ["ServedEngine", "create_app"]

"""One call of a client, checked.

Decides what every answer to it tells. Refuses to know what a client may ask (`intake`) and how it
is served (`exchange`).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Send

from kvcourier.config import Binding, TransferMode
from kvcourier.ids import RequestId
from kvcourier.router.intake import BINDING_HEADER, MODE_HEADER
from kvcourier.router.prompts import Prompt
from kvcourier.router.sides import NO_PROMPT


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A checked call and the client's connection.

    Attributes:
        prompt: what is known of its prompt; an empty one where no policy needs it.
        conversation: which one it belongs to, if it says so.
        total_s: from its start to the end of its answer.
    """

    path: str
    body: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...]
    mode: TransferMode
    binding: Binding
    request_id: RequestId
    receive: Receive
    send: Send
    total_s: float
    prompt: Prompt = NO_PROMPT
    conversation: str = ""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def answer_headers(self) -> tuple[tuple[str, str], ...]:
        """What every answer tells of it; more where there was a dispatch."""
        return (
            ("x-request-id", str(self.request_id)),
            (MODE_HEADER, str(self.mode)),
            (BINDING_HEADER, str(self.binding)),
        )

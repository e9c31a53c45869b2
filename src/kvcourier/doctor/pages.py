"""Asking over HTTP, as any client does.

Decides how long is waited, how much is read, and how a failure is put into words. Refuses to know
what the pages mean.
"""

import email.utils
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from kvcourier.api_keys import bearer
from kvcourier.doctor.facts import ClockOffset
from kvcourier.errors import KVCourierError, clip

_MAX_BYTES = 16 << 20


class NotAnswered(KVCourierError):
    """There is no answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and how far its clock is ahead of ours, if it has a date."""

    status: int
    content: bytes
    clock: ClockOffset | None = None

    def json(self) -> Any:
        """The content as JSON; None if it is none."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None

    def message(self) -> str:
        """What an error says of itself, cut to a line."""
        body = self.json()
        error = body.get("error") if isinstance(body, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        return clip(str(text or self.content[:300].decode(errors="replace") or "(empty)"))


class Pages:
    """One HTTP client for everything.

    Args:
        api_key: shown to everybody; None: nothing is shown.
        timeout_s: for one page.
    """

    def __init__(self, api_key: str | None = None, timeout_s: float = 5.0) -> None:
        self._client = httpx.Client(
            headers=None if api_key is None else [bearer(api_key)],
            timeout=timeout_s,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, url: str) -> Reply:
        """One page. Raises NotAnswered."""
        return self._ask("GET", url)

    def post(
        self,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """The answer to a JSON body. Raises NotAnswered."""
        return self._ask("POST", url, json=body, headers=headers, timeout_s=timeout_s)

    def _ask(
        self, method: str, url: str, *, timeout_s: float | None = None, **options: Any
    ) -> Reply:
        if timeout_s is not None:
            options["timeout"] = timeout_s
        began = time.time()
        content = bytearray()
        try:
            with self._client.stream(method, url, **options) as answer:
                answered = time.time()
                for chunk in answer.iter_bytes():
                    content += chunk
                    if len(content) > _MAX_BYTES:
                        raise NotAnswered(f"answered more than {_MAX_BYTES} bytes")
                clock = clock_offset(answer.headers.get("date", ""), began, answered)
                return Reply(answer.status_code, bytes(content), clock)
        except httpx.ConnectError as error:
            raise NotAnswered(f"nothing listens there ({error})") from None
        except httpx.TimeoutException:
            raise NotAnswered("no answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise NotAnswered(f"the connection failed ({error})") from None


def clock_offset(date: str, sent: float, received: float) -> ClockOffset | None:
    """How far the clock of whoever wrote this HTTP date is ahead of ours; None if it is no date.

    A date is cut to whole seconds, and may be the second before: servers write it once a second.

    Args:
        date: the header.
        sent: our time before the question.
        received: our time when the answer began.
    """
    try:
        stamped = email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    # Written between `sent` and `received`, at a time between `stamped` and two seconds later.
    return ClockOffset(low_s=stamped - received, high_s=stamped + 2.0 - sent)

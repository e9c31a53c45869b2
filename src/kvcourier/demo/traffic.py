"""What one transfer did, read from the stories that both instances keep of it.

Decides which entries count. Refuses to know how they came to be.
"""

import time
from dataclasses import dataclass
from typing import Any

import httpx

from kvcourier.errors import KVCourierError

_PATIENCE_S = 5.0
_POLL_S = 0.02


class StoryMissing(KVCourierError):
    """An instance does not know the transfer, or its story lacks what must have happened."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One transfer.

    Attributes:
        prefill_finished_unix_s: wall clock of P at the end of prefill.
        num_bytes: bytes of KV posted, by D in pull and by P in push.
        num_pieces: descriptors they were posted in.
    """

    prefill_finished_unix_s: float
    num_bytes: int
    num_pieces: int


def read_traffic(
    client: httpx.Client, prefill_url: str, decode_url: str, transfer_id: str
) -> Traffic:
    """Ask both instances; a story may be a moment behind the stream, so ask until it is whole.

    Raises:
        StoryMissing: it did not become whole within seconds.
    """
    if not transfer_id:
        raise StoryMissing("the router named no transfer, so nothing was moved")
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        prefill = _story(client, prefill_url, transfer_id)
        posted = [
            entry
            for entry in (*prefill, *_story(client, decode_url, transfer_id))
            if entry["what"] == "posted"
        ]
        finished = [entry["at_unix_s"] for entry in prefill if entry["what"] == "prefill_finished"]
        if posted and finished:
            return Traffic(
                prefill_finished_unix_s=finished[0],
                num_bytes=sum(entry["bytes"] for entry in posted),
                num_pieces=sum(entry["pieces"] for entry in posted),
            )
        if time.monotonic() > deadline:
            lacking = "the end of prefill on P" if posted else "a posted operation on either side"
            raise StoryMissing(f"the story of transfer {transfer_id} lacks {lacking}")
        time.sleep(_POLL_S)


def _story(client: httpx.Client, url: str, transfer_id: str) -> list[dict[str, Any]]:
    try:
        response = client.get(f"{url}/kvcourier/story/{transfer_id}")
        if response.status_code == 404:
            return []
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise StoryMissing(f"the story of transfer {transfer_id}: {error}") from error
    content = response.json()
    entries: list[dict[str, Any]] = content["entries"] if isinstance(content, dict) else content
    return entries

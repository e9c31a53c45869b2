"""Asking the ranks of a vLLM instance for their story of a transfer, over the side channel.

Decides that each rank is an account of its own, on a clock of its own. Refuses to know what the
stories say. Blocks; `ask` calls it from a thread.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvcourier.config import ChannelKeys
from kvcourier.core.inquiry import StoryTold, Told
from kvcourier.errors import ConfigError, KVCourierError
from kvcourier.ids import EngineId, Incarnation, InstanceAddress, PeerRank, Rank
from kvcourier.runtime.asking import Asker, NoAnswer
from kvcourier.story.accounts import (
    Account,
    Asked,
    Part,
    Reading,
    compare_clocks,
    plain,
    read_clock,
    read_entries,
)

SCHEME = "kv"
OWN_ID = EngineId("kvcourier-story")
_OFF = (
    "keeps its stories to itself: in vLLM set side-channel keys, or tell_stories in "
    "kv_connector_extra_config; of `kvcourier serve` ask its http:// address"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """As whom we ask, and what proves it."""

    own_id: EngineId = OWN_ID
    channel: ChannelKeys | None = None


def read_address(url: str, flag: str) -> InstanceAddress:
    """The handshake server of kv://HOST:PORT or kv://ENGINE_ID@HOST:PORT.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path.strip("/"):
        raise ConfigError(
            f"{flag}: expected a side channel like kv://p0@10.0.0.1:5600, found {url!r}"
        )
    # Without keys nobody compares the name.
    return InstanceAddress(EngineId(parts.username or "instance"), host, port)


def url_of(address: InstanceAddress) -> str:
    """As `read_address` reads it."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{SCHEME}://{address.engine_id}@{host}:{address.port}"


def ask_ranks(
    part: Part, address: InstanceAddress, key: str, keys: Keys, looks: int, timeout_s: float
) -> list[Asked]:
    """What each rank of an instance tells, or why nothing is told."""
    place = url_of(address)
    try:
        with Asker(keys.own_id, keys.channel, timeout_s) as asker:
            told = asker.about(address)
            if not told.about.tells_stories:
                return [Asked(part, place, problem=_OFF)]
            return [
                _ask_rank(asker, part, f"{place} {peer.rank}", peer, address.host, port, key, looks)
                for peer, port in _ranks(told)
            ]
    except KVCourierError as error:
        return [Asked(part, place, problem=plain(str(error)))]


def _ranks(told: Told) -> Iterator[tuple[PeerRank, int]]:
    offer = told.offer
    for each in offer.ranks:
        yield (
            PeerRank(EngineId(offer.engine_id), Incarnation(offer.incarnation), Rank(*each.rank)),
            each.side_channel_port,
        )


def _ask_rank(
    asker: Asker,
    part: Part,
    place: str,
    peer: PeerRank,
    host: str,
    port: int,
    key: str,
    looks: int,
) -> Asked:
    try:
        asker.meet(peer, host, port)
        # The first question waits for the connection as well.
        asker.story(peer, key)
        read = [_timed(asker, peer, key) for _ in range(looks)]
    except NoAnswer as error:
        return Asked(part, place, problem=plain(str(error)))
    finally:
        asker.leave(peer)
    _, story = read[-1]
    if not story.entries:
        return Asked(part, place, problem="does not know it, or has forgotten it")
    readings = [reading for reading, _ in read if read_clock(reading.clock_s) is not None]
    entries = read_entries(list(story.entries))
    return Asked(part, place, Account(part, place, entries, compare_clocks(readings)))


def _timed(asker: Asker, peer: PeerRank, key: str) -> tuple[Reading, StoryTold]:
    # Even, also where somebody sets this machine's time meanwhile.
    unix_offset_s = time.time() - time.monotonic()
    asked_at = time.monotonic()
    story = asker.story(peer, key)
    answered_at = time.monotonic()
    reading = Reading(asked_at + unix_offset_s, answered_at + unix_offset_s, story.clock_unix_s)
    return reading, story

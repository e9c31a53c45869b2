"""Instances that come and go while the router runs.

Decides what a change of the instances file means, and what adding, removing and draining do.
Refuses to know HTTP (`admin`) and how an instance is chosen.
"""

import asyncio
import logging
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcourier.errors import ConfigError, shorten
from kvcourier.router.config import InstanceSpec, parse_instance_spec
from kvcourier.router.events import LegName
from kvcourier.router.instances import Instance
from kvcourier.router.sides import Side

_log = logging.getLogger(__name__)

Roster = Mapping[LegName, Sequence[InstanceSpec]]
NOBODY: Roster = {leg: () for leg in LegName}


@dataclass(frozen=True, slots=True)
class Changes:
    """What turns one roster of a side into another."""

    added: tuple[InstanceSpec, ...]
    removed: tuple[str, ...]


def changes_of(before: Sequence[InstanceSpec], after: Sequence[InstanceSpec]) -> Changes:
    """One whose name stays but whose coordinates change is removed and added anew."""
    return Changes(
        added=tuple(spec for spec in after if spec not in before),
        removed=tuple(spec.name for spec in before if spec not in after),
    )


def parse_roster(text: str) -> Roster:
    """Read an instances file: TOML with the lists `prefill` and `decode` of texts as in flags.

    Raises:
        ConfigError: it is no TOML, or a key or an instance cannot be used.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"instances file: expected TOML: {error}") from None
    unknown = sorted(data.keys() - set(LegName))
    if unknown:
        raise ConfigError(
            f"instances file: expected {' and '.join(LegName)}, found {shorten(unknown[0])}"
        )
    roster: dict[LegName, Sequence[InstanceSpec]] = {}
    for leg in LegName:
        texts = data.get(leg, [])
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise ConfigError(f"instances file: {leg}: expected a list of texts")
        specs = [parse_instance_spec(each) for each in texts]
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ConfigError(f"instances file: {leg}: expected each instance once, found {names}")
        roster[leg] = specs
    return roster


class Membership:
    """Who belongs to the sides; on the event loop."""

    def __init__(
        self, sides: Mapping[LegName, Side], make: Callable[[InstanceSpec], Instance]
    ) -> None:
        self._sides = sides
        self._make = make

    def add(self, leg: LegName, spec: InstanceSpec) -> bool:
        """One more; False if one of this name is there."""
        side = self._sides[leg]
        if side.get(spec.name) is not None:
            return False
        side.add(self._make(spec))
        _log.info("%s is added to the %s instances", spec.name, leg)
        return True

    def remove(self, leg: LegName, name: str) -> bool:
        """It is chosen no more, what runs there runs on; False if it is not there."""
        if self._sides[leg].get(name) is None:
            return False
        self._sides[leg].remove(name)
        _log.info("%s is removed from the %s instances", name, leg)
        return True

    def drain(self, leg: LegName, name: str, *, drained: bool) -> Instance | None:
        """It gets no new requests, or gets them again; None if it is not there."""
        instance = self._sides[leg].get(name)
        if instance is not None:
            instance.is_drained = drained
        return instance


class InstancesFile:
    """Keeps the sides as a file says. Instances from elsewhere are left alone."""

    def __init__(self, path: Path, membership: Membership, on_error: Callable[[], None]) -> None:
        self._path = path
        self._membership = membership
        self._on_error = on_error
        self._roster = NOBODY
        self._seen: object = None

    def look(self) -> None:
        """Read it if it has changed; one that cannot be used changes nothing, and is counted."""
        try:
            stat = self._path.stat()
            seen: object = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return
            self._seen = seen
            roster = parse_roster(self._path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if isinstance(error, OSError):
                if self._seen == str(error):
                    return
                self._seen = str(error)
            self._on_error()
            _log.error("%s changes nothing: %s", self._path, error)
            return
        self._apply(roster)

    async def watch(self, period_s: float) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            self.look()

    def _apply(self, roster: Roster) -> None:
        for leg in LegName:
            changes = changes_of(self._roster[leg], roster[leg])
            for name in changes.removed:
                self._membership.remove(leg, name)
            for spec in changes.added:
                if not self._membership.add(leg, spec):
                    _log.warning("%s: %s is a %s instance already", self._path, spec.name, leg)
        self._roster = roster

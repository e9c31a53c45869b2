"""Staging memory: slots on the cache's device, and what copies between them and the cache."""

from dataclasses import dataclass

from kvcourier.config import PathPolicy, StagingConfig
from kvcourier.layout.geometry import RankCache, Region
from kvcourier.transport.copying import Copier, copier_for


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Slots of equal size, one after the other in one region."""

    copier: Copier
    region: Region
    slot_bytes: int
    num_slots: int

    def address_of(self, slot: int) -> int:
        """Where a slot starts."""
        return self.region.address + slot * self.slot_bytes

    def close(self) -> None:
        """Give the memory back; nothing may be in flight."""
        self.copier.close()


@dataclass(frozen=True, slots=True, eq=False)
class StagingPair:
    """A rank's staging memory; None for a direction that does not go packed."""

    send: Staging | None = None
    receive: Staging | None = None

    @property
    def regions(self) -> list[Region]:
        """What the transport must register."""
        return [each.region for each in (self.send, self.receive) if each is not None]

    def close(self) -> None:
        """Give all of it back."""
        for each in (self.send, self.receive):
            if each is not None:
                each.close()


def open_staging_pair(cache: RankCache, config: StagingConfig) -> StagingPair:
    """Allocate both directions as configured; errors as `open_staging`."""
    if config.path is PathPolicy.DIRECT:
        return StagingPair()
    return StagingPair(
        open_staging(cache, config, config.send_bytes),
        open_staging(cache, config, config.receive_bytes),
    )


def open_staging(cache: RankCache, config: StagingConfig, num_bytes: int) -> Staging | None:
    """Allocate staging memory where the cache lies; None for a size of 0.

    Raises:
        ConfigError: what copies on that device is missing.
    """
    num_slots = num_bytes // config.slot_bytes
    if num_slots == 0:
        return None
    first = cache.regions[0]
    copier = copier_for(first.memory, first.device_id, cache.regions)
    region = copier.allocate(num_slots * config.slot_bytes)
    return Staging(copier, region, config.slot_bytes, num_slots)

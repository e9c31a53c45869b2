"""Several prefill and decode instances behind one router, as real processes."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import MODEL, Server, instance_flags, running_servers, until
from loopback import Handler, listening


@dataclass(frozen=True)
class Fleet:
    """All processes; the router knows every instance."""

    prefill: list[Server]
    decode: list[Server]
    router: Server

    @property
    def instances(self) -> list[Server]:
        """All but the router."""
        return [*self.prefill, *self.decode]


class _Refusal(Handler):
    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.body()
        self.send_error(503)


def refusing_instance() -> AbstractContextManager[str]:
    """The address of an instance that says nothing of itself and has no room for anybody."""
    return listening(_Refusal)


@contextlib.contextmanager
def running_fleet(
    log_dir: Path,
    num_prefill: int,
    num_decode: int,
    router_flags: Sequence[str],
    instance_extra: Sequence[str] = ("--cpu-threads=1",),
    model: str = MODEL,
    more_decode: Sequence[str] = (),
) -> Iterator[Fleet]:
    """A fleet, ready; `more_decode` are addresses of further decode instances."""
    with running_servers(log_dir) as start:
        sides = {
            role: [
                start(
                    f"{role}-{number}",
                    "serve",
                    *instance_flags(f"{role[0]}{number}", role, model=model),
                    *instance_extra,
                )
                for number in range(count)
            ]
            for role, count in (("prefill", num_prefill), ("decode", num_decode))
        }
        named = [f"--{role}={one.url}" for role, side in sides.items() for one in side]
        named += [f"--decode={url}" for url in more_decode]
        router = start("router", "route", *named, *router_flags)
        fleet = Fleet(sides["prefill"], sides["decode"], router)
        for server in (*fleet.prefill, *fleet.decode, fleet.router):
            server.wait_ready()
        until(lambda: _knows(router, fleet), "the router does not know its instances")
        yield fleet


def _knows(router: Server, fleet: Fleet) -> bool:
    sides = router.get("/kvcourier/instances").json()
    known = {one["url"] for role in ("prefill", "decode") for one in sides[role] if one["modes"]}
    return known == {each.url for each in fleet.instances}

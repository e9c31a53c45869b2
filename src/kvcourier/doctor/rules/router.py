"""Does the router know the instances, and reach them?

Decides what is wrong between a router and what it was asked to serve. Refuses to know how it
dispatches. Pure.
"""

from collections.abc import Iterator

from kvcourier.doctor.facts import Facts, KnownInstance
from kvcourier.doctor.findings import Finding, error, note, ok, warning


def answers(facts: Facts) -> Iterator[Finding]:
    """The router answers, and is well itself."""
    router = facts.router
    if router is None:
        return
    if router.problem:
        yield error(
            router.name,
            f"cannot be asked: {router.problem}",
            "Check its host and port, that it runs, and that it is `kvcourier route`; where it "
            "wants a key, give --api-key-file",
        )
    elif router.health != 200:
        yield error(
            router.name,
            f"GET /health answered {router.health}",
            "It says there which instance does not answer",
        )
    else:
        yield ok(router.name, f"well, mode {router.mode}")


def knows(facts: Facts) -> Iterator[Finding]:
    """Each instance that the router has can be reached by it and is the one that was looked at."""
    router = facts.router
    if router is None or router.problem:
        return
    for known in router.instances:
        name = f"{router.name} -> {known.role} {known.url}"
        if not known.reachable:
            yield error(
                name,
                f"the router cannot reach it: {known.problem}",
                "Check the URL that the router was given, and the network between the two",
            )
        elif (other := _other_place(facts, known)) is not None:
            yield error(
                name,
                other,
                "Correct kv_host, kv_port and engine_id in the router's --prefill or --decode",
            )
        elif known.breaker not in ("", "closed"):
            yield warning(
                name,
                f"the router's breaker for it is {known.breaker}: requests to it have failed one "
                "after another, so few or none are sent there",
                "The router's log and the instance's say why they failed",
            )
        elif known.is_draining:
            yield note(name, "is being drained: no new request goes there")
        else:
            yield ok(name, "reached" + (f", KV at {known.place}" if known.place else ""))
    urls = {known.url for known in router.instances}
    for one in facts.instances:
        if one.url not in urls:
            yield warning(
                router.name,
                f"does not have {one.name}",
                "Give it to the router, by the same URL, or leave it out here",
            )


def _other_place(facts: Facts, known: KnownInstance) -> str | None:
    """How the router's idea of an instance's side channel differs from what answered there."""
    for one in facts.instances:
        if one.url != known.url or known.place is None or one.place is None:
            continue
        if (known.place.engine_id, known.place.port) != (one.place.engine_id, one.place.port):
            return (
                f"the router believes its KV at {known.place} under the engine id "
                f"{known.place.engine_id}; it is at {one.place} under {one.place.engine_id}"
            )
    return None

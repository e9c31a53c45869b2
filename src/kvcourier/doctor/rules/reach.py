"""Is everybody there, and who is it?

Decides what is wrong with the addresses of the instances. Refuses to know what they hold.
"""

import ipaddress
from collections.abc import Iterator

from kvcourier.doctor.facts import Engine, Facts, InstanceFacts
from kvcourier.doctor.findings import Finding, error, note, ok, warning

_NOT_OURS = (
    "Start it with CourierConnector on both sides (kvcourier vllm-config prints the command), or "
    "keep vLLM's own connector on both"
)


def http(facts: Facts) -> Iterator[Finding]:
    """Each instance answers over HTTP, is healthy and serves a model."""
    for one in facts.instances:
        if one.problem:
            yield error(
                one.name,
                f"cannot be asked over HTTP: {one.problem}",
                "Check the host and port in its URL, that the process runs, and the firewall; "
                "where it wants a key, give --api-key-file",
            )
        elif one.health != 200:
            yield error(
                one.name,
                f"GET /health answered {one.health}",
                "Its log says why; it may still be loading its model",
            )
        elif not one.models:
            yield error(
                one.name,
                "lists no model at /v1/models",
                "Check that this is the address of an OpenAI server, not of something else",
            )
        else:
            yield ok(one.name, f"healthy, serves {', '.join(one.models)}")


def connector(facts: Facts) -> Iterator[Finding]:
    """Each instance runs our courier, so that P and D can talk."""
    for one in facts.instances:
        if one.problem:
            continue
        if one.engine.is_ours:
            yield ok(one.name, one.engine.value)
        elif one.engine is Engine.UNKNOWN:
            yield error(
                one.name,
                "shows no sign of a courier: no /kvcourier/instance, no metrics of vLLM or ours",
                "Check that its URL is that of an instance, not of a router or a proxy",
            )
        else:
            yield error(
                one.name,
                f"{one.engine.value}; it speaks another protocol than CourierConnector, and "
                "nothing else can be asked of it",
                _NOT_OURS,
            )


def side_channel(facts: Facts) -> Iterator[Finding]:
    """Each instance's side channel can be reached from here and is that instance's."""
    for one in facts.instances:
        if one.problem or not one.engine.is_ours:
            continue
        if one.place is None:
            yield note(
                one.name,
                "nobody says where its side channel is, so it was not asked about itself",
                "Name it as for kvcourier route: URL,engine_id=..,kv_host=..,kv_port=..",
            )
        elif one.told is None:
            yield error(
                one.name,
                f"its side channel at {one.place} ({_source(one)}) does not answer: "
                f"{one.told_problem}",
                "Check VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, or --side-channel-host and -port, "
                "what the router was told, and the firewall between here and there",
            )
        elif one.told.offer.engine_id != one.place.engine_id:
            yield error(
                one.name,
                f"at {one.place} answers the engine id {one.told.offer.engine_id}, expected "
                f"{one.place.engine_id}",
                "Two instances share a port, or the engine id that the router was told is wrong",
            )
        else:
            yield ok(one.name, f"side channel at {one.place} answers")


def told_address(facts: Facts) -> Iterator[Finding]:
    """The address that peers are told leads them to the instance, not to themselves."""
    machines = {one.told.about.boot_id for one in facts.instances if one.told}
    for one in facts.instances:
        if one.place is None or not is_loopback(one.place.host) or not one.engine.is_ours:
            continue
        is_far = not is_loopback(one.http_host)
        if len(machines) > 1 or (is_far and one.told is None):
            yield error(
                one.name,
                f"tells its peers to reach it at {one.place}, which on another machine is that "
                "machine itself",
                "Set VLLM_NIXL_SIDE_CHANNEL_HOST (or --side-channel-host) to an address of this "
                "machine that the others reach",
            )
        elif is_far:
            yield warning(
                one.name,
                f"tells its peers to reach it at {one.place}, which only processes on the same "
                "machine can",
                "If others are to reach it, set VLLM_NIXL_SIDE_CHANNEL_HOST (or "
                "--side-channel-host) to an address that they reach",
            )
        elif one.told is not None:
            yield ok(one.name, f"told at {one.place}, and all are on one machine")


def is_loopback(host: str) -> bool:
    """Whether a host names the machine that asks, as 0.0.0.0 does to whoever connects to it."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _source(one: InstanceFacts) -> str:
    assert one.place is not None
    return f"said by {one.place.said_by}" if one.place.said_by else "as given"

"""Do bytes move, and are they the right ones?

Decides what the doctor's own attempts say: NIXL on this machine, KV that it fetched itself, and a
prompt through P and D. Refuses to know how they were made. Pure.
"""

import itertools
from collections.abc import Iterator

from kvcourier.doctor.errands import FetchedTwice, Measured
from kvcourier.doctor.facts import AnswerFacts, ErrandFacts, Facts, ToolFacts, Visit
from kvcourier.doctor.findings import Finding, error, note, ok, warning

_HERE = "this machine"
_ALLOW = "not on the allow-list"
_CHANGED = (
    "Something on the way changes bytes: do not go live. Compare the versions of NIXL and UCX, try "
    "another backend or UCX_TLS, and look at the log of the instance"
)


def machine(facts: Facts) -> Iterator[Finding]:
    """Which fabric this machine has, by the tools that are installed."""
    here = facts.machine
    if here is None:
        return
    for tool in here.tools:
        yield _tool(tool)
    settings = ", ".join(f"{name}={value}" for name, value in here.environment.items())
    if settings:
        yield note(_HERE, f"settings of the doctor's own processes: {settings}")


def _tool(tool: ToolFacts) -> Finding:
    if not tool.is_installed:
        return note(_HERE, f"{tool.what}: {tool.command.split()[0]} is not installed, not asked")
    if tool.exit_code is None:
        return warning(
            _HERE,
            f"{tool.what}: `{tool.command}` does not end: {tool.output}",
            "A driver that hangs hangs NIXL as well; see the kernel's log",
        )
    said = "; ".join(line.strip() for line in tool.output.splitlines() if line.strip())
    shown = said if len(said) <= 300 else said[:297] + "..."
    if tool.exit_code:
        return note(_HERE, f"{tool.what}: none, says `{tool.command}` ({shown or 'nothing'})")
    return ok(_HERE, f"{tool.what}: `{tool.command}` says {shown or 'nothing'}")


def nixl(facts: Facts) -> Iterator[Finding]:
    """NIXL starts here with the instances' backends, and moves known bytes."""
    tried = facts.nixl
    if tried is None:
        return
    problem = tried.problem or (tried.told.problem if tried.told else "")
    if problem and "cannot be imported" in problem:
        yield note(
            _HERE,
            "NIXL is not installed here, so no KV was fetched",
            "Run the doctor on a node, in the environment of P or D, or pip install "
            "'kvcourier[nixl]'",
        )
        return
    if problem:
        said = f"; UCX says: {'; '.join(tried.complaints)}" if tried.complaints else ""
        yield error(
            _HERE,
            f"NIXL moves no bytes between two agents: {problem}{said}",
            "Unset UCX_TLS and UCX_NET_DEVICES, or name transports and devices that are there",
        )
        return
    assert tried.told is not None
    ways = f"; UCX goes {', '.join(tried.ways)}" if tried.ways else ""
    yield ok(
        _HERE,
        f"NIXL {tried.told.version} with {', '.join(tried.told.plugins)} moves bytes{ways}",
    )
    for complaint in tried.complaints:
        yield note(_HERE, f"UCX says: {complaint}")


def fetch(facts: Facts) -> Iterator[Finding]:
    """A prompt's KV comes here by pull and by push, and is the same both times."""
    for visit in facts.visits:
        name = f"{visit.instance.name} -> here"
        if visit.skipped:
            yield note(name, f"no KV was fetched: {visit.skipped}")
        elif visit.result is not None:
            yield from _fetched(name, visit, visit.result)
            yield from _slow_way(name, facts, visit.result)


def _fetched(name: str, visit: Visit, found: ErrandFacts[FetchedTwice]) -> Iterator[Finding]:
    said = f"; UCX says: {'; '.join(found.complaints)}" if found.complaints else ""
    problem = found.problem or (found.told.problem if found.told else "")
    if problem or found.told is None:
        yield error(name, f"no KV could be fetched: {problem}{said}", _unreached(visit))
        return
    failed = [one for one in found.told.fetched if one.reason]
    for one in failed:
        if _ALLOW in one.reason:
            yield note(
                name,
                f"{one.mode}: {one.reason}",
                "Add this machine to its --allow-peer (allowed_peers), or run the doctor where P "
                "or D runs",
            )
        else:
            yield error(name, f"{one.mode}: {one.reason}{said}", _unreached(visit))
    for one in found.told.fetched:
        if not one.reason:
            yield ok(name, f"{one.mode}: KV of {one.num_tokens} tokens in {one.seconds:.2f} s")
    if found.ways:
        yield ok(name, f"UCX goes {', '.join(found.ways)}")
    yield from _compared(name, found.told)


def _slow_way(name: str, facts: Facts, found: ErrandFacts[FetchedTwice]) -> Iterator[Finding]:
    """Whether bytes go over TCP although this machine has something better."""
    devices = facts.machine.rdma_devices if facts.machine else ()
    between = [way for way in found.ways if way.startswith("inter-node")]
    if (
        devices
        and between
        and not any(f"/{device}" in way for way in between for device in devices)
    ):
        yield warning(
            name,
            f"UCX goes {', '.join(between)}, although this machine has {', '.join(devices)}",
            "See that UCX_TLS and UCX_NET_DEVICES leave them in, here and there, and that both are "
            "on one fabric (ibv_devinfo says whether a port is active)",
        )


def _unreached(visit: Visit) -> str:
    place = visit.instance.place
    return (
        "Either the two cannot open connections to each other (side channel: from here to "
        f"{place}, and back to a port that is free here; and the data path of NIXL both ways), or "
        "UCX_TLS differs: see its log, and run the doctor on the other node, too"
    )


def _compared(name: str, told: FetchedTwice) -> Iterator[Finding]:
    compared = told.compared
    if compared is None:
        return
    if compared.outside:
        yield error(
            name, f"{compared.outside} bytes were written beside the blocks they are for", _CHANGED
        )
    if compared.untouched:
        yield error(name, f"{compared.untouched} blocks were called received and are not", _CHANGED)
    elif compared.differing:
        yield warning(
            name,
            f"READ and WRITE brought {compared.differing} of {compared.num_bytes} bytes that "
            f"differ, the first at {compared.first}. Without a prefix cache the instance may have "
            "computed the prompt twice, which need not give the same bits",
            "Run it again with prefix caching on; if they differ still, something on the way "
            "changes bytes: do not go live",
        )
    elif compared.num_bytes and not compared.outside:
        yield ok(name, f"READ and WRITE brought the same {compared.num_bytes} bytes")


def measured(facts: Facts) -> Iterator[Finding]:
    """What it costs to post and to move blocks from each instance to this machine."""
    for visit in facts.visits:
        told = visit.result.told if visit.result else None
        if told is not None and told.measured is not None:
            yield ok(f"{visit.instance.name} -> here", _in_words(told.measured))


def _in_words(seen: Measured) -> str:
    num_bytes = seen.pieces * seen.piece_bytes
    return (
        f"READ of {seen.pieces} pieces of {seen.piece_bytes / 1024:g} KiB: "
        f"{1e6 * seen.post_s / seen.pieces:.1f} us a piece to post, "
        f"{num_bytes / seen.total_s / 1e9:.2f} GB/s in all"
    )


def answers(facts: Facts) -> Iterator[Finding]:
    """A prompt through P and D is answered as P alone answers it."""
    for name, why in facts.not_tried:
        yield note(name, f"no prompt was sent through it: {why}")
    for given in facts.answers:
        yield _answer(given)


def _other_answer(name: str, given: AnswerFacts) -> Finding:
    evidence = (
        f"{given.mode}: through both the answer is {given.found!r}, of P alone {given.expected!r}"
    )
    pairs = zip(given.found, given.expected, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if 2 * shared < len(given.expected):
        return error(
            name,
            evidence,
            "KV arrives wrong, or the two serve other weights: do not go live before you know. "
            "Compare the models' files, and see `fetch`",
        )
    return warning(
        name,
        f"{evidence}: the beginning is the same",
        "P and D may round differently (kernels, tensor parallelism), so that close calls between "
        "tokens fall differently; repeat it. If it is so every time, compare a longer answer",
    )


def _answer(given: AnswerFacts) -> Finding:
    name = f"{given.prefill} -> {given.decode}"
    if given.problem:
        return error(
            name,
            f"{given.mode}: {given.problem}",
            "The logs of P and D have a line with the story of the transfer; GET "
            "/kvcourier/story/ID has it, too, where the engine is ours",
        )
    if given.found != given.expected:
        return _other_answer(name, given)
    if given.failures:
        return warning(
            name,
            f"{given.mode}: answered rightly, but counted meanwhile: {', '.join(given.failures)}",
            "KV may not have come, and D may have computed the prompt itself; see its log",
        )
    if given.num_bytes == 0:
        return warning(
            name,
            f"{given.mode}: answered rightly, but neither side counted a byte that moved",
            "See whether D has computed the prompt itself (--kv-recompute-threshold, prefix cache)",
        )
    moved = "" if given.num_bytes is None else f", {given.num_bytes:.0f} bytes moved"
    return ok(name, f"{given.mode}: answered as by P alone{moved}")

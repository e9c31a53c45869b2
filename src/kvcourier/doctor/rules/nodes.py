"""Do the machines and libraries of P and D go together?

Decides what of versions, NIXL backends, UCX settings and devices keeps bytes from moving, or slows
them down. Refuses to start anything. Pure.
"""

from collections.abc import Iterator, Mapping

from kvcourier.core.inquiry import About
from kvcourier.doctor.facts import Facts, pair_name
from kvcourier.doctor.findings import Finding, error, ok, warning

_COMPARED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kvcourier", ("kvcourier",)),
    ("NIXL", ("nixl", "nixl-cu13", "nixl-cu12")),
    ("vLLM", ("vllm",)),
)

# What a name in UCX_TLS stands for, as UCX documents it; a name that is not here is itself.
_SHARED_MEMORY = frozenset({"posix", "sysv", "xpmem", "cma", "knem"})
_RC = frozenset({"rc_verbs", "rc_mlx5"})
_DC = frozenset({"dc_mlx5"})
_UD = frozenset({"ud_verbs", "ud_mlx5"})
_GPU = frozenset({"cuda_copy", "cuda_ipc", "gdr_copy", "rocm_copy", "rocm_ipc", "rocm_gdr"})
_ALIASES: Mapping[str, frozenset[str]] = {
    "sm": _SHARED_MEMORY,
    "shm": _SHARED_MEMORY,
    "mm": frozenset({"posix", "sysv", "xpmem"}),
    "rc": _RC | _UD,
    "rc_v": frozenset({"rc_verbs"}),
    "rc_x": frozenset({"rc_mlx5"}),
    "rc_mlx5": frozenset({"rc_mlx5"}),
    "dc": _DC,
    "dc_x": _DC,
    "ud": _UD,
    "ud_v": frozenset({"ud_verbs"}),
    "ud_x": frozenset({"ud_mlx5"}),
    "ib": _RC | _DC | _UD,
    "cuda": frozenset({"cuda_copy", "cuda_ipc", "gdr_copy"}),
    "rocm": frozenset({"rocm_copy", "rocm_ipc", "rocm_gdr"}),
}
_INSIDE = _SHARED_MEMORY | _GPU | {"self"}
"""Transports that never leave a machine."""

_ALONE = _GPU | {"self"}
"""Transports that carry nothing between two processes by themselves: they need one for messages."""

_RDMA = _RC | _DC | _UD | {"srd", "gga_mlx5"}


def versions(facts: Facts) -> Iterator[Finding]:
    """P and D run the same releases."""
    for prefill, decode in facts.pairs:
        if prefill.told is None or decode.told is None:
            continue
        name = pair_name(prefill, decode)
        same: list[tuple[str, str, str]] = []
        differing: list[tuple[str, str, str]] = []
        for what, packages in _COMPARED:
            left, right = (
                next((each.versions[name] for name in packages if name in each.versions), None)
                for each in (prefill.told.about, decode.told.about)
            )
            if left and right:
                (same if left == right else differing).append((what, left, right))
        for what, left, right in differing:
            yield warning(
                name,
                f"{what}: {left} on P, {right} on D",
                "Install the same release on both; other pairs of releases are not tested",
            )
        if same:
            yield ok(name, ", ".join(f"{what} {left}" for what, left, _ in same))


def backends(facts: Facts) -> Iterator[Finding]:
    """P and D have a NIXL backend in common."""
    for prefill, decode in facts.pairs:
        if prefill.told is None or decode.told is None:
            continue
        name = pair_name(prefill, decode)
        left, right = prefill.told.about.backends, decode.told.about.backends
        shared = [each for each in left if each in right]
        if shared:
            yield ok(name, f"both use {', '.join(shared)}")
        else:
            yield error(
                name,
                f"P uses {', '.join(left)}, D uses {', '.join(right)}: none in common",
                "Give both the same backends (--nixl-backend; backends in vLLM)",
            )


def ucx(facts: Facts) -> Iterator[Finding]:
    """UCX's settings leave P and D a way to each other, and RDMA devices are not left out."""
    for prefill, decode in facts.pairs:
        if prefill.told is None or decode.told is None:
            continue
        name = pair_name(prefill, decode)
        sides = {"P": prefill.told.about, "D": decode.told.about}
        if not all("UCX" in each.backends for each in sides.values()):
            continue
        troubles = [*_common_way(name, sides), *_devices(name, sides)]
        yield from troubles
        if not troubles:
            yield ok(name, ", ".join(f"{side}: {_described(each)}" for side, each in sides.items()))


def transports(text: str | None) -> frozenset[str] | None:
    """The transports that a value of UCX_TLS allows; None: all, or all but some."""
    names = [each.strip() for each in (text or "all").split(",") if each.strip()]
    if not names or names[0].startswith("^") or "all" in names:
        return None
    return frozenset().union(*(_ALIASES.get(each, frozenset({each})) for each in names))


def _common_way(name: str, sides: Mapping[str, About]) -> Iterator[Finding]:
    allowed = {side: transports(each.environment.get("UCX_TLS")) for side, each in sides.items()}
    told = ", ".join(
        f"{side} has UCX_TLS={each.environment.get('UCX_TLS', '(not set)')}"
        for side, each in sides.items()
    )
    known = [each for each in allowed.values() if each is not None]
    if not known:
        return
    shared = frozenset.intersection(*known)
    machines = {each.boot_id for each in sides.values()}
    if not shared - _ALONE:
        yield error(
            name,
            f"{told}: no transport in common that carries messages between two processes",
            "Give both the same UCX_TLS, or leave it unset on both",
        )
    elif len(machines) > 1 and not shared - _INSIDE:
        yield error(
            name,
            f"{told}: only transports within one machine, and they are on two",
            "Add one that leaves the machine (rc, tcp, ...), or leave UCX_TLS unset on both",
        )


def _devices(name: str, sides: Mapping[str, About]) -> Iterator[Finding]:
    for side, each in sides.items():
        allowed = transports(each.environment.get("UCX_TLS"))
        named = [
            device.partition(":")[0]
            for device in each.environment.get("UCX_NET_DEVICES", "").split(",")
            if ":" in device and not device.startswith("^")
        ]
        missing = [device for device in named if device not in each.rdma_devices]
        if missing:
            yield error(
                name,
                f"{side} has UCX_NET_DEVICES={each.environment['UCX_NET_DEVICES']}, but sees "
                f"{', '.join(each.rdma_devices) or 'no RDMA device'}",
                "Name a device that is there (ibv_devices lists them), or leave it unset; in a "
                "container, pass the devices in",
            )
        if each.rdma_devices and allowed is not None and not allowed & _RDMA:
            yield warning(
                name,
                f"{side} has {', '.join(each.rdma_devices)}, but UCX_TLS="
                f"{each.environment['UCX_TLS']} leaves RDMA out",
                "Add rc (or ib) to UCX_TLS, or leave it unset",
            )
    with_rdma = [side for side, each in sides.items() if each.rdma_devices]
    if len(with_rdma) == 1 and len({each.boot_id for each in sides.values()}) > 1:
        other = next(side for side in sides if side not in with_rdma)
        yield warning(
            name,
            f"{with_rdma[0]} sees {', '.join(sides[with_rdma[0]].rdma_devices)}, {other} no RDMA "
            "device: bytes go over TCP",
            "In a container, pass the devices in (/dev/infiniband, and the capability IPC_LOCK)",
        )


def _described(about: About) -> str:
    tls = about.environment.get("UCX_TLS", "not set")
    devices = ", ".join(about.rdma_devices) or "none"
    return f"UCX_TLS {tls}, RDMA devices {devices}"

"""Where an instance's word about itself comes from: its settings, libraries and machine.

Decides what is worth telling to whoever asks why KV does not move (`core/inquiry.py`). Refuses to
start a process or to load a library for it: what it tells was known, or is a small file away.
"""

import contextlib
import dataclasses
import functools
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from kvcourier.config import EndpointConfig
from kvcourier.core.inquiry import About

_PACKAGES = ("kvcourier", "nixl", "nixl-cu12", "nixl-cu13", "vllm", "torch", "transformers")
_PREFIXES = ("UCX_", "NIXL_", "FI_", "RDMAV_")
_RDMA = Path("/sys/class/infiniband")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_VALUE = 1024
_MOST_VARIABLES = 64


def about(config: EndpointConfig, environment: Mapping[str, str] | None = None) -> About:
    """What can be told of an instance with this configuration in this process.

    Args:
        environment: variables to look at; `os.environ` if None.
    """
    staging = config.courier.staging
    return About(
        host_name=platform.node(),
        boot_id=boot_id(),
        versions=dict(versions()),
        backends=list(config.courier.backends),
        environment=fabric_environment(os.environ if environment is None else environment),
        rdma_devices=rdma_devices(),
        timing=dataclasses.asdict(config.timing),
        staging={name: str(value) for name, value in dataclasses.asdict(staging).items()},
        allows_all_peers=config.allowed_peers is None,
        tells_stories=config.tells_stories,
    )


@functools.cache
def versions() -> Mapping[str, str]:
    """Python's, and those of the packages that matter and are installed, without loading them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def fabric_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that UCX, NIXL and libfabric read, cut to a length that can be told."""
    names = sorted(name for name in environment if name.startswith(_PREFIXES))
    return {name: environment[name][:_LONGEST_VALUE] for name in names[:_MOST_VARIABLES]}


def rdma_devices() -> list[str]:
    """InfiniBand, RoCE and EFA devices of this machine, as this process sees them."""
    try:
        return sorted(each.name for each in _RDMA.iterdir())[:_MOST_VARIABLES]
    except OSError:
        return []


def boot_id() -> str:
    """The name of this life of this machine; empty where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()[:64]
    except OSError:
        return ""

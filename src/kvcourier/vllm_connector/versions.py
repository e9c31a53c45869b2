"""What differs between releases of vLLM; the only file that knows.

Decides which release is supported and what stands in for a hook that a release does not have.
Refuses to know transfers. docs/vllm.md has the table of hooks.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

import vllm

_log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 26), (0, 33)
"""Releases whose hooks were checked, both included."""


@dataclass
class _TransferResults:
    """What `get_transfer_results` returns, where vLLM has no type for it."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


TransferResults: Any = getattr(base, "KVConnectorTransferResults", _TransferResults)

REPORTS_FAILED_REQUESTS = hasattr(base, "KVConnectorTransferResults")
"""Whether vLLM asks for failed requests by name; older ones ask for the blocks of failed loads."""

HybridSupport: Any = base.SupportsHMA if REPORTS_FAILED_REQUESTS else object
"""Claims support for several cache groups, where a failed receive of such a model can be told:
older releases know blocks only, and look for them in one group."""


def warn_if_untested() -> None:
    """Say so if this release of vLLM was not looked at; it may work all the same."""
    parts = vllm.__version__.split(".")[:2]
    release = tuple(int(part) for part in parts if part.isdecimal())
    if len(release) == 2 and not OLDEST <= release <= NEWEST:
        _log.warning(
            "kvcourier was checked against vLLM %d.%d to %d.%d, this is %s",
            *OLDEST,
            *NEWEST,
            vllm.__version__,
        )


def required_layout(uses_mla: bool) -> str | None:
    """The layout to ask for: heads outside tokens, so that a head shard is one run of bytes.

    Newer releases name layouts by all their dimensions.
    """
    if uses_mla:
        return None
    return "LBHNC" if REPORTS_FAILED_REQUESTS and _names_all_dimensions() else "HND"


def attention_backends(vllm_config: Any) -> list[str]:
    """Names of the attention backends in use: they decide what a block's bytes mean."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return sorted({backend.get_name() for backend in get_current_attn_backends(vllm_config)})


def _names_all_dimensions() -> bool:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    return "kv_cache_layout" in getattr(KVCacheConfig, "__dataclass_fields__", {})

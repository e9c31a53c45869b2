"""vLLM's side of kvcourier, loaded out of tree.

    --kv-transfer-config '{"kv_connector": "CourierConnector",
                           "kv_connector_module_path": "kvcourier.vllm_connector",
                           "kv_role": "kv_producer", ...}'

Decides nothing about transfers: it translates vLLM's hooks into engine calls and the couriers'
reports back. The only package that imports vllm.

Reading path: `connector` (vLLM's hooks), `scheduler_side` (which call a hook means), `intents`
(what of a client's parameters is used), `turns` (what is kept and fetched of conversations),
`admission` (who may have blocks, and when), `worker_side` (the rank's courier), `caches` (vLLM's
tensors as cache groups), `block_tables` (vLLM's block ids as ours), `stats`, `traces` (spans),
`settings`, `versions`.

Common changes: a hook that differs between releases of vLLM goes into `versions`; a new kind of
cache into `caches`; a new key of `kv_connector_extra_config` into `settings` and docs/vllm.md.
"""

from typing import Any

__all__ = ["CourierConnector"]


def __getattr__(name: str) -> Any:
    # Loaded when vLLM asks for the class: the other modules are usable, and tested, without vLLM.
    if name == "CourierConnector":
        from kvcourier.vllm_connector.connector import CourierConnector

        return CourierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a doctor has done by a process of its own, since it takes NIXL.

Decides the words between the doctor and that process. Refuses to know how either works. In a
process of its own, a library that hangs or ends it by a signal costs one finding, UCX can be asked
to say which transports it takes, and a doctor without NIXL still has all its other questions.
"""

from typing import Any

import msgspec

from kvcourier.config import TransferMode
from kvcourier.doctor.scratch import Compared


class TryNixl(msgspec.Struct, frozen=True, tag="try_nixl"):
    """Make two agents and move known bytes from one to the other."""

    backends: list[str]


class FetchTwice(msgspec.Struct, frozen=True, tag="fetch_twice"):
    """Have an instance compute a short prompt for us, once a mode, and fetch its KV as a D would.

    Attributes:
        url, api_key, model, prompt: of the request.
        engine_id, host, port: of the instance's side channel.
        own_id, secret_key_file, peer_keys: as whom we speak there.
        own_host: address at which the instance finds us; empty: that of the way to it.
        modes: how to fetch.
        tokens: no prompt may have more.
        timeout_s: for each request and each transfer.
        handoff: kv_transfer_params of a prompt to let go of first; None: of none.
    """

    url: str
    api_key: str | None
    model: str
    prompt: str
    engine_id: str
    host: str
    port: int
    own_id: str
    secret_key_file: str | None
    peer_keys: str | None
    own_host: str
    modes: list[TransferMode]
    tokens: int
    timeout_s: float
    handoff: dict[str, Any] | None = None


Errand = TryNixl | FetchTwice


class NixlTried(msgspec.Struct, frozen=True):
    """What came of `TryNixl`.

    Attributes:
        problem: why bytes did not move; empty if they did.
        plugins: all that NIXL has here.
        version: NIXL's.
    """

    problem: str = ""
    plugins: list[str] = []
    version: str = ""


class Fetched(msgspec.Struct, frozen=True):
    """One fetch. `reason` says why it failed; empty if it did not."""

    mode: TransferMode
    reason: str
    num_tokens: int = 0
    seconds: float = 0.0


class Measured(msgspec.Struct, frozen=True):
    """READs of the prompt's blocks, again and again: what it cost to post them and to move them."""

    pieces: int
    piece_bytes: int
    post_s: float
    total_s: float


class FetchedTwice(msgspec.Struct, frozen=True):
    """What came of `FetchTwice`; `problem` says why nothing did."""

    problem: str = ""
    fetched: list[Fetched] = []
    compared: Compared | None = None
    measured: Measured | None = None

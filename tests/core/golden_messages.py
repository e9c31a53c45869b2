"""One example of every message, whose bytes are kept for every protocol version.

    python tests/core/golden_messages.py

writes the bytes of the present `PROTOCOL_VERSION`. It refuses to touch those of a version that
has some: bytes that peers in the field send and expect cannot be changed, only versioned.
"""

from pathlib import Path

from kvcourier.config import TransferMode
from kvcourier.core import handshake
from kvcourier.core.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Beat,
    Cancel,
    CloseStream,
    Collected,
    Computed,
    Digest,
    Digested,
    Fail,
    Fenced,
    GrantSlots,
    Held,
    HoldName,
    Landed,
    Nudge,
    OpenStream,
    Parcel,
    RefuseStream,
    Register,
    Registered,
    Renew,
    Renewed,
    RenewItem,
    SenderFields,
    ShareItem,
    encode,
)
from kvcourier.ids import EngineId
from kvcourier.layout import CacheKind, CacheLayout, MemoryKind

GOLDEN = Path(__file__).parent / "golden"

PREFILL = SenderFields("prefill-0", "life-p", (0, 1))
DECODE = SenderFields("decode-0", "life-d", (1, 0))
NAME = HoldName("transfer-7", 1, "cmpl-7", "life-p:42")

MESSAGES: dict[str, AnyMessage] = {
    "register": Register(
        sender=DECODE,
        name=NAME,
        request_id="cmpl-7-0123abcd",
        decode_host="10.0.0.2",
        decode_port=5601,
        decode_tp_size=1,
        decode_pp_size=2,
        local_block_ids=[[7, 0, 300, 70000]],
        first_token=16,
        num_tokens=49,
        consumers=[(0, 0), (1, 0)],
        epoch=2,
        reads=True,
    ),
    "beat": Beat(DECODE, is_question=True),
    "computed": Computed(PREFILL, "cmpl-7-0123abcd", 2, "go on"),
    "nudge": Nudge(PREFILL),
    "registered": Registered(PREFILL, "cmpl-7-0123abcd", 2),
    "landed": Landed(
        PREFILL,
        "cmpl-7-0123abcd",
        16,
        49,
        route=1,
        epoch=2,
        layers=[0, 5],
        continuation="198:0123456789abcdef0123456789abcdef",
    ),
    "held": Held(
        PREFILL,
        "cmpl-7-0123abcd",
        "life-p:42",
        [[7, 0, 300, 70000]],
        65,
        2,
        "198:0123456789abcdef0123456789abcdef",
    ),
    "fail": Fail(PREFILL, "cmpl-7-0123abcd", "the write failed", held=True, quiet=False, epoch=2),
    "cancel": Cancel(DECODE, NAME, "cmpl-7-0123abcd", [(0, 0), (1, 0)], 2, for_now=True),
    "fenced": Fenced(PREFILL, "cmpl-7-0123abcd", 2),
    "collected": Collected(DECODE, NAME, "cmpl-7-0123abcd", True, [(1, 0)]),
    "digest": Digest(
        DECODE,
        NAME,
        "cmpl-7-0123abcd",
        [ShareItem(0, [0, 5], 2, 4, 16, 49)],
        whole=True,
        seed=(1 << 60) - 1,
    ),
    "digested": Digested(PREFILL, "cmpl-7-0123abcd", 7, [(1 << 64) - 1, 0], "not held any more"),
    "renew": Renew(
        DECODE,
        9,
        [
            RenewItem(NAME, "cmpl-7-0123abcd", True, bytes(range(16)), 65),
            RenewItem(HoldName(), "r"),
        ],
        "10.0.0.2",
        5601,
    ),
    "renewed": Renewed(PREFILL, 9, 30.0, ["a"], ["b"], ["c", "d"], ["e"], ["a"]),
    "open_stream": OpenStream(
        PREFILL, 5, Landed(PREFILL, "cmpl-7-0123abcd", 16, 24, 0, 0, [0, 1]), 1 << 27, 3
    ),
    "grant_slots": GrantSlots(DECODE, 5, 1, [3, 0]),
    "refuse_stream": RefuseStream(DECODE, 5, "no staging: this rank has none"),
    "parcel": Parcel(PREFILL, 5, 1, 3),
    "close_stream": CloseStream(PREFILL, 5, [0]),
}

FACTS = handshake.Facts("SmolLM2-135M", CacheKind.KEY_VALUE, 3, 3, 64, "bfloat16", 2)
OFFER = handshake.Offer(
    engine_id="prefill-0",
    incarnation="life-p",
    modes=[TransferMode.PULL, TransferMode.PUSH],
    facts=FACTS,
    tp_size=1,
    pp_size=1,
    ranks=[
        handshake.RankOffer(
            rank=(0, 0),
            agent_name="prefill-0:life-p:pp0tp0",
            agent_metadata=b"\x00\x01opaque",
            side_channel_port=40000,
            groups=[
                handshake.GroupOffer(
                    kind=CacheKind.KEY_VALUE,
                    layers=layers,
                    num_kv_heads=3,
                    head_start=0,
                    head_stop=3,
                    head_dim=64,
                    dtype="bfloat16",
                    itemsize=2,
                    block_size=16,
                    num_blocks=8,
                    cache_layout=CacheLayout.NHD,
                    window=window,
                    num_reserved_blocks=1,
                    placement_region=[region for region in range(len(layers)) for _ in "kv"],
                    placement_offset=[0, 49152] * len(layers),
                    placement_stride=[6144, 6144] * len(layers),
                )
                for layers, window in (([0, 1], None), ([2], 128))
            ],
            regions=[
                (1 << 40, 98304, MemoryKind.DRAM, 0),
                (1 << 41, 98304, MemoryKind.DRAM, 0),
            ],
            staging=handshake.StagingOffer(1 << 42, 1 << 23, 4, MemoryKind.DRAM, 0),
        )
    ],
)
REQUEST = handshake.request(EngineId("prefill-0"), TransferMode.PUSH, FACTS)
WRONG_REQUEST = handshake.request(EngineId("prefill-1"), TransferMode.PUSH, FACTS)


def payloads() -> dict[str, bytes]:
    """The bytes of every example as this version writes them, by name."""
    return {name: encode(message) for name, message in MESSAGES.items()} | {
        "handshake_request": REQUEST,
        "handshake_accepted": handshake.answer(REQUEST, OFFER),
        "handshake_refused": handshake.answer(WRONG_REQUEST, OFFER),
    }


def folder(version: int) -> Path:
    """Where a version's bytes are kept."""
    return GOLDEN / f"v{version}"


def main() -> None:
    """Write the bytes of a new version."""
    target = folder(PROTOCOL_VERSION)
    if any(target.glob("*.bin")):
        raise SystemExit(f"{target} is complete and stays as it is: raise PROTOCOL_VERSION first")
    target.mkdir(parents=True, exist_ok=True)
    for name, payload in payloads().items():
        (target / f"{name}.bin").write_bytes(payload)
    print(f"wrote {len(payloads())} files to {target}")


if __name__ == "__main__":
    main()

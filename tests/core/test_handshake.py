"""The verdict names everything that differs, and no offer, however hostile, gets further."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.golden_messages import FACTS, OFFER, REQUEST, folder
from core.wire_strategies import wire
from kvcourier.config import Limits, TransferMode
from kvcourier.core.handshake import (
    Compatibility,
    Facts,
    HandshakeAccepted,
    HandshakeRefused,
    HandshakeRequest,
    Offer,
    PeerInstance,
    answer,
    facts_of,
    judge,
    rank_offer,
    read_answer,
    request,
    topology,
)
from kvcourier.core.messages import PROTOCOL_VERSION
from kvcourier.errors import HandshakeRejected, MappingError, RemoteProtocolError
from kvcourier.ids import AgentName, EngineId, Incarnation, Rank
from kvcourier.layout import CacheKind, CachePlacement, RankCache, instance_geometries
from layout_builders import PlacementStyle, make_instance, model_cache, one_group

P = EngineId("prefill-0")
LIMITS = Limits()
FUZZ = settings(max_examples=300)


def make_offer(
    tp_size: int = 2, pp_size: int = 1, style: PlacementStyle = PlacementStyle.SEPARATE, **model
) -> tuple[Offer, dict[Rank, RankCache]]:
    """What an instance with real caches offers."""
    geometries = instance_geometries(model_cache(**model), tp_size, pp_size)
    caches = {
        rank: RankCache((cache,)) for rank, (cache, _) in make_instance(geometries, style).items()
    }
    return Offer(
        engine_id=P,
        incarnation="life-1",
        modes=sorted(TransferMode),
        facts=facts_of("a-model", one_group(geometries)),
        tp_size=tp_size,
        pp_size=pp_size,
        ranks=[
            rank_offer(cache, AgentName(f"agent-{rank}"), b"\x00meta", 4000 + index)
            for index, (rank, cache) in enumerate(caches.items())
        ],
    ), caches


def shake(
    offer: Offer, *, mode: TransferMode = TransferMode.PULL, facts: Facts | None = None
) -> PeerInstance:
    """Ask and be answered, through the bytes."""
    mine = facts or offer.facts
    return read_answer(answer(request(P, mode, mine), offer), P, mine, LIMITS)


def reasons_of(attempt: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(HandshakeRejected) as caught:
        attempt()
    return caught.value.reasons


def outcome(payload: bytes, facts: Facts = FACTS) -> PeerInstance | None:
    """The peer, or None where the answer is refused; anything else escapes."""
    try:
        return read_answer(payload, P, facts, LIMITS)
    except (HandshakeRejected, RemoteProtocolError) as error:
        assert str(error)
        return None


# What fits.


@pytest.mark.parametrize("style", PlacementStyle)
@pytest.mark.parametrize(
    "shape",
    [
        {"tp_size": 1},
        {"tp_size": 4},
        {"tp_size": 2, "pp_size": 2},
        {"tp_size": 4, "num_kv_heads": 2},
        {"tp_size": 2, "num_kv_heads": 1, "kind": CacheKind.LATENT},
    ],
    ids=str,
)
def test_an_offer_arrives_as_it_was_made(style, shape):
    offer, caches = make_offer(style=style, **shape)
    peer = shake(offer)
    assert (peer.engine_id, peer.incarnation) == (P, Incarnation("life-1"))
    assert (peer.tp_size, peer.pp_size) == (shape["tp_size"], shape.get("pp_size", 1))
    assert peer.modes == frozenset(TransferMode)
    assert peer.geometries == {rank: cache.geometries for rank, cache in caches.items()}
    for index, (rank, cache) in enumerate(caches.items()):
        contact = peer.ranks[rank]
        assert contact.cache.rank == rank
        assert contact.cache.regions == cache.regions
        for field in dataclasses.fields(CachePlacement):
            sent = getattr(cache.groups[0].placement, field.name)
            came = getattr(contact.cache.groups[0].placement, field.name)
            assert came.dtype == np.int64
            assert np.array_equal(sent, came)
        assert contact.agent_name == f"agent-{rank}"
        assert contact.agent_metadata == b"\x00meta"
        assert contact.side_channel_port == 4000 + index


def test_facts_span_all_pipeline_stages():
    geometries = instance_geometries(model_cache(num_layers=5), 2, 3)
    assert facts_of("m", one_group(geometries)) == Facts(
        "m", CacheKind.KEY_VALUE, 5, 4, 4, "float16", 2
    )


def test_different_shards_block_sizes_and_layouts_fit():
    ours, _ = make_offer(tp_size=4, block_size=32, num_blocks=4)
    theirs, _ = make_offer(tp_size=1, pp_size=2)
    assert judge(ours.facts, theirs.facts) == Compatibility(())
    assert judge(ours.facts, theirs.facts).compatible


# The verdict.

DIFFERENT = {
    "model": "another",
    "kind": CacheKind.LATENT,
    "num_layers": 9,
    "num_kv_heads": 7,
    "head_dim": 5,
    "dtype": "float8_e4m3",
    "itemsize": 1,
    "cache_format": "fp8",
}


def test_the_verdict_has_a_sentence_for_each_field_that_differs():
    assert set(DIFFERENT) == set(Facts.__struct_fields__)
    other = msgspec.structs.replace(FACTS, **DIFFERENT)
    verdict = judge(FACTS, other)
    assert not verdict.compatible
    assert verdict.reasons == tuple(
        f"{field}: {getattr(FACTS, field)} here, {value} there"
        for field, value in DIFFERENT.items()
    )


@pytest.mark.parametrize("field", DIFFERENT)
def test_one_difference_is_one_reason(field):
    other = msgspec.structs.replace(FACTS, **{field: DIFFERENT[field]})
    (reason,) = judge(FACTS, other).reasons
    assert reason.startswith(f"{field}: ")


def test_everything_wrong_is_told_at_once():
    """vllm#23587 took the server down, vllm#50620 paired push with pull: here both are reasons."""
    offer = msgspec.structs.replace(OFFER, modes=[TransferMode.PULL])
    other = msgspec.structs.replace(FACTS, **DIFFERENT)
    asked = request(EngineId("prefill-9"), TransferMode.PUSH, other)
    reasons = reasons_of(
        lambda: read_answer(answer(asked, offer), EngineId("prefill-9"), other, LIMITS)
    )
    assert [reason.split(":")[0] for reason in reasons] == [*DIFFERENT, "engine_id", "mode"]
    assert reasons[-2] == "engine_id: prefill-0 here, prefill-9 asked for"
    assert reasons[-1] == "mode: pull here, push asked for"


def test_the_asker_judges_too():
    """A peer that accepts whatever comes does not get its way."""
    offer = msgspec.structs.replace(
        OFFER, facts=msgspec.structs.replace(FACTS, model="another", head_dim=128), tp_size=2
    )
    accepted = msgspec.msgpack.encode(HandshakeAccepted(PROTOCOL_VERSION, offer))
    reasons = reasons_of(lambda: read_answer(accepted, EngineId("prefill-9"), FACTS, LIMITS))
    assert [reason.split(":")[0] for reason in reasons] == [
        "model",
        "head_dim",
        "engine_id",
        "ranks",
    ]
    assert "prefill-9 asked for, prefill-0 answered" in reasons[2]


@pytest.mark.parametrize("mode", TransferMode)
def test_a_mode_that_is_not_offered_is_refused(mode):
    others = [each for each in TransferMode if each is not mode]
    offer = msgspec.structs.replace(OFFER, modes=others)
    (reason,) = reasons_of(lambda: shake(offer, mode=mode))
    assert reason == f"mode: {others[0]} here, {mode} asked for"
    assert shake(offer, mode=others[0]).modes == frozenset(others)


# Versions.


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -7, (1 << 63) - 1])
def test_another_version_is_refused_by_name_before_anything_else(version):
    """Nothing else of the message needs to make sense to this version."""
    payload = msgspec.msgpack.encode({"protocol_version": version, "type": "next", "x": [1]})
    expected = f"protocol_version: {PROTOCOL_VERSION} here, {version} there"
    assert reasons_of(lambda: read_answer(payload, P, FACTS, LIMITS)) == (expected,)
    refusal = msgspec.msgpack.decode(answer(payload, OFFER), type=HandshakeRefused)
    assert refusal.reasons == [expected]


@pytest.mark.parametrize("version", [None, "1", 1.5, True, [1]])
def test_a_version_that_is_no_number_is_malformed(version):
    payload = msgspec.msgpack.encode({"protocol_version": version})
    with pytest.raises(RemoteProtocolError, match="no kvcourier handshake"):
        answer(payload, OFFER)
    with pytest.raises(RemoteProtocolError, match="no kvcourier handshake"):
        read_answer(payload, P, FACTS, LIMITS)


def test_a_refusal_arrives_with_its_reasons():
    payload = msgspec.msgpack.encode(HandshakeRefused(PROTOCOL_VERSION, ["too", "bad"]))
    assert reasons_of(lambda: read_answer(payload, P, FACTS, LIMITS)) == ("too", "bad")


@pytest.mark.parametrize(("sent", "kept"), [(0, 1), (64, 64), (1000, 64)])
def test_a_refusal_has_at_least_one_and_at_most_64_reasons(sent, kept):
    payload = msgspec.msgpack.encode(HandshakeRefused(PROTOCOL_VERSION, ["no"] * sent))
    assert len(reasons_of(lambda: read_answer(payload, P, FACTS, LIMITS))) == kept


@pytest.mark.parametrize("reasons", [[], [""], ["", ""]])
def test_a_refusal_without_a_word_is_given_some(reasons):
    payload = msgspec.msgpack.encode(HandshakeRefused(PROTOCOL_VERSION, reasons))
    assert reasons_of(lambda: read_answer(payload, P, FACTS, LIMITS)) == (
        "refused without a reason",
    )


def test_an_answer_that_is_too_long():
    payload = answer(REQUEST, OFFER)
    with pytest.raises(RemoteProtocolError, match="too long"):
        read_answer(payload, P, FACTS, Limits(max_message_bytes=len(payload) - 1))


# Hostile offers. Each entry: where in the offer, what is put there.

HUGE = (1 << 31) - 1
RANK = ("ranks", 0)
GROUP = (*RANK, "groups", 0)
HOSTILE: list[tuple[tuple[Any, ...], Any]] = [
    (("tp_size",), 0),
    (("tp_size",), 2),
    (("tp_size",), -1),
    (("tp_size",), HUGE),
    (("pp_size",), HUGE),
    (("pp_size",), 1 << 62),
    (("engine_id",), "another"),
    (("engine_id",), ""),
    (("incarnation",), "x" * 257),
    (("modes",), ["teleport"]),
    (("modes",), None),
    (("ranks",), []),
    (("ranks",), {}),
    (("facts", "kind"), "latent"),
    (("facts", "num_layers"), HUGE),
    (("facts", "itemsize"), 0),
    ((*RANK, "rank"), [0, 1]),
    ((*RANK, "rank"), [0]),
    ((*RANK, "rank"), [-1, 0]),
    ((*RANK, "side_channel_port"), 0),
    ((*RANK, "side_channel_port"), 65536),
    ((*RANK, "agent_metadata"), 7),
    ((*GROUP, "layers"), []),
    ((*GROUP, "layers"), [0]),
    ((*GROUP, "layers"), [0, 0]),
    ((*GROUP, "layers"), [0, HUGE]),
    ((*GROUP, "layers"), [0, -1]),
    ((*GROUP, "head_start"), 3),
    ((*GROUP, "head_start"), HUGE),
    ((*GROUP, "head_stop"), 0),
    ((*GROUP, "head_stop"), 4),
    ((*GROUP, "head_stop"), HUGE),
    ((*GROUP, "block_size"), 0),
    ((*GROUP, "block_size"), 17),
    ((*GROUP, "block_size"), HUGE),
    ((*GROUP, "num_blocks"), 0),
    ((*GROUP, "num_blocks"), 9),
    ((*GROUP, "num_blocks"), HUGE),
    ((*GROUP, "cache_layout"), "DHN"),
    ((*GROUP, "placement_region"), [0, 0, 1]),
    ((*GROUP, "placement_region"), [0, 0, 1, 1, 1]),
    ((*GROUP, "placement_region"), [0, 0, 1, 2]),
    ((*GROUP, "placement_region"), [0, 0, 1, HUGE]),
    ((*GROUP, "placement_offset"), []),
    ((*GROUP, "placement_offset"), [0, 49153, 0, 49152]),
    ((*GROUP, "placement_offset"), [(1 << 62) - 1] * 4),
    ((*GROUP, "placement_offset"), [-1, 0, 0, 0]),
    ((*GROUP, "placement_offset"), [1 << 62] * 4),
    ((*GROUP, "placement_stride"), [0] * 4),
    ((*GROUP, "placement_stride"), [6143] * 4),
    ((*GROUP, "placement_stride"), [(1 << 62) - 1] * 4),
    ((*GROUP, "placement_stride"), [6144] * 100_000),
    ((*GROUP, "kind"), "latent"),
    ((*GROUP, "num_kv_heads"), 2),
    ((*GROUP, "head_dim"), 65),
    ((*GROUP, "head_dim"), HUGE),
    ((*GROUP, "itemsize"), 0),
    ((*GROUP, "dtype"), ""),
    ((*GROUP, "window"), 0),
    ((*GROUP, "window"), 1),
    ((*GROUP, "window"), HUGE),
    ((*GROUP, "num_reserved_blocks"), 8),
    ((*GROUP, "num_reserved_blocks"), -1),
    ((*RANK, "groups", 1, "layers"), [1]),
    ((*RANK, "groups"), []),
    ((*RANK, "regions"), []),
    ((*RANK, "regions"), [[1 << 40, 98304, "DRAM", 0]] * 7),
    ((*RANK, "regions"), [[1 << 40, 98303, "DRAM", 0]] * 2),
    ((*RANK, "regions"), [[1 << 40, 0, "DRAM", 0]] * 2),
    ((*RANK, "regions"), [[-1, 98304, "DRAM", 0]] * 2),
    ((*RANK, "regions"), [[1 << 40, 98304, "TAPE", 0]] * 2),
    ((*RANK, "regions"), [[1 << 40, 98304, "DRAM", HUGE]] * 2),
    ((*RANK, "regions"), [[1 << 40, 98304, "DRAM"]] * 2),
    ((*RANK, "regions"), [[1 << 62, 98304, "DRAM", 0]] * 2),
]


def accepted_but(path: tuple[Any, ...], value: object) -> bytes:
    """The golden answer with one thing put in a place of its offer."""
    tree = msgspec.msgpack.decode(answer(REQUEST, OFFER))
    place = tree["offer"]
    for step in path[:-1]:
        place = place[step]
    assert path[-1] in place
    place[path[-1]] = value
    return msgspec.msgpack.encode(tree)


def test_the_golden_offer_is_good():
    assert outcome(accepted_but(("incarnation",), "life-2")) is not None


@pytest.mark.parametrize(
    ("path", "value"),
    HOSTILE,
    ids=[f"{'.'.join(map(str, path))}={str(value)[:40]}" for path, value in HOSTILE],
)
def test_a_hostile_offer_is_refused(path, value):
    assert outcome(accepted_but(path, value)) is None


def test_ranks_listed_twice_or_not_at_all():
    offer, _ = make_offer(tp_size=2)
    first, second = offer.ranks
    for ranks in ([first], [first, first], [first, second, second]):
        (reason,) = reasons_of(lambda r=ranks: shake(msgspec.structs.replace(offer, ranks=r)))
        assert reason == "ranks: pp 1 x tp 2 announced, other ranks listed"


def test_more_ranks_than_are_taken():
    offer = msgspec.structs.replace(OFFER, tp_size=LIMITS.max_ranks + 1)
    (reason,) = reasons_of(lambda: shake(offer))
    assert reason == f"ranks: 1 to {LIMITS.max_ranks} are taken, {LIMITS.max_ranks + 1} there"


def test_the_rank_with_a_bad_placement_is_named():
    offer, _ = make_offer(tp_size=2)
    group = msgspec.structs.replace(offer.ranks[1].groups[0], num_blocks=100)
    bad = msgspec.structs.replace(offer.ranks[1], groups=[group])
    (reason,) = reasons_of(
        lambda: shake(msgspec.structs.replace(offer, ranks=[offer.ranks[0], bad]))
    )
    assert reason.startswith("rank pp0tp1: cache of rank pp0tp1: layer 0, plane 0: expected all")


# Fuzz.


@pytest.mark.slow
@given(offer=wire(Offer))
@FUZZ
def test_any_offer_of_the_right_types(offer):
    payload = msgspec.msgpack.encode(HandshakeAccepted(PROTOCOL_VERSION, offer))
    assert msgspec.msgpack.decode(payload, type=HandshakeAccepted).offer == offer
    try:
        read_answer(payload, EngineId(offer.engine_id), offer.facts, LIMITS)
    except (HandshakeRejected, RemoteProtocolError) as error:
        assert str(error)


@pytest.mark.slow
@given(asked=wire(HandshakeRequest))
@FUZZ
def test_any_request_of_the_right_types_is_answered(asked):
    reply = answer(msgspec.msgpack.encode(asked), OFFER)
    assert msgspec.msgpack.decode(reply, type=HandshakeAccepted | HandshakeRefused)


@pytest.mark.slow
@given(path=st.sampled_from([path for path, _ in HOSTILE]), data=st.data())
@FUZZ
def test_any_value_in_any_place_of_an_offer(path, data):
    value = data.draw(
        st.none()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats()
        | st.text(max_size=300)
        | st.lists(st.integers(-2, HUGE) | st.text(max_size=2), max_size=6)
    )
    outcome(accepted_but(path, value))


def test_damaged_bytes_are_refused_or_understood():
    """Truncated at every length, every bit flipped, and 10,000 random changes of a fixed seed."""
    chance = random.Random(10_000)
    reply = (folder(PROTOCOL_VERSION) / "handshake_accepted.bin").read_bytes()
    for original, read in ((reply, outcome), (REQUEST, answered)):
        assert read(original) is not None
        for length in range(len(original)):
            assert read(original[:length]) is None
        for bit in range(8 * len(original)):
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << bit % 8
            read(bytes(damaged))
        for _ in range(5_000):
            damaged = bytearray(original)
            for _ in range(chance.randint(1, 4)):
                at = chance.randrange(len(damaged))
                damaged[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
            read(bytes(damaged))


@pytest.mark.slow
@given(payload=st.binary(max_size=100))
@FUZZ
def test_random_bytes(payload):
    outcome(payload)
    answered(payload)


def answered(payload: bytes) -> bytes | None:
    """The answer, or None where the request is dropped; anything else escapes."""
    try:
        return answer(payload, OFFER)
    except RemoteProtocolError as error:
        assert str(error)
        return None


@pytest.mark.parametrize("read", [answered, outcome])
def test_nested_deeply(read):
    assert read(b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xb0protocol_version\x01") is None


@pytest.mark.parametrize("read", [answered, outcome])
def test_lengths_that_promise_gigabytes(read):
    for header in (b"\xdd", b"\xdf", b"\xdb", b"\xc6"):
        assert read(header + b"\xff\xff\xff\xff") is None
        assert read(b"\x82\xb0protocol_version\x01\xa5offer" + header + b"\xff\xff\xff\xff") is None


# Ranks of our own.


def test_the_topology_of_a_full_set_of_ranks():
    assert topology([Rank(0, 0)]) == (1, 1)
    assert topology([Rank(pp, tp) for tp in range(4) for pp in range(2)]) == (4, 2)


@pytest.mark.parametrize(
    "ranks", [[Rank(0, 1)], [Rank(0, 0), Rank(0, 0)], [Rank(0, 0), Rank(1, 0), Rank(0, 1)]]
)
def test_ranks_that_are_no_full_set(ranks):
    with pytest.raises(MappingError, match="expected every one of pp"):
        topology(ranks)

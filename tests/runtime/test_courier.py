"""Couriers when something goes wrong: whole instances over the memory transport and its hooks."""

import threading

import pytest

from endpoint_rig import DIRECT, WAIT_S
from kvcourier.config import Timing, TransferMode
from kvcourier.core.handshake import request
from kvcourier.core.messages import (
    REGISTRATION_PREFIX,
    Fenced,
    HoldName,
    Register,
    Renew,
    encode,
    sender_fields,
)
from kvcourier.errors import KVCourierError
from kvcourier.ids import EngineId, PeerRank, Rank, RequestId
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate, InFlight, MemoryTransport
from ports import free_port
from runtime.courier_world import (
    SOURCE,
    STOP,
    STRANGER,
    TARGET,
    counts,
    describe,
    dropped,
    facts_for,
    failure,
    inbox_of,
    outcomes,
    quarantined,
    transfer,
    want,
)

MODES = pytest.mark.parametrize("mode", ["push", "pull"])


# Operations that go wrong.


@MODES
@pytest.mark.parametrize("fate", [Fate.REFUSE, Fate.FAIL])
def test_an_operation_that_cannot_be_posted_or_fails(world, mode, fate):
    """vllm#50754: a write that could not be posted told nobody."""
    prefill, decode = world.pair()
    world.plan_all(fate)
    transfer(prefill, decode, mode, "x")
    assert "by the fault plan" in failure(decode, "d-x")
    prefill.wait_for("p-x", Outcome.RELEASED)
    assert len(prefill.of("p-x")) == 2
    assert decode.touched() == set()
    poster = prefill if world.operation(mode) is Operation.WRITE else decode
    labels = {"operation": world.operation(mode)}
    registry = poster.endpoint.registry
    # A write was tried again.
    tries = 2 if world.operation(mode) is Operation.WRITE else 1
    assert registry.get_sample_value("kvcourier_failed_transfers_total", labels) == tries
    world.heal()
    world.still_works(prefill, decode)


def test_the_courier_posts_and_not_the_engines_thread(world):
    prefill, decode = world.pair()
    transfer(prefill, decode, "push", "x")
    decode.wait_for("d-x", Outcome.RELEASED)
    (posted,) = [e for e in prefill.endpoint.story("t-x") if e["what"] == "posted"]
    assert posted["posting_thread"] == posted["thread"] == "kv-courier-pp0tp0"
    assert posted["operation"] == "WRITE"


def test_a_held_write_keeps_the_blocks_of_both_sides(world):
    """vllm#56104 and memory rule 1: nothing is given back that a posted operation may touch."""
    prefill, decode = world.pair()
    world.plan(Operation.WRITE, Fate.HOLD)
    transfer(prefill, decode, "push", "x")
    write = world.held(prefill, Operation.WRITE)
    decode.endpoint.abort(RequestId("d-x"))
    prefill.wait_until(lambda: "quarantined" in prefill.whats("t-x"))
    decode.wait_until(lambda: "quarantined" in decode.whats("d-x"))
    assert (quarantined(prefill), quarantined(decode)) == (len(SOURCE), len(TARGET))
    assert outcomes(prefill, "p-x") == [Outcome.SEND_FAILED]
    assert outcomes(decode, "d-x") == []
    world.network.deliver(write)
    prefill.wait_for("p-x", Outcome.RELEASED)
    decode.wait_for("d-x", Outcome.RELEASED)
    assert outcomes(decode, "d-x") == [Outcome.RELEASED]
    assert (quarantined(prefill), quarantined(decode)) == (0, 0)
    world.heal()
    world.still_works(prefill, decode)


def test_a_write_that_does_not_end_fails_in_time_and_keeps_its_blocks(world):
    prefill, decode = world.pair(transfer_timeout_s=0.05)
    world.plan(Operation.WRITE, Fate.HOLD)
    transfer(prefill, decode, "push", "x")
    write = world.held(prefill, Operation.WRITE)
    decode.wait_for("d-x", Outcome.RECEIVE_FAILED)
    assert decode.of("d-x")[0].reason == "the write did not end in time"
    prefill.wait_until(lambda: quarantined(prefill) == len(SOURCE))
    assert Outcome.RELEASED not in outcomes(prefill, "p-x") + outcomes(decode, "d-x")
    world.network.deliver(write)
    prefill.wait_for("p-x", Outcome.RELEASED)
    assert failure(decode, "d-x")


@pytest.mark.parametrize("world", [DIRECT], indirect=True)
def test_a_read_that_does_not_end_fails_in_time_and_keeps_its_blocks(world):
    prefill, decode = world.pair(transfer_timeout_s=0.05)
    world.plan(Operation.READ, Fate.HOLD)
    transfer(prefill, decode, "pull", "x")
    read = world.held(decode, Operation.READ)
    decode.wait_for("d-x", Outcome.RECEIVE_FAILED)
    assert decode.of("d-x")[0].reason == "the READ did not end in time"
    assert outcomes(decode, "d-x") == [Outcome.RECEIVE_FAILED]
    world.network.deliver(read)
    assert failure(decode, "d-x")


def test_a_quarantine_ends_at_its_limit(world):
    """The last resort against a peer that never says that it is done."""
    prefill, decode = world.pair(transfer_timeout_s=0.05, quarantine_limit_s=0.1)
    world.plan(Operation.WRITE, Fate.DROP)
    transfer(prefill, decode, "push", "x")
    assert failure(decode, "d-x") == "the write did not end in time"
    prefill.wait_for("p-x", Outcome.SEND_FAILED, Outcome.RELEASED)
    world.heal()
    world.still_works(prefill, decode)


def test_a_registration_is_sent_again_until_it_arrives(world):
    """TensorRT-LLM#17665: one lost notification, endless wait."""
    prefill, decode = world.pair(resend_s=0.05)
    lost: list[bytes] = []

    def lose_two(item: InFlight) -> Fate:
        if item.payload.startswith(REGISTRATION_PREFIX) and len(lost) < 2:
            lost.append(item.payload)
            return Fate.DROP
        return Fate.DELIVER

    world.network.fault_plan = lose_two
    transfer(prefill, decode, "push", "x")
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    assert not decode.wrong("x", TARGET, 0, STOP)
    assert len(lost) == 2
    (counts, _) = decode.endpoint.snapshots()["pp0tp0"]
    assert counts["registrations_resent"] >= 2


def test_doubled_notifications_change_nothing(world):
    prefill, decode = world.pair()
    world.network.fault_plan = lambda item: Fate.DUPLICATE if item.is_notification else Fate.DELIVER
    transfer(prefill, decode, "push", "x")
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for("p-x", Outcome.SENT, Outcome.RELEASED)
    world.still_works(prefill, decode)
    assert outcomes(decode, "d-x") == [Outcome.RECEIVED, Outcome.RELEASED]
    assert outcomes(prefill, "p-x") == [Outcome.SENT, Outcome.RELEASED]


def test_a_peer_that_dies_under_a_write(world):
    prefill, decode = world.pair(kv_lease_duration=0.6, heartbeat_s=0.1)
    world.plan(Operation.WRITE, Fate.HOLD)
    transfer(prefill, decode, "push", "x")
    world.held(prefill, Operation.WRITE)
    world.network.kill(world.transports["d"].agent_name)
    prefill.wait_until(lambda: "delivery_failed" in prefill.whats("t-x"))
    decode.wait_for("d-x", Outcome.RECEIVE_FAILED)
    assert "is gone" in decode.of("d-x")[0].reason
    prefill.wait_for("p-x", Outcome.SEND_FAILED, Outcome.RELEASED)


class Stall:
    """Keeps a courier's thread at its next look at the data path, as a busy interpreter would."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def transport(self, world) -> type[MemoryTransport]:
        stall = self

        class Stalling(MemoryTransport):
            def notifications(self) -> list:
                if stall.armed:
                    stall.reached.set()
                    assert stall.over.wait(WAIT_S)
                return super().notifications()

        return lambda name: Stalling(world.network, name)

    armed = False


@pytest.mark.parametrize("stalled", ["p", "d"])
def test_a_courier_that_is_kept_waiting_is_not_dead(world, stalled):
    """A model's step may keep the interpreter for seconds; the transfer goes on after it."""
    stall = Stall()
    # Looks at the other side come sooner, and still leave it a second to answer.
    timing = Timing(beat_s=0.25, peer_silence_s=1.0)
    options = {"transport_factory": stall.transport(world)}
    rigs = {
        name: world.rig(name, timing=timing, **(options if name == stalled else {}))
        for name in "pd"
    }
    prefill, decode = rigs["p"], rigs["d"]
    other = decode if stalled == "p" else prefill
    prefill.hold("p-x", "t-x")
    want(prefill, decode, "x")
    decode.wait_until(lambda: "registered" in decode.whats("d-x"))
    prefill.wait_until(lambda: "registered" in prefill.whats("t-x"))
    stall.armed = True
    assert stall.reached.wait(WAIT_S)
    other.wait_until(lambda: counts(other)["peers_probed"] >= 3)
    stall.armed = False
    stall.over.set()
    prefill.prefill("p-x", "x", SOURCE, STOP)
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    assert counts(prefill)["peers_silent"] == counts(decode)["peers_silent"] == 0
    assert not decode.wrong("x", TARGET, 0, STOP)


def test_a_courier_that_dies_is_known_at_once(world):
    """What it has posted may still land, so nothing comes back before its process has ended."""
    prefill, decode = world.pair()
    prefill.hold("p-x", "t-x")
    want(prefill, decode, "x")
    decode.wait_until(lambda: "registered" in decode.whats("d-x"))
    broken = RuntimeError("the network card is on fire")

    def fail() -> list:
        raise broken

    world.transports["p"].notifications = fail
    decode.wait_for("d-x", Outcome.RECEIVE_FAILED)
    assert "nobody listens at its side channel" in decode.of("d-x")[0].reason
    assert outcomes(decode, "d-x") == [Outcome.RECEIVE_FAILED]
    assert quarantined(decode) == len(TARGET)
    world.network.kill(world.transports["p"].agent_name)
    decode.wait_for("d-x", Outcome.RELEASED)


@pytest.mark.parametrize("has_come", [True, False])
def test_a_holder_that_is_shut_down_says_so(world, has_come):
    prefill, decode = world.pair()
    if has_come:
        prefill.hold("p-x", "t-x")
    want(prefill, decode, "x")
    decode.wait_until(lambda: "registered" in decode.whats("d-x"))
    prefill.endpoint.close()
    decode.wait_for("d-x", Outcome.RECEIVE_FAILED, Outcome.RELEASED)
    assert decode.of("d-x")[0].reason == "the prefill instance is shutting down"


@MODES
def test_a_wanter_that_is_shut_down_lets_go(world, mode):
    """Before it has registered or read: nobody else would say so in time."""
    prefill, decode = world.pair()
    prefill.hold("p-x", "t-x")
    params = prefill.prefill("p-x", "x", SOURCE, STOP)
    pushed = {**prefill.coordinates(), "transfer_id": "t-x"}
    decode.expect("d-x", params if mode == "pull" else pushed)
    prefill.wait_until(lambda: prefill.endpoint.snapshots()["pp0tp0"][1]["watched_peers"] == 1)
    decode.endpoint.close()
    prefill.wait_for("p-x", Outcome.RELEASED)
    assert counts(prefill)["leases_expired"] == 0


def test_a_peer_that_dies_while_it_is_waited_for(world):
    """Nothing is posted to it: only its connection tells."""
    prefill, decode = world.pair()
    prefill.hold("p-x", "t-x")
    want(prefill, decode, "x")
    decode.wait_until(lambda: "registered" in decode.whats("d-x"))
    prefill.wait_until(lambda: "registered" in prefill.whats("t-x"))
    world.network.kill(world.transports["d"].agent_name)

    def die() -> list:
        raise RuntimeError("killed, without a good-bye")

    world.transports["d"].notifications = die
    prefill.wait_until(lambda: "delivery_failed" in prefill.whats("t-x"))
    prefill.prefill("p-x", "x", SOURCE, STOP)
    prefill.wait_for("p-x", Outcome.SEND_FAILED, Outcome.RELEASED)
    assert counts(prefill)["leases_expired"] == 0


# Messages that nobody should send.


JUNK = [b"", b"junk", REGISTRATION_PREFIX, REGISTRATION_PREFIX + b"\xc1", b"\x91" * 100_000]


def test_malformed_notifications_are_dropped(world):
    prefill, decode = world.pair()
    stranger = MemoryTransport(world.network, "stranger")
    agents = [stranger.connect(world.transports[name].agent_metadata()) for name in ("p", "d")]
    for payload in JUNK:
        for agent in agents:
            stranger.notify(agent, payload)
    for rig in (prefill, decode):
        rig.wait_until(lambda rig=rig: dropped(rig, "malformed") == len(JUNK))
    world.still_works(prefill, decode)


def test_malformed_messages_on_the_side_channel_are_dropped(world):
    prefill, decode = world.pair()
    for rig in (prefill, decode):
        send = inbox_of(world, rig)
        for payload in JUNK:
            send(payload)
        rig.wait_until(lambda rig=rig: dropped(rig, "malformed") == len(JUNK))
    world.still_works(prefill, decode)


def test_a_message_in_another_ones_name_is_dropped(world):
    """A stranger cannot fence D's blocks while P still writes."""
    prefill, decode = world.pair()
    world.plan(Operation.WRITE, Fate.HOLD)
    transfer(prefill, decode, "push", "x")
    write = world.held(prefill, Operation.WRITE)
    decode.endpoint.abort(RequestId("d-x"))
    decode.wait_until(lambda: quarantined(decode) == len(TARGET))
    send = inbox_of(world, decode)
    forged = PeerRank(EngineId("p"), prefill.endpoint.incarnation, Rank(0, 0))
    send(encode(Fenced(sender_fields(forged), "d-x")))
    decode.wait_until(lambda: dropped(decode, "wrong_sender") == 1)
    assert outcomes(decode, "d-x") == []
    world.network.deliver(write)
    decode.wait_for("d-x", Outcome.RELEASED)


def test_a_notification_in_another_ones_name_is_dropped(world):
    """The same forgery over the data path."""
    prefill, decode = world.pair()
    world.plan(Operation.WRITE, Fate.HOLD)
    transfer(prefill, decode, "push", "x")
    write = world.held(prefill, Operation.WRITE)
    decode.endpoint.abort(RequestId("d-x"))
    decode.wait_until(lambda: quarantined(decode) == len(TARGET))
    stranger = MemoryTransport(world.network, "stranger")
    agent = stranger.connect(world.transports["d"].agent_metadata())
    forged = PeerRank(EngineId("p"), prefill.endpoint.incarnation, Rank(0, 0))
    stranger.notify(agent, encode(Fenced(sender_fields(forged), "d-x")))
    stranger.notify(agent, b"junk, which comes second")
    decode.wait_until(lambda: dropped(decode, "malformed") == 1)
    assert outcomes(decode, "d-x") == []
    world.network.deliver(write)
    decode.wait_for("d-x", Outcome.RELEASED)


def test_a_message_that_fits_no_request_is_counted(world):
    prefill, decode = world.pair()
    send = inbox_of(world, decode)
    send(encode(Fenced(sender_fields(STRANGER), "d-x")))
    decode.wait_until(lambda: decode.endpoint.snapshots()["pp0tp0"][0].get("messages_ignored") == 1)
    world.still_works(prefill, decode)


def test_a_question_over_the_data_path_is_not_answered(world):
    """Only registrations and notices of writes come that way."""
    prefill, decode = world.pair()
    stranger = MemoryTransport(world.network, "stranger")
    agent = stranger.connect(world.transports["p"].agent_metadata())
    stranger.notify(agent, encode(Renew(sender_fields(STRANGER), 1, [])))
    prefill.wait_until(lambda: dropped(prefill, "wrong_sender") == 1)
    world.still_works(prefill, decode)


def test_malformed_handshakes_are_dropped(world, dead_port):
    prefill, decode = world.pair()
    stranger = world.stranger(prefill)
    for payload in (b"", b"junk", b"\xdd\xff\xff\xff\xff", b"\x81\xb0protocol_version\x01"):
        stranger.send(payload)
    assert b"protocol_version: " in stranger.recv()
    describe(prefill, world.channel())
    world.still_works(prefill, decode)
    # Whoever looks at P sees that something speaks to it that is no peer.
    # The last one is of another version, and is answered so.
    prefill.wait_until(lambda: dropped(prefill, "malformed") == 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handshake_nested_deeply_does_not_end_the_server(world):
    prefill = world.rig("p")
    stranger = world.stranger(prefill)
    stranger.send(b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xb0protocol_version\x01")
    # One server thread takes requests in order: this one comes after the bomb.
    stranger.send(request(EngineId("p"), TransferMode.PUSH, facts_for(prefill)))
    server = prefill.endpoint._server
    prefill.wait_until(lambda: bool(stranger.poll(0)) or not server._thread.is_alive())
    assert server._thread.is_alive()


# Peers that cannot be used.


def test_nobody_listens_at_the_peers_port(world):
    """Known at once, not when a deadline has passed."""
    prefill, decode = world.pair(handshake_timeout_s=1000.0)
    port = free_port()
    want(prefill, decode, "x", remote_port=port)
    assert failure(decode, "d-x") == f"nobody listens at p at 127.0.0.1:{port}"
    world.still_works(prefill, decode)


def test_nobody_answers_at_the_peers_port(world, dead_port):
    prefill, decode = world.pair(handshake_timeout_s=1.0)
    want(prefill, decode, "x", remote_port=dead_port)
    reason = failure(decode, "d-x")
    assert f"127.0.0.1:{dead_port}" in reason and "in time" in reason
    world.still_works(prefill, decode)


@MODES
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_name": "another"}, "model: another here, test-model there"),
        ({"head_dim": 8}, "head_dim: 8 here, 4 there"),
        ({"model_name": "another", "dtype": "bfloat16"}, "dtype: bfloat16 here, float16 there"),
    ],
)
def test_a_peer_with_another_model_is_refused_with_every_reason(world, mode, options, reason):
    prefill, decode = world.rig("p", **options), world.rig("d")
    transfer(prefill, decode, mode, "x")
    told = failure(decode, "d-x")
    assert reason in told
    assert ("model: another here, test-model there" in told) is ("model_name" in options)


@MODES
def test_a_peer_that_does_not_do_the_mode_is_refused_by_name(world, mode):
    """vllm#50620: push and pull peers completed a handshake."""
    other = TransferMode.PULL if mode == "push" else TransferMode.PUSH
    prefill, decode = world.rig("p", modes=frozenset({other})), world.rig("d")
    transfer(prefill, decode, mode, "x")
    assert f"mode: {other} here, {mode} asked for" in failure(decode, "d-x")


def test_another_instance_at_the_peers_address(world):
    prefill, decode = world.pair()
    want(prefill, decode, "x", remote_engine_id="q")
    assert "engine_id: p here, q asked for" in failure(decode, "d-x")
    world.still_works(prefill, decode)


def pair_with_unreadable(world, unreadable: str):
    """The agent of one of the two cannot be loaded by the other."""

    class Unreadable(MemoryTransport):
        def agent_metadata(self) -> bytes:
            return b"junk"

    rigs = {
        name: world.rig(
            name,
            transport_factory=lambda agent, name=name: (
                Unreadable if name == unreadable else MemoryTransport
            )(world.network, agent),
        )
        for name in ("p", "d")
    }
    return rigs["p"], rigs["d"]


def test_a_holders_agent_that_cannot_be_loaded(world):
    prefill, decode = pair_with_unreadable(world, "p")
    transfer(prefill, decode, "push", "x")
    assert "agent metadata cannot be read" in failure(decode, "d-x")
    prefill.endpoint.abort(RequestId("p-x"))
    prefill.wait_for("p-x", Outcome.RELEASED)


def test_a_wanter_whose_agent_cannot_be_loaded_reads(world):
    """P has no way to D, but D has one to P."""
    prefill, decode = pair_with_unreadable(world, "d")
    transfer(prefill, decode, "push", "x")
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for("p-x", Outcome.SENT, Outcome.RELEASED)
    assert not decode.wrong("x", TARGET, 0, STOP)
    repairs = [e for e in decode.endpoint.story("d-x") if e["what"] == "repairing"]
    assert [each["step"] for each in repairs] == ["write again", "read"]
    assert all("agent metadata cannot be read" in each["reason"] for each in repairs)


BAD_HOSTS = pytest.mark.parametrize("host", ["not a host", "a/b", "ü"])


@BAD_HOSTS
def test_a_host_that_is_none_fails_one_request_only(world, host):
    prefill, decode = world.pair(handshake_timeout_s=1.0)
    want(prefill, decode, "x", remote_host=host)
    failure(decode, "d-x")
    world.still_works(prefill, decode)


@BAD_HOSTS
def test_a_registration_with_a_host_that_is_none_harms_nobody(world, host):
    prefill, decode = world.pair(handshake_timeout_s=1.0)
    stranger = MemoryTransport(world.network, "stranger")
    agent = stranger.connect(world.transports["p"].agent_metadata())
    registration = Register(
        sender=sender_fields(STRANGER),
        name=HoldName(transfer_id="t-none"),
        request_id="x-1",
        decode_host=host,
        decode_port=1,
        decode_tp_size=1,
        decode_pp_size=1,
        local_block_ids=[[0]],
        first_token=0,
        num_tokens=1,
        consumers=[(0, 0)],
    )
    stranger.notify(agent, encode(registration))
    prefill.wait_until(
        lambda: prefill.endpoint.snapshots()["pp0tp0"][0].get("registrations_refused") == 1
    )
    world.still_works(prefill, decode)


# The courier's own end.


def test_a_courier_that_dies_is_seen_at_the_next_poll(world):
    prefill, decode = world.pair()

    def broken(item: InFlight) -> Fate:
        if item.operation is Operation.WRITE:
            raise RuntimeError("the network card is on fire")
        return Fate.DELIVER

    world.network.fault_plan = broken
    woken = threading.Event()
    prefill.endpoint._on_report = woken.set
    transfer(prefill, decode, "push", "x")
    assert woken.wait(20.0), "an engine that sleeps must be woken to see it"
    with pytest.raises(KVCourierError, match=r"kv-courier-pp0tp0 died: .*on fire") as caught:
        prefill.wait_until(lambda: False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(KVCourierError):
        prefill.endpoint.poll()


def test_closing_twice_is_fine(world):
    prefill, _ = world.pair()
    prefill.endpoint.close()
    prefill.endpoint.close()


def test_an_abort_after_the_end_is_fine(world):
    """`abort` may be called at any time; an engine that shuts down does so for what is left."""
    prefill, _ = world.pair()
    prefill.hold("p-x", None)
    prefill.endpoint.close()
    prefill.endpoint.abort(RequestId("p-x"))

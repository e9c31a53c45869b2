"""Calls of a scheduler in another process: proven by a token, in order, over the side channel."""

import pytest

from kv_content import wrong_cells
from kvcourier.config import EndpointConfig, Limits
from kvcourier.core.events import RequestAborted
from kvcourier.errors import LocalProtocolError, RemoteProtocolError
from kvcourier.ids import EngineId, Incarnation, Rank
from kvcourier.layout import RankCache, TokenSpan, instance_geometries
from kvcourier.runtime.engine_link import (
    Abort,
    EngineLink,
    Expect,
    Receive,
    decode_call,
    new_token,
)
from kvcourier.runtime.metrics import CourierMetrics
from kvcourier.runtime.rank import open_rank
from kvcourier.runtime.reports import Outcome, Side
from kvcourier.transport.memory import MemoryNetwork, MemoryTransport
from layout_builders import make_instance, model_cache, one_group


def test_a_call_without_the_token_is_none_of_ours() -> None:
    ours, theirs = new_token(), new_token()
    call = b"\x82\xa4call\xa5abort\xaarequest_id\xa1x"
    assert decode_call(ours + call, ours, Limits()) == RequestAborted("x")
    assert decode_call(theirs + call, ours, Limits()) is None
    assert decode_call(call, ours, Limits()) is None
    assert decode_call(ours + call, None, Limits()) is None
    for junk in (b"junk", b"\x91" * 100_000, call.replace(b"x", b"\xff")):
        with pytest.raises(RemoteProtocolError):
            decode_call(ours + junk, ours, Limits())


def test_a_link_without_couriers_is_a_mistake() -> None:
    link = EngineLink(EngineId("d"))
    with pytest.raises(LocalProtocolError, match="no courier"):
        link.send(Abort("x"))
    link.close()


def test_a_scheduler_elsewhere_drives_a_receive() -> None:
    """The decode rank is driven by a link only, as in vLLM; the prefill side by an endpoint."""
    import queue

    from prometheus_client import CollectorRegistry

    from endpoint_rig import Rig

    network = MemoryNetwork()

    def transport(name):
        return MemoryTransport(network, name)

    geometries = instance_geometries(model_cache(), 1)
    caches = make_instance(geometries)
    token = new_token()
    reports = queue.Queue()
    config = EndpointConfig(EngineId("d"), "test-model", side_channel_host="127.0.0.1")
    courier, offer = open_rank(
        config,
        Incarnation("life"),
        RankCache((caches[Rank(0, 0)][0],)),
        one_group(geometries),
        transport,
        server_port=1,
        observer=CourierMetrics(CollectorRegistry()),
        on_report=reports.put,
        on_death=lambda: None,
        engine_token=token,
    )
    courier.start()
    link = EngineLink(EngineId("d"))
    try:
        with Rig("p", transport) as prefill:
            prefill.hold("p1", None)
            params = prefill.prefill("p1", "hello", [5, 0, 3], 40)
            link.connect("127.0.0.1", offer.side_channel_port, token)
            link.send(Expect("d1", params))
            link.send(Receive("d1", [[6, 1, 4]], 0, 40))
            told = [reports.get(timeout=20), reports.get(timeout=20)]
            assert [report.outcome for report in told] == [Outcome.RECEIVED, Outcome.RELEASED]
            assert {report.side for report in told} == {Side.WANT}
            assert told[1].block_ids == ((6, 1, 4),)
            assert not wrong_cells(caches, "hello", [6, 1, 4], TokenSpan(0, 40))
            prefill.wait_for("p1", Outcome.SENT, Outcome.RELEASED)
    finally:
        link.close()
        courier.close()

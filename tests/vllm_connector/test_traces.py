"""Whose children the spans of vLLM's requests are, and when they are told."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvcourier.config import Limits
from kvcourier.core.outcomes import Outcome, Report, Side
from kvcourier.ids import RequestId, fetched_as, kept_as
from kvcourier.tracing.interface import Carrier, Span
from kvcourier.vllm_connector import traces
from kvcourier.vllm_connector.traces import Parents, Traced, WorkerTraces

OURS, VLLMS = (f"00-{letter * 32}-{'b' * 16}-01" for letter in "ac")
STORY = [
    {"at_unix_s": 1.0, "what": "want_begun", "rank": "r"},
    {"at_unix_s": 2.0, "what": "registered", "rank": "r"},
    {"at_unix_s": 3.0, "what": "received", "rank": "r"},
    {"at_unix_s": 3.5, "what": "released", "rank": "r"},
]


class Told:
    """Keeps what is told (`Tracing`)."""

    def __init__(self) -> None:
        self.spans: list[tuple[Carrier, Span, list[str]]] = []

    def tell(self, parent: Carrier, root: Span, children: list[Span]) -> None:
        self.spans.append((parent, root, [each.name for each in children]))


def request_of(params: object, headers: object = None) -> Any:
    return SimpleNamespace(request_id="r1", kv_transfer_params=params, trace_headers=headers)


@pytest.mark.parametrize(
    ("params", "headers", "parent"),
    [
        ({"traceparent": OURS}, {"traceparent": VLLMS}, OURS),
        ({}, {"traceparent": VLLMS}, VLLMS),
        ({"traceparent": "nonsense"}, {"traceparent": VLLMS}, VLLMS),
        ({"traceparent": ["x"] * 9}, None, None),
        ({}, "headers", None),
        ({}, None, None),
    ],
)
def test_a_parent_is_the_routers_else_what_vllm_kept(params, headers, parent) -> None:
    parents = Parents(Limits())
    parents.read(request_of(params | {"transfer_id": "t"}, headers))
    expected = {} if parent is None else {"traceparent": parent}
    assert parents.take() == (Traced(RequestId("r1"), expected, "t"),)
    assert parents.take() == ()


def test_a_request_without_a_transfer_has_none_and_a_name_is_bounded() -> None:
    parents = Parents(Limits())
    for params in (None, "x", []):
        parents.read(request_of(params))
    assert parents.take() == ()
    for name in (5, "x" * 10_000, "\ud800", "\x1b[2J"):
        parents.read(request_of({"transfer_id": name}))
    assert [each.transfer_id for each in parents.take()] == [""] * 4


def test_spans_are_told_once_when_the_blocks_are_vllms_again() -> None:
    told = Told()
    worker = WorkerTraces(told, {"r1": STORY}.get)
    worker.follow([Traced(RequestId("r1"), {"traceparent": OURS}, "t")])
    worker.on_report(Report(RequestId("r1"), Outcome.RECEIVED, side=Side.WANT))
    assert told.spans == []
    for name in ("r1", "r1", "a stranger"):
        worker.on_report(Report(RequestId(name), Outcome.RELEASED, side=Side.WANT))
    ((parent, root, children),) = told.spans
    assert parent == {"traceparent": OURS}
    assert (root.name, root.start_unix_s, root.end_unix_s) == ("decode request", 1.0, 3.5)
    assert root.attributes == {"gen_ai.request.id": "r1", "kvcourier.transfer_id": "t"}
    assert children == ["register", "wait for KV"]


def test_a_transfer_may_be_over_before_the_step_that_brings_its_parent() -> None:
    told = Told()
    worker = WorkerTraces(told, lambda key: STORY)
    worker.on_report(Report(RequestId("r1"), Outcome.RELEASED, side=Side.WANT))
    for _ in range(2):
        worker.follow([Traced(RequestId("r1"), {"traceparent": OURS}, "t")])
    ((parent, _, children),) = told.spans
    assert (parent, children) == ({"traceparent": OURS}, ["register", "wait for KV"])


def test_what_is_fetched_or_kept_of_earlier_turns_is_no_request() -> None:
    told = Told()
    worker = WorkerTraces(told, lambda key: STORY)
    worker.follow([Traced(RequestId("r1"), {}, "")])
    for name in (fetched_as(RequestId("r1")), kept_as(RequestId("r1"))):
        worker.on_report(Report(name, Outcome.RELEASED, side=Side.HOLD))
    assert told.spans == []


def test_only_so_many_are_followed(monkeypatch) -> None:
    monkeypatch.setattr(traces, "MAX_FOLLOWED", 2)
    told = Told()
    worker = WorkerTraces(told, lambda key: STORY)
    worker.follow([Traced(RequestId(name), {}, "") for name in "abc"])
    for name in "abc":
        worker.on_report(Report(RequestId(name), Outcome.RELEASED, side=Side.HOLD))
    assert [root.attributes["gen_ai.request.id"] for _, root, _ in told.spans] == ["b", "c"]

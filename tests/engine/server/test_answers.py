"""What the client sees: bodies, streams, failures, and the other routes."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.server.fakes import (
    EOS,
    MODEL,
    FakeEndpoint,
    FakeEngine,
    begin_and_hang,
    byte_tokenizer,
    call,
    chat,
    complete,
    fail,
    joined,
    make_app,
    say,
    sse,
)
from kvcourier.engine.api import FinishReason, TokenEvent
from kvcourier.errors import KVCourierError

TEXT = "héllo 😀"
PULL = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "localhost",
    "remote_port": 5600,
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [[1, 2]],
}
HOLD = {"do_remote_decode": True}


def app_that(plan, **changes):
    return make_app(FakeEngine(plan), **changes)


def usage_of(text, prompt_tokens=2, cached=0):
    tokens = len(text.encode())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_completion_body():
    response = complete(app_that(say(TEXT, num_cached_tokens=1)))
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}],
        "usage": usage_of(TEXT, cached=1),
    }


def test_chat_body():
    body = chat(app_that(say(TEXT, reason=FinishReason.STOP))).json()
    assert (body["object"], body["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_completion_stream():
    events = sse(complete(app_that(say("hé")), stream=True))
    assert events.pop() == "[DONE]"
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert {(event["object"], event["model"]) for event in events} == {("text_completion", MODEL)}
    # The two bytes of the second letter are one chunk.
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        for text, reason in (("h", None), ("é", None), ("", "length"))
    ]
    assert not any("usage" in event for event in events)


def test_chat_stream_with_usage():
    options = {"include_usage": True}
    events = sse(chat(app_that(say("hé")), stream=True, stream_options=options))
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events)
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "é"},
        {},
    ]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None, None, None, "length"]


def test_token_ids_whole():
    body = complete(app_that(say("hé")), return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == [*"hé".encode()]
    assert body["choices"][0]["prompt_token_ids"] == [*b"hi"]
    body = chat(app_that(say("hé")), return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == [*"hé".encode()]
    assert bytes(body["prompt_token_ids"]) == b"<user>hi\n<assistant>"


@pytest.mark.parametrize("ask", [complete, chat])
def test_token_ids_streamed(ask):
    events = sse(ask(app_that(say("hé")), stream=True, return_token_ids=True))[:-1]
    ids = [event["choices"][0]["token_ids"] for event in events]
    assert list(itertools.chain(*ids)) == [*"hé".encode()]
    # One chunk per event, also where no character is complete.
    assert len([part for part in ids if part]) == 3
    holders = [event if ask is chat else event["choices"][0] for event in events]
    assert ["prompt_token_ids" in holder for holder in holders] == [True] + [False] * (
        len(events) - 1
    )


def test_the_end_token_counts_but_has_no_text():
    def plan(context):
        yield TokenEvent(context.request.request_id, (104, EOS), FinishReason.STOP)

    body = complete(app_that(plan), return_token_ids=True).json()
    assert body["choices"][0]["text"] == "h"
    assert body["choices"][0]["token_ids"] == [104, EOS]
    assert body["usage"]["completion_tokens"] == 2


def test_a_stop_token_id_has_no_text():
    def plan(context):
        yield TokenEvent(context.request.request_id, (104, 105), FinishReason.STOP)

    assert complete(app_that(plan), stop_token_ids=[105]).json()["choices"][0]["text"] == "h"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request_on_the_engine(stream):
    engine = FakeEngine(begin_and_hang("abcSTOPd"))
    options = {"stop": ["x", "cSTO"], "return_token_ids": True, "stream": stream}
    response = complete(make_app(engine), **options)
    if stream:
        events = sse(response)[:-1]
        assert joined(events) == "ab"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        ids = [id_ for event in events for id_ in event["choices"][0]["token_ids"]]
    else:
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
        ids = choice["token_ids"]
    assert bytes(ids) == b"abcSTO"
    assert engine.aborted == [engine.submitted[0].request_id]


def test_what_might_have_become_a_stop_string_comes_at_the_end():
    events = sse(complete(app_that(say("abc")), stop="bcd", stream=True))[:-1]
    assert joined(events) == "abc"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.text(st.sampled_from("ab é😀"), max_size=12),
    st.lists(st.text(st.sampled_from("ab é"), min_size=1, max_size=3), max_size=3),
)
def test_streamed_and_whole_text_are_the_same(text, stops):
    app = make_app(FakeEngine(say(text)), tokenizer=TOKENIZER)
    whole = complete(app, stop=stops).json()["choices"][0]
    events = sse(complete(app, stop=stops, stream=True))[:-1]
    assert joined(events) == whole["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


TOKENIZER = byte_tokenizer()


def test_n_streams_are_kept_apart():
    app = app_that(lambda context: say(str(context.request.sampling.seed))(context))
    events = sse(complete(app, n=3, seed=5, stream=True))[:-1]
    assert [joined(events, index) for index in range(3)] == ["5", "6", "7"]
    finished = [
        choice["index"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(finished) == [0, 1, 2]


def test_kv_transfer_params_of_a_body():
    params = {"remote_block_ids": [[1]], "do_remote_prefill": True}
    app = app_that(say("a", kv_transfer_params=params))
    assert complete(app, kv_transfer_params=HOLD).json()["kv_transfer_params"] == params
    assert chat(app, kv_transfer_params=HOLD).json()["kv_transfer_params"] == params
    assert "kv_transfer_params" not in complete(app_that(say("a"))).json()


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_kv_transfer_params_are_on_the_last_chunk(options):
    app = app_that(say("ab", kv_transfer_params={"x": 1}))
    body = {"kv_transfer_params": HOLD, "stream": True, "stream_options": options}
    events = sse(complete(app, **body))
    assert events[-2]["kv_transfer_params"] == {"x": 1}
    assert not any("kv_transfer_params" in event for event in events[:-2])


def test_a_stop_string_does_not_cut_off_a_held_prompts_params():
    engine = FakeEngine(say("a", kv_transfer_params={"x": 1}))
    body = complete(make_app(engine), kv_transfer_params=HOLD, stop="a").json()
    assert body["kv_transfer_params"] == {"x": 1}
    assert engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "status", "code"), [(PULL, 503, "kv_transfer_failed"), (None, 500, None)]
)
def test_a_failure_before_the_first_token_has_its_status(stream, params, status, code):
    app = app_that(fail("peer p has gone"))
    response = complete(app, kv_transfer_params=params, stream=stream)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"] == {
        "message": "peer p has gone",
        "type": "server_error",
        "param": None,
        "code": code,
    }


def test_a_failure_after_the_first_token_is_an_event():
    response = complete(app_that(fail("out of memory", after="ab")), stream=True)
    assert response.status_code == 200
    *chunks, last = sse(response)
    assert joined(chunks) == "ab"
    assert last["error"]["message"] == "out of memory"


def test_a_failure_of_one_answer_aborts_the_others():
    def plan(context):
        first = context.request.sampling.seed == 1
        return (begin_and_hang("a") if first else fail("broken"))(context)

    engine = FakeEngine(plan)
    assert complete(make_app(engine), n=2, seed=1).status_code == 500
    assert engine.aborted == [engine.submitted[0].request_id]


def test_an_abort_by_the_engine_is_no_silent_end():
    def plan(context):
        yield context.end(FinishReason.ABORT)

    response = complete(app_that(plan))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")


def test_a_bug_in_a_stream_is_an_event(caplog):
    def plan(context):
        yield context.tokens("a")
        yield TokenEvent(context.request.request_id, (-5,))

    response = complete(app_that(plan), stream=True)
    *chunks, last = sse(response)
    assert joined(chunks) == "a"
    assert "internal error" in last["error"]["message"]
    assert "stream broke" in caplog.text


def test_models_and_health():
    engine = FakeEngine(say(""))
    app = make_app(engine)
    (card,) = call(app, "GET", "/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 512)
    assert call(app, "GET", "/health").status_code == 200
    engine.error = "out of memory"
    for response in (call(app, "GET", "/health"), complete(app)):
        assert response.status_code == 503
        assert "out of memory" in response.json()["error"]["message"]
    assert engine.submitted == []


def test_a_router_lets_go_of_a_transfer():
    app = make_app(FakeEngine(say("ok")), endpoint=FakeEndpoint())
    assert call(app, "DELETE", "/kvcourier/transfers/a%2Fb").status_code == 204
    refusal = call(app, "DELETE", "/kvcourier/transfers/other")
    assert refusal.status_code == 404
    assert "no transfer 'other' is held here" in refusal.json()["error"]["message"]
    alone = make_app(FakeEngine(say("ok")))
    assert call(alone, "DELETE", "/kvcourier/transfers/a").status_code == 404


def test_instance_and_story():
    app = app_that(say(""), endpoint=FakeEndpoint(), role="prefill")
    assert call(app, "GET", "/kvcourier/instance").json() == {
        "engine_id": "e1",
        "side_channel_port": 5600,
        "role": "prefill",
        "draining": False,
    }
    assert call(app, "GET", "/kvcourier/story/a%2Fb").json()[0]["what"] == "registered"
    assert call(app, "GET", "/kvcourier/story/other").status_code == 404
    alone = app_that(say(""))
    assert call(alone, "GET", "/kvcourier/instance").status_code == 404
    assert call(alone, "GET", "/kvcourier/story/a").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405)]
)
def test_unknown_paths_have_error_objects_too(method, path, status):
    response = call(app_that(say("")), method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def metrics_of(app):
    text = call(app, "GET", "/metrics").text
    return {
        (
            sample.name,
            sample.labels.get("finished_reason") or sample.labels.get("status"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }, text


def test_metrics():
    engine = FakeEngine(say("abc"))
    registry = CollectorRegistry()
    app = make_app(engine, registry=registry)
    complete(app, n=2)
    complete(app, n=0)
    engine.plan = fail("broken")
    complete(app)
    values, text = metrics_of(app)
    assert values["kvcourier:num_requests_running", None] == 2
    assert values["kvcourier:generation_tokens_total", None] == 7
    assert values["kvcourier:other", None] == 1
    assert values["kvcourier:time_to_first_token_seconds_count", None] == 2
    assert values["kvcourier:inter_token_latency_seconds_count", None] == 4
    assert values["kvcourier:request_time_per_output_token_seconds_count", None] == 2
    assert values["kvcourier:e2e_request_latency_seconds_count", None] == 2
    assert values["kvcourier:request_success_total", "length"] == 2
    assert values["kvcourier:request_failure_total", "400"] == 1
    assert values["kvcourier:request_failure_total", "500"] == 1
    assert not any(request.request_id in text for request in engine.submitted)
    assert set(re.findall(r"(\w+)=", text)) <= {"model_name", "le", "finished_reason", "status"}


def test_metrics_text_can_come_from_elsewhere():
    app = app_that(say(""), metrics_text=lambda: b"x 1\n")
    assert call(app, "GET", "/metrics").content == b"x 1\n"


def test_an_engine_that_stops_between_check_and_submit_is_503():
    class Stopped(KVCourierError):
        pass

    engine = FakeEngine(say(""))

    def submit(request):
        raise Stopped("the engine has stopped: closing")

    engine.submit = submit
    response = complete(make_app(engine))
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the engine has stopped: closing"

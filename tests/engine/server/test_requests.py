"""What is asked of the engine, and every refusal: status, field, and that nothing was kept."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.fakes import (
    EOS,
    MODEL,
    FakeEngine,
    byte_tokenizer,
    call,
    chat,
    complete,
    make_app,
    say,
)
from kvcourier.config import Limits
from kvcourier.core.params import HoldIntent, PullIntent
from kvcourier.engine.server.body import UNSUPPORTED
from kvcourier.ids import TransferId

PULL = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "localhost",
    "remote_port": 5600,
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [[1, 2]],
}


@pytest.fixture
def engine():
    return FakeEngine(say("ok"))


@pytest.fixture
def app(engine):
    return make_app(engine)


def submitted(engine):
    (request,) = engine.submitted
    return request


def test_defaults_are_vllms(app, engine):
    assert call(app, "POST", "/v1/completions", json={"prompt": "hi"}).status_code == 200
    sampling = submitted(engine).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert (sampling.top_k, sampling.seed, sampling.min_tokens) == (0, None, 0)
    assert not sampling.ignore_eos and not sampling.stop_token_ids


def test_every_sampling_field_reaches_the_engine(app, engine):
    body = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "seed": 3,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    assert complete(app, **body).status_code == 200
    sampling = submitted(engine).sampling
    assert {name: getattr(sampling, name) for name in body} == body | {
        "stop_token_ids": frozenset({1, 2})
    }


def test_null_is_as_good_as_absent(app, engine):
    fields = ["temperature", "n", "seed", "stop", "stream", "kv_transfer_params", "logprobs"]
    assert complete(app, **dict.fromkeys(fields)).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [b"hi"]),
        ([104, 105], [b"hi"]),
        (["hi", "é"], [b"hi", "é".encode()]),
        ([[1], [2, 3]], [b"\1", b"\2\3"]),
    ],
)
def test_the_four_forms_of_a_prompt(app, engine, prompt, expected):
    response = complete(app, prompt=prompt)
    assert response.status_code == 200
    assert [bytes(request.prompt_token_ids) for request in engine.submitted] == expected
    assert [choice["index"] for choice in response.json()["choices"]] == [*range(len(expected))]


def test_chat_goes_through_the_template(app, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert chat(app, messages=messages).status_code == 200
    assert bytes(submitted(engine).prompt_token_ids) == b"<system>s\n<user>a\nb\n<assistant>"
    # What is left of the context, as in vLLM.
    assert submitted(engine).sampling.max_tokens == 512 - len(submitted(engine).prompt_token_ids)


def test_max_completion_tokens_wins(app, engine):
    assert chat(app, max_tokens=9, max_completion_tokens=4).status_code == 200
    assert submitted(engine).sampling.max_tokens == 4


def test_n_answers_have_their_own_seeds_and_names(app, engine):
    response = complete(app, prompt=["a", "b"], n=2, seed=2**63 - 1)
    assert [choice["text"] for choice in response.json()["choices"]] == ["ok"] * 4
    prompts = [bytes(request.prompt_token_ids) for request in engine.submitted]
    assert prompts == [b"a", b"a", b"b", b"b"]
    seeds = [request.sampling.seed for request in engine.submitted]
    assert seeds == [2**63 - 1, -(2**63)] * 2
    # Each prompt counts once, each answer counts.
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 8)


def test_names_are_vllms(app, engine):
    for name in (None, "req/7"):
        headers = {} if name is None else {"X-Request-Id": name}
        body = {"prompt": "a"}
        response = call(app, "POST", "/v1/completions", json=body, headers=headers)
        shown = response.json()["id"]
        assert shown == "cmpl-req/7" if name else re.fullmatch("cmpl-[0-9a-f]{32}", shown)
        request_id = engine.submitted[-1].request_id
        assert re.fullmatch(re.escape(shown) + "-0-[0-9a-f]{8}", request_id)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"X-Request-Id": "c"}
    response = call(app, "POST", "/v1/chat/completions", json=body, headers=headers)
    assert response.json()["id"] == "chatcmpl-c"
    assert re.fullmatch("chatcmpl-c-[0-9a-f]{8}", engine.submitted[-1].request_id)


def test_two_engines_never_share_a_name():
    names = set()
    for _ in range(2):
        engine = FakeEngine(say("ok"))
        headers = {"X-Request-Id": "same"}
        call(make_app(engine), "POST", "/v1/completions", json={"prompt": "a"}, headers=headers)
        names.add(submitted(engine).request_id)
    assert len(names) == 2


@pytest.mark.parametrize("name", ["", "a\tb", "x" * 257, "caf\xe9"])
def test_a_bad_request_id_is_refused(app, engine, name):
    headers = {"X-Request-Id": name.encode("latin-1")}
    response = call(app, "POST", "/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Id"
    assert engine.submitted == []


def test_the_longest_request_id_still_fits_a_peers_limit(app, engine):
    longest = 256 - len("chatcmpl--255-01234567/fetched")
    for size, status in ((longest, 200), (longest + 1, 400)):
        headers = {"X-Request-Id": "x" * size}
        response = call(app, "POST", "/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.status_code == status
    assert len(submitted(engine).request_id) <= Limits().max_id_bytes


def test_kv_transfer_params_become_an_intent(app, engine):
    hold = {"do_remote_decode": True, "transfer_id": "t"}
    assert complete(app, kv_transfer_params=hold).status_code == 200
    assert engine.submitted[-1].intent == HoldIntent(TransferId("t"))
    assert chat(app, kv_transfer_params=PULL).status_code == 200
    assert isinstance(engine.submitted[-1].intent, PullIntent)
    assert complete(app, kv_transfer_params={}).status_code == 200
    assert engine.submitted[-1].intent is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [10**4000]]}, "prompt[1]"),
        ({"prompt": "x" * 512}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 511}, "max_tokens"),
        ({"max_tokens": 10**4000}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"min_tokens": 51}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"kv_transfer_params": 3}, "kv_transfer_params.(whole)"),
        (
            {"kv_transfer_params": PULL | {"tp_size": 10**9}},
            "kv_transfer_params.tp_size",
        ),
        ({"kv_transfer_params": PULL, "n": 2}, "kv_transfer_params"),
        ({"kv_transfer_params": PULL, "prompt": ["a", "b"]}, "kv_transfer_params"),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_a_bad_field_is_named(app, engine, fields, param):
    response = complete(app, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.partition("[")[0] in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "a", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "forbidden", "content": "x"}], "messages"),
    ],
)
def test_a_bad_message_is_named(app, engine, messages, param):
    response = chat(app, messages=messages)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.submitted == []


def test_refusals_say_what_was_found(app):
    parts = [{"type": "image_url"}]
    response = chat(app, messages=[{"role": "user", "content": parts}])
    assert "'image_url'" in response.json()["error"]["message"]
    response = chat(app, messages=[{"role": "forbidden", "content": "x"}])
    assert "no such role" in response.json()["error"]["message"]


def test_a_model_without_chat_template_says_so(engine):
    response = chat(make_app(engine, tokenizer=byte_tokenizer(chat_template=None)))
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]


def test_an_unknown_model_is_404(app, engine):
    response = complete(app, model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert complete(app, model=MODEL).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":"\\ud800"}'],
)
def test_malformed_bodies_are_400(app, engine, body):
    response = call(app, "POST", "/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert engine.submitted == []


def test_large_bodies_are_413(engine):
    app = make_app(engine, max_body_bytes=100)

    async def in_pieces():
        for _ in range(30):
            yield b" " * 10

    for content in (b" " * 101, in_pieces()):
        assert call(app, "POST", "/v1/completions", content=content).status_code == 413
    assert complete(app).status_code == 200


def test_neutral_values_of_unsupported_fields_are_accepted(app):
    longest = max(len(values) for values in UNSUPPORTED.values())
    for position in range(longest):
        body = {
            name: values[min(position, len(values) - 1)] for name, values in UNSUPPORTED.items()
        }
        assert complete(app, **body, unheard_of=1).status_code == 200


def test_the_engines_refusal_is_400_and_aborts_the_siblings():
    engine = FakeEngine(say("ok"), rejection="prompt does not fit the cache", num_accepted=1)
    response = complete(make_app(engine), n=2)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt does not fit the cache"
    assert engine.aborted == [submitted(engine).request_id]


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from([2**63, 2**64, 10**30, "text", "user"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "stream",
    "stream_options",
    "return_token_ids",
    "kv_transfer_params",
    "logprobs",
    "logit_bias",
]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": JSON | st.just("user"), "content": JSON | st.lists(st.just({"type": "text"}))}
    ),
    max_size=2,
)
BODIES = st.fixed_dictionaries(
    {"prompt": st.just("hi") | JSON, "messages": MESSAGES | JSON, "model": st.just(MODEL) | JSON},
    optional={name: JSON for name in FIELDS if name not in ("prompt", "messages", "model")},
)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=200)
@given(BODIES, st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
def test_no_body_makes_a_500(body, path):
    # raise_app_exceptions of the transport turns a bug into a failure here.
    engine = FakeEngine(say("ok"))
    response = call(fuzzed_app(engine), "POST", path, json=body)
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        assert engine.submitted == []


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.binary(max_size=40))
def test_no_bytes_make_a_500(content):
    response = call(fuzzed_app(FakeEngine(say("ok"))), "POST", "/v1/completions", content=content)
    assert response.status_code == 400


TOKENIZER = byte_tokenizer()


def fuzzed_app(engine):
    return make_app(engine, tokenizer=TOKENIZER)


def test_end_token_is_in_the_vocabulary(app, engine):
    assert complete(app, prompt=[EOS]).status_code == 200

"""Keys of the HTTP API: files, comparison, and what is asked for one."""

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.server.fakes import FakeEngine, call, make_app, say
from kvcourier.api_keys import api_keys, read_api_keys
from kvcourier.errors import ConfigError

KEYS = ["k-one", "k-two"]
WRONG = (
    *("", "Bearer", "Bearer ", "k-one", "Basic k-one"),
    *("Bearer k-on", "Bearer k-one k-two", "Bearer K-ONE"),
)


def app():
    return make_app(FakeEngine(say("ok")), api_keys=api_keys(KEYS))


def header(value):
    return {"headers": {"authorization": value}}


# Files.


def test_a_file_has_a_key_a_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# for clients\n k-one \n\nk-two\r\n")
    assert read_api_keys(path) == KEYS


@pytest.mark.parametrize("content", [b"", b"\n \n# none\n", "schlüssel".encode()])
def test_a_file_without_a_key_is_refused_by_name(tmp_path, content):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path}: expected a"):
        read_api_keys(path)
    with pytest.raises(ConfigError, match="expected a file"):
        read_api_keys(tmp_path)


@pytest.mark.parametrize("bad", ["two words", "tab\tinside", "bell\x07"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(tmp_path, bad):
    path = tmp_path / "keys"
    path.write_text(f"good\n{bad}\n")
    with pytest.raises(ConfigError, match="line 2: expected a key without blanks") as caught:
        read_api_keys(path)
    assert bad not in str(caught.value)


# Comparison.


@given(st.binary(max_size=64))
def test_only_a_key_itself_is_let_in(presented):
    assert api_keys(KEYS).allows(presented) == (presented in [key.encode() for key in KEYS])


def test_every_key_is_compared_whichever_fits(monkeypatch):
    compared = []

    def compare(one, other):
        compared.append(other)
        return one == other

    keys = api_keys(KEYS)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for presented in (b"k-one", b"k-two", b"neither"):
        compared.clear()
        keys.allows(presented)
        assert compared == list(keys.digests)
    assert "k-one" not in repr(keys)


# An instance.


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
def test_any_of_the_keys_opens_the_api(key, scheme):
    assert call(app(), "GET", "/v1/models", **header(scheme + key)).status_code == 200
    body = {"prompt": "hi", "max_tokens": 2}
    answer = call(app(), "POST", "/v1/completions", json=body, **header(scheme + key))
    assert answer.json()["choices"][0]["text"] == "ok"


@pytest.mark.parametrize(
    "given_headers",
    [
        [],
        *(
            [("authorization", value)]
            for value in ("", "Bearer", "Bearer ", "k-one", "Basic k-one")
        ),
        *(
            [("authorization", value)]
            for value in ("Bearer k-on", "Bearer k-one k-two", "Bearer K-ONE")
        ),
        [("authorization", "Bearer k-one"), ("authorization", "Bearer k-one")],
        [("authorization", b"Bearer \xff\xfe\x80")],
        [("authorization", "Bearer " + "x" * 60_000)],
        [("x-api-key", "k-one")],
    ],
)
def test_without_a_key_there_is_nothing_but_an_error_object(given_headers):
    for method, path in (
        *(("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/kvcourier/instance")),
        *(("GET", "/nothing"), ("GET", "/health/"), ("GET", "/metrics/x"), ("GET", "//health")),
        ("DELETE", "/kvcourier/transfers/a"),
    ):
        answer = call(app(), method, path, headers=given_headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_health_and_metrics_are_open():
    for path in ("/health", "/metrics"):
        assert call(app(), "GET", path).status_code == 200


def test_without_a_file_all_is_open():
    assert call(make_app(FakeEngine(say("ok"))), "GET", "/v1/models").status_code == 200

"""On a real socket: who leaves is noticed, stopping is clean, taken ports are told."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from engine.server.fakes import (
    WAIT_S,
    FakeEndpoint,
    FakeEngine,
    begin_and_hang,
    byte_tokenizer,
    call,
    make_app,
    parse_sse,
    say,
)
from kvcourier.http_server import HttpServer, bind

BODY = {"prompt": "hi", "max_tokens": 50}


class Running:
    """A server on a free loopback port, on a thread."""

    def __init__(self, engine, **changes):
        self.is_ready = threading.Event()
        self.server = HttpServer(
            make_app(engine, **changes), bind("127.0.0.1", 0), on_ready=self._on_ready
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def _on_ready(self, url):
        self.url = url
        self.is_ready.set()

    def __enter__(self):
        self.thread.start()
        assert self.is_ready.wait(WAIT_S)
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.server.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def client(self):
        return httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)


def raw_request(url, body):
    """A connection on which a completion was asked for."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), WAIT_S)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["", "ab"])
def test_a_client_that_leaves_aborts_its_request(stream, text):
    engine = FakeEngine(begin_and_hang(text))
    with Running(engine) as running:
        connection = raw_request(running.url, BODY | {"stream": stream, "n": 2})
        assert engine.has_submitted.wait(WAIT_S)
        if stream and text:
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
        connection.close()
        assert engine.has_aborted.wait(WAIT_S)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.submitted)
    assert len(engine.aborted) == 2


@pytest.mark.slow
def test_the_status_line_waits_for_the_first_event():
    go = threading.Event()

    def plan(context):
        assert go.wait(WAIT_S)
        yield from say("a")(context)

    engine = FakeEngine(plan)
    with Running(engine) as running:
        connection = raw_request(running.url, BODY | {"stream": True})
        assert engine.has_submitted.wait(WAIT_S)
        with running.client() as client:  # a whole round trip later ...
            assert client.get("/health").status_code == 200
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # ... still nothing has come
            connection.recv(1)
        connection.settimeout(WAIT_S)
        go.set()
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()


@pytest.mark.slow
def test_chunks_come_one_by_one():
    seen = {letter: threading.Event() for letter in "abc"}

    def plan(context):
        for letter, event in seen.items():
            yield context.tokens(letter)
            assert event.wait(WAIT_S)  # goes on only once the client has the letter
        yield context.end()

    with Running(FakeEngine(plan)) as running, running.client() as client:
        body = BODY | {"stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for letter in json.loads(line[6:])["choices"][0]["text"]:
                        seen[letter].set()
    assert all(event.is_set() for event in seen.values())


@pytest.mark.slow
def test_stopping_ends_what_runs_with_an_error():
    engine = FakeEngine(begin_and_hang("ab"))
    running = Running(engine)
    with running, running.client() as client:
        body = BODY | {"stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            content = next(pieces)
            running.server.stop()
            content += b"".join(pieces)
        running.thread.join(WAIT_S)
        assert not running.thread.is_alive()
    *chunks, last = parse_sse(content)
    assert chunks[0]["choices"][0]["text"] == "ab"
    assert last["error"]["code"] == "shutting_down"
    assert engine.aborted == [engine.submitted[0].request_id]


@pytest.mark.slow
def test_a_dead_engine_ends_what_waits_for_it():
    engine = FakeEngine(begin_and_hang())
    with Running(engine) as running, running.client() as client:

        def die():
            assert engine.has_submitted.wait(WAIT_S)
            engine.error = "out of memory"

        killer = threading.Thread(target=die)
        killer.start()
        response = client.post("/v1/completions", json=BODY)
        killer.join(WAIT_S)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"


@pytest.mark.slow
def test_many_requests_at_once():
    engine = FakeEngine(lambda context: say(bytes(context.request.prompt_token_ids))(context))
    texts = [f"prompt {index} é" for index in range(32)]
    with Running(engine) as running:

        def ask(text, results):
            with running.client() as client:
                body = {"prompt": text, "stream": len(text) % 2 == 0}
                content = client.post("/v1/completions", json=body).content
                if body["stream"]:
                    events = parse_sse(content)[:-1]
                    results[text] = "".join(event["choices"][0]["text"] for event in events)
                else:
                    results[text] = json.loads(content)["choices"][0]["text"]

        results = {}
        threads = [threading.Thread(target=ask, args=(text, results)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert results == {text: text for text in texts}


PROGRAM = """
from engine.server.fakes import FakeEngine, begin_and_hang, make_app
from kvcourier.http_server import bind, serve_until_stopped
try:
    serve_until_stopped(make_app(FakeEngine(begin_and_hang("ab"))), bind("127.0.0.1", 0))
finally:
    print("engine closed", flush=True)
"""


@pytest.mark.slow
def test_sigterm_stops_the_process_cleanly():
    tests = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tests,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        ready = process.stdout.readline()
        assert ready.startswith("kvcourier ready http://127.0.0.1:")
        url = ready.split()[2]
        connection = raw_request(url, BODY | {"stream": True})
        assert connection.recv(12) == b"HTTP/1.1 200"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        rest = b"".join(iter(lambda: connection.recv(65536), b""))
        connection.close()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(WAIT_S)
    assert (process.returncode, out) == (0, "engine closed\n")
    (line,) = err.splitlines()  # one line per failed request, no traceback
    assert line.endswith("the instance is shutting down")
    assert b"shutting_down" in rest


def test_the_fake_tokenizer_is_byte_exact():
    text = "é😀\n"
    ids = byte_tokenizer().encode(text, add_special_tokens=False)
    assert bytes(ids) == text.encode()


@pytest.mark.slow
def test_a_drained_instance_finishes_what_it_has_and_takes_nothing_new():
    go = threading.Event()

    def plan(context):
        yield context.tokens("a")
        assert go.wait(WAIT_S)
        yield context.end()

    with Running(FakeEngine(plan)) as running, running.client() as client:
        idle = client.get("/drain").json()
        assert idle == {"draining": False, "running": 0, "kept": 0, "empty": False}
        body = BODY | {"stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            events = response.iter_raw()
            next(events)
            begun = client.post("/drain").json()
            assert begun == {"draining": True, "running": 1, "kept": 0, "empty": False}
            refused = client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert client.get("/health").status_code == 200
            go.set()
            assert b"[DONE]" in b"".join(events)
        empty = client.get("/drain").json()
        assert empty == {"draining": True, "running": 0, "kept": 0, "empty": True}
        assert client.delete("/drain").json()["draining"] is False
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_story_has_what_the_server_saw_beside_what_the_endpoint_tells() -> None:
    app = make_app(FakeEngine(say("ab")), endpoint=FakeEndpoint())
    answer = call(app, "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert answer.status_code == 200
    unknown = call(app, "GET", "/kvcourier/story/nobody")
    assert unknown.status_code == 404
    assert abs(float(unknown.headers["x-kv-unix-s"]) - time.time()) < 60
    transfer = {"do_remote_decode": True, "transfer_id": "a/b"}
    body = {"prompt": "x", "max_tokens": 2, "kv_transfer_params": transfer}
    assert call(app, "POST", "/v1/completions", json=body).status_code == 200
    told = call(app, "GET", "/kvcourier/story/a/b")
    assert [each["what"] for each in told.json()] == [
        "registered",
        "queued",
        "first_token",
        "answered",
    ]
    assert "x-kv-unix-s" in told.headers

"""The whole benchmark on processes that answer like vLLM: order, rows, resuming, and the end."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pair_servers
import pytest
import vllm_pairs
from model_folders import SIZES, VOCAB_SIZE, write_model_folder
from pair_load import Cell, RequestFailed, Sample
from pair_results import ResultFile, ResultsError, make_row, of_vllm, show_row
from pair_servers import _group_lives
from pair_settings import CONNECTORS, PAIR_PORTS, SERVERS

from benchmarks.fake_vllm import ENDS_AT, ENDS_TOKENS, REFUSED_TOKENS
from ports import free_ports

FAKE = Path(__file__).with_name("fake_vllm.py")
ROW_KEYS = {
    *("model", "input_tokens", "qps", "connector", "ttft_ms", "after_prefill_ms", "tpot_ms"),
    *("failures", "requests"),
}


class Host:
    """A folder to work in, free ports, and the benchmark's command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "results" / "vllm-pairs.json"
        self.ports = [str(port) for port in free_ports(PAIR_PORTS * (len(SERVERS) + 2))[:4]]

    def arguments(self, *flags: str) -> list[str]:
        return [
            *("--models", "0.6b", "--out", str(self.out), "--work-folder", str(self.folder)),
            *("--server-command", shlex.join([sys.executable, str(FAKE)]), "--commit", "c1"),
            *("--ports", ",".join(self.ports[:2]), "--output-tokens", "3"),
            *("--kv-cache-gib", "0.0001"),
            *("--side-channel-ports", ",".join(self.ports[2:]), *flags),
        ]

    def run(self, *flags: str) -> int:
        return vllm_pairs.main(self.arguments(*flags))

    def content(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        header, *rows = json.loads(self.out.read_text())
        return header, rows

    def started(self) -> list[dict[str, Any]]:
        path = self.folder / "started.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def host(tmp_path: Path) -> Any:
    each = Host(tmp_path)
    yield each
    left = [server["pid"] for server in each.started() if _group_lives(server["pid"])]
    for group in left:
        os.killpg(group, signal.SIGKILL)
    assert left == []


@pytest.mark.slow
def test_every_connector_on_every_cell_with_one_pair_per_class(host: Host) -> None:
    assert host.run("--cells", "9:200:3,20:100:2") == vllm_pairs.EXIT_DONE
    header, rows = host.content()
    assert header["header"] is True
    assert header["statistic"] == "median"
    assert header["commit"] == "c1"
    assert header["versions"].keys() >= {"vllm", "nixl", "torch", "kvcourier"}
    assert header.keys() >= {"gpu", "seed", "date"}
    assert [(row["connector"], row["input_tokens"], row["requests"]) for row in rows] == [
        (connector, *cell) for cell in ((9, 3), (20, 2)) for connector in CONNECTORS
    ]
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert row["cache"] == "used"
        # Both rounds, each with its half of the requests.
        assert [len(each["ttft"]) for each in row["samples"]] == [row["requests"] - 1, 1]
        assert ("of_vllm" in row) == row["connector"].startswith("kvcourier")
        assert row["failures"] == 0
        assert row["ttft_ms"] == row["ttft_p50_ms"] > 0
        assert (row["after_prefill_ms"] is None) == (row["connector"] == "single")
    started = {
        (each["kv"]["kv_connector"], each["kv"]["engine_id"]): each for each in host.started()
    }
    assert len(started) == len(host.started()) == 6
    assert started["CourierConnector", "p"]["kv"] == {
        "kv_connector": "CourierConnector",
        "kv_connector_module_path": "kvcourier.vllm_connector",
        "kv_role": "kv_producer",
        "engine_id": "p",
    }
    assert started["CourierConnector", "d"]["kv"]["kv_role"] == "kv_consumer"
    assert started["NixlPushConnector", "d"]["kv"]["kv_role"] == "kv_both"
    for (_, engine_id), server in started.items():
        index = "pd".index(engine_id)
        assert server["gpu"] == str(index)
        assert server["side_channel"] in {
            str(int(host.ports[2 + index]) + PAIR_PORTS * pair) for pair in range(len(SERVERS))
        }
        assert {"--no-enable-prefix-caching", "dummy"} <= set(server["argv"])
        # Prefill as it is, decode steps as CUDA graphs; the same for every connector.
        assert ("--enforce-eager" in server["argv"]) == (engine_id == "p")
        assert ("--compilation-config" in server["argv"]) == (engine_id == "d")


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(host: Host) -> None:
    assert host.run("--cells", "9:200:3", "--connectors", "vllm-pull") == vllm_pairs.EXIT_DONE
    _, (first,) = host.content()
    more = ("--cells", "9:200:3,20:100:2", "--connectors", "vllm-pull", "--resume")
    assert host.run(*more) == vllm_pairs.EXIT_DONE
    _, rows = host.content()
    assert rows[0] == first
    assert [row["input_tokens"] for row in rows] == [9, 20]
    num_started = len(host.started())
    assert host.run(*more) == vllm_pairs.EXIT_DONE
    assert len(host.started()) == num_started == 4
    assert host.content()[1] == rows


@pytest.mark.slow
def test_a_variant_has_servers_and_rows_of_its_own(host: Host) -> None:
    flags = ("--fresh-cells", "9:200:2", "--cells", "9:200:2", "--connectors", "vllm-push")
    variants = ("--variants", json.dumps({"direct": {"transfer_path": "direct"}}))
    assert host.run(*flags, *variants) == vllm_pairs.EXIT_DONE
    header, rows = host.content()
    assert header["variants"] == {"direct": {"transfer_path": "direct"}}
    names = ["vllm-push", "kvcourier-pull@direct", "kvcourier-push@direct"]
    assert [(row["cache"], row["connector"]) for row in rows] == [
        (cache, name) for cache in ("fresh", "used") for name in names
    ]
    # Compared with what vLLM has of the same way, if that was measured.
    assert ["of_vllm" in row for row in rows] == [False, False, True] * 2
    extras = [each["kv"].get("kv_connector_extra_config") for each in host.started()]
    assert extras.count({"transfer_path": "direct"}) == 2


def test_the_ratio_is_of_the_same_prompts() -> None:
    theirs = make_row("8b", "vllm-pull", CELL, "used", [OUTCOMES])
    ours = [Sample(15.0, None, 5.0), Sample(1.0, 1.0, 1.0), Sample(5.0, 0.5, 7.0)]
    row = make_row("8b", "kvcourier-pull", CELL, "used", [ours])
    ratios = of_vllm(row, theirs)
    # The second prompt has no counterpart, and the first no time after prefill.
    assert ratios["ttft"] == [0.5, 0.5, 0.5]
    assert ratios["after_prefill"][0] == 0.5
    assert ratios["tpot"] == [1.0, 1.0, 1.0]
    assert "ttft is 0.50 (0.50 to 0.50) of vLLM's" in show_row(row | {"of_vllm": ratios})


@pytest.mark.slow
def test_a_server_that_dies_under_load_is_a_result(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    # One request after the warm-up is answered, the next ends the prefill server.
    assert vllm_pairs.WARM_UP_REQUESTS + 2 == ENDS_AT
    cells = f"{ENDS_TOKENS}:100:3,9:100:2"
    status = host.run("--cells", cells, "--connectors", "vllm-pull,vllm-push")
    assert status == vllm_pairs.EXIT_FAILED
    output = capsys.readouterr().out
    assert "the nixl-pull pair of 0.6b failed: a server ended" in output
    assert "the engine died" in output
    assert "the nixl-push pair of 0.6b failed" in output
    _, rows = host.content()
    # The cell that did it is a row; the one after it was never tried.
    assert [(row["connector"], row["input_tokens"]) for row in rows] == [
        ("vllm-pull", ENDS_TOKENS),
        ("vllm-push", ENDS_TOKENS),
    ]
    assert all(row["failures"] > 0 and row["first_failure"] for row in rows)


@pytest.mark.slow
def test_what_does_not_end_politely_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_servers, "_STOP_S", 0.3)
    flags = ("--cells", "9:100:2", "--connectors", "vllm-pull", "--server-flags=--ignore-sigterm")
    assert host.run(*flags) == vllm_pairs.EXIT_DONE
    assert [_group_lives(server["pid"]) for server in host.started()] == [False, False]


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_its_log(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--cells", "9:100:2", "--connectors", "vllm-pull", "--server-flags=--fail-to-start")
    assert host.run(*flags) == vllm_pairs.EXIT_FAILED
    output = capsys.readouterr().out
    assert "a server ended while starting" in output
    assert "no such kernel" in output
    assert host.content()[1] == []


@pytest.mark.slow
def test_refused_requests_are_counted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_pairs, "_SETTLE_S", 0.1)
    flags = ("--cells", f"{REFUSED_TOKENS}:100:2", "--connectors", "kvcourier-push")
    assert host.run(*flags) == vllm_pairs.EXIT_DONE
    _, (row,) = host.content()
    assert (row["failures"], row["requests"], row["ttft_ms"]) == (2, 2, None)
    assert "400" in row["first_failure"]


def test_nothing_is_begun_that_would_not_end_in_time(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--cells", "9:100:2", "--time-limit", "60")
    assert host.run(*flags) == vllm_pairs.EXIT_CELLS_LEFT
    assert "--resume" in capsys.readouterr().out
    assert host.started() == []
    assert host.content()[1] == []


def test_a_taken_port_is_named(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(host.ports[1])))
        taken.listen()
        flags = ("--cells", "9:100:2", "--connectors", "vllm-pull")
        assert host.run(*flags) == vllm_pairs.EXIT_FAILED
    assert f"port {host.ports[1]} of the decode server cannot be used" in capsys.readouterr().out
    assert host.started() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_server_behind(host: Host, number: signal.Signals) -> None:
    # Arrivals a minute apart: the run is in its cell until the signal.
    flags = ("--cells", "9:100:2,20:0.01:9", "--connectors", "vllm-pull")
    with subprocess.Popen(
        [sys.executable, vllm_pairs.__file__, *host.arguments(*flags)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert any("failures 0/2" in line for line in process.stdout)
            process.send_signal(number)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == vllm_pairs.EXIT_FAILED
    assert "stopped" in rest
    assert len(host.content()[1]) == 1
    assert len(host.started()) == 2  # the fixture looks for what is left of them


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--models", "70b"), "--models: expected some of 0.6b, 8b, 32b, found '70b'"),
        (("--connectors", "vllm"), "--connectors: expected some of vllm-pull"),
        (("--cells", "9:1"), "cell: expected TOKENS:QPS:REQUESTS, found '9:1'"),
        (("--gpus", "0"), "--gpus: expected two"),
        (("--ports", "1,x"), "--ports: expected two"),
        (("--variants", "[1]"), "--variants: expected a JSON object of objects"),
        (("--variants", '{"a": 1}'), "--variants: expected a JSON object of objects"),
        (("--variants", "{"), "Expecting property name"),
        (("--rounds", "0"), "--rounds: expected 1 to"),
        (("--output-tokens", "1"), "one token has no TPOT"),
    ],
)
def test_flags_that_cannot_be_used(
    flags: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        vllm_pairs.parse_arguments(flags)
    assert stopped.value.code == vllm_pairs.EXIT_USAGE
    assert expected in capsys.readouterr().err


CELL = Cell(2000, 2.0, 3)
OUTCOMES = [
    Sample(30.0, 3.0, 5.0, 50.0, 1.0),
    RequestFailed("no"),
    Sample(10.0, 1.0, 7.0, 60.0, 1.0),
]


def test_a_row_is_of_the_answered_requests() -> None:
    row = make_row("8b", "vllm-pull", CELL, "used", [OUTCOMES])
    assert {key: row[key] for key in ROW_KEYS} == {
        "model": "8b",
        "input_tokens": 2000,
        "qps": 2.0,
        "connector": "vllm-pull",
        "ttft_ms": 20.0,
        "after_prefill_ms": 2.0,
        "tpot_ms": 6.0,
        "failures": 1,
        "requests": 3,
    }
    assert (row["ttft_p90_ms"], row["ttft_mean_ms"]) == (28.0, 20.0)
    assert row["first_failure"] == "no"
    assert row["latency_ms"] == 55.0
    # One decodes from 30 to 50 ms, the other from 10 to 60.
    assert row["mean_decoding"] == pytest.approx(70 / 50)
    assert "TTFT 20.0 (28.0)" in show_row(row)
    assert "failures 1/3" in show_row(row)


def test_the_file_is_whole_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    results = ResultFile(path, {"commit": "c1"}, resume=False)
    assert len(json.loads(path.read_text())) == 1
    results.add(make_row("8b", "vllm-pull", CELL, "used", [OUTCOMES]))
    assert len(json.loads(path.read_text())) == 2
    assert results.has("8b", "vllm-pull", CELL, "used")
    assert not results.has("8b", "vllm-push", CELL, "used")
    assert not results.has("8b", "vllm-pull", Cell(2000, 2.0, 4), "used")
    assert ResultFile(path, {"commit": "c1"}, resume=True).has("8b", "vllm-pull", CELL, "used")
    assert not ResultFile(path, {"commit": "c1"}, resume=False).has("8b", "vllm-pull", CELL, "used")


def test_a_file_of_another_setup_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    ResultFile(path, {"commit": "c1", "date": "monday"}, resume=False)
    ResultFile(path, {"commit": "c1", "date": "tuesday"}, resume=True)
    assert json.loads(path.read_text())[0]["date"] == "monday"
    with pytest.raises(ResultsError, match="commit was 'c1', is 'c2'"):
        ResultFile(path, {"commit": "c2", "date": "monday"}, resume=True)
    assert json.loads(path.read_text())[0]["commit"] == "c1"


@pytest.mark.parametrize("content", ["", "[]", "{}", "[{}]", '[{"header": true}, {"model": 1}]'])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match="expected a result file"):
        ResultFile(path, {}, resume=True)
    assert path.read_text() == content


@pytest.mark.parametrize("size", SIZES)
def test_a_model_folder_is_what_transformers_takes(tmp_path: Path, size: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_model_folder(tmp_path, size)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.vocab_size) == ("qwen3", VOCAB_SIZE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == VOCAB_SIZE
    ids = [2, 77, VOCAB_SIZE - 1]
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids
    assert tokenizer.eos_token_id == config.eos_token_id == 0

"""What comes of attempts is judged by what was seen, and children that do not come back cost one
finding."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from doctor.planted import found, healthy, instance, troubles
from kvcourier.config import TransferMode
from kvcourier.doctor import parent
from kvcourier.doctor.errands import Fetched, FetchedTwice, Measured, NixlTried, TryNixl
from kvcourier.doctor.facts import (
    AnswerFacts,
    ErrandFacts,
    Facts,
    MachineFacts,
    Role,
    ToolFacts,
    Visit,
)
from kvcourier.doctor.findings import Severity
from kvcourier.doctor.parent import read_log
from kvcourier.doctor.scratch import Compared

ERROR, WARNING, NOTE, OK = (
    Severity.ERROR,
    Severity.WARNING,
    Severity.NOTE,
    Severity.OK,
)
PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
BOTH = [Fetched(PULL, "", 40, 0.1), Fetched(PUSH, "", 40, 0.1)]
SAME = Compared(num_bytes=4096, differing=0, untouched=0, outside=0)
TRIAL = AnswerFacts(PUSH, "P p", "D d", "http://r", expected="a b", found="a b", num_bytes=10.0)


def visited(**changes: object) -> Facts:
    """A pair of whose P KV was fetched, with this result."""
    told = FetchedTwice(**{"fetched": BOTH, "compared": SAME} | changes)
    return healthy(visits=(Visit(instance(Role.PREFILL), ErrandFacts(told)),))


def tried(**changes: object) -> Facts:
    """A pair through which a prompt went."""
    return healthy(answers=(dataclasses.replace(TRIAL, **changes),))


def test_all_well() -> None:
    facts = dataclasses.replace(
        visited(measured=Measured(512, 2048, 0.001, 0.002)),
        answers=(TRIAL,),
        nixl=ErrandFacts(NixlTried(plugins=["UCX"], version="1.5.1")),
        machine=MachineFacts(tools=(ToolFacts("EFA", "fi_info -p efa"),)),
    )
    assert troubles(facts) == []
    (figures,) = found(facts, "measured", OK)
    assert "2.0 us a piece to post, 0.52 GB/s" in figures.evidence


@pytest.mark.parametrize(
    ("changes", "severity", "evidence"),
    [
        ({"differing": 3, "first": "rank pp0tp0"}, WARNING, "3 of 4096 bytes"),
        ({"untouched": 2, "differing": 9}, ERROR, "2 blocks were called received"),
        ({"outside": 5}, ERROR, "5 bytes were written beside"),
    ],
)
def test_bytes_that_are_not_right(
    changes: dict[str, object], severity: Severity, evidence: str
) -> None:
    facts = visited(compared=dataclasses.replace(SAME, **changes))
    assert evidence in found(facts, "fetch", severity)[0].evidence
    assert not any("the same" in each.evidence for each in found(facts, "fetch", OK))


def test_a_fetch_that_fails_and_one_that_is_not_allowed() -> None:
    facts = visited(fetched=[BOTH[0], Fetched(PUSH, "nobody listens")], compared=None)
    assert "push: nobody listens" in found(facts, "fetch", ERROR)[0].evidence
    facts = visited(fetched=[BOTH[0], Fetched(PUSH, "d is not on the allow-list")], compared=None)
    assert not troubles(facts) and found(facts, "fetch", NOTE)


@pytest.mark.parametrize(
    ("way", "severities"),
    [
        ("inter-node rma_am(tcp/eth0) am(tcp/eth0)", [WARNING]),
        ("inter-node rma(rc_mlx5/mlx5_0:1) am(rc_mlx5/mlx5_0:1)", []),
        ("intra-node am(tcp/lo cma/memory)", []),
    ],
)
def test_a_way_that_leaves_rdma_out(way: str, severities: list[Severity]) -> None:
    result = ErrandFacts(FetchedTwice(fetched=BOTH, compared=SAME), ways=(way,))
    facts = healthy(
        machine=MachineFacts(rdma_devices=("mlx5_0",)),
        visits=(Visit(instance(Role.PREFILL), result),),
    )
    assert [each.severity for each in troubles(facts)] == severities


def test_a_process_that_does_not_come_back() -> None:
    lost = ErrandFacts(None, "the process did not end within 3 s", complaints=("no way",))
    facts = healthy(visits=(Visit(instance(Role.DECODE), lost),))
    (finding,) = found(facts, "fetch", ERROR)
    assert "did not end" in finding.evidence and "no way" in finding.evidence


def test_nixl_that_does_not_work_here() -> None:
    facts = healthy(nixl=ErrandFacts(NixlTried("starting NIXL backend UCX: failed")))
    assert found(facts, "nixl", ERROR)
    absent = NixlTried("NIXL cannot be imported (no module)")
    assert not troubles(healthy(nixl=ErrandFacts(absent)))


@pytest.mark.parametrize(
    ("changes", "severity", "evidence"),
    [
        ({"problem": "answered 503: no KV"}, ERROR, "push: answered 503"),
        ({"found": "x y"}, ERROR, "'x y', of P alone 'a b'"),
        ({"found": "a c"}, WARNING, "'a c', of P alone 'a b'"),
        ({"failures": ("failed transfers",)}, WARNING, "failed transfers"),
        ({"num_bytes": 0.0}, WARNING, "neither side counted a byte"),
    ],
)
def test_a_prompt_that_is_not_answered_as_it_should(
    changes: dict[str, object], severity: Severity, evidence: str
) -> None:
    assert evidence in found(tried(**changes), "answers", severity)[0].evidence


def test_figures_that_come_late_are_no_trouble() -> None:
    assert not troubles(tried(num_bytes=None))


@pytest.mark.parametrize(
    ("tool", "severity"),
    [
        (ToolFacts("EFA", "fi_info -p efa"), NOTE),
        (ToolFacts("EFA", "fi_info -p efa", True, 0, "provider: efa"), OK),
        (ToolFacts("EFA", "fi_info -p efa", True, 61, "No data"), NOTE),
        (ToolFacts("NVLink", "nvidia-smi nvlink", True, None, "timed out"), WARNING),
    ],
)
def test_tools_of_the_machine(tool: ToolFacts, severity: Severity) -> None:
    assert found(healthy(machine=MachineFacts(tools=(tool,))), "machine", severity)


LOG = """
[1.0] [vm:7 :0]  ucp_worker.c:1997 UCX  INFO    a self cfg#0 rma_am(tcp/lo)  ka(tcp/lo)
[1.1] [vm:7 :0]  ucp_worker.c:1997 UCX  INFO    a intra-node cfg#1 rma_am(tcp/lo)  am(cma/memory)
[1.2] [vm:7 :0]  ucp_context.c:1508 UCX  WARN  transport 'rc' is not available
[1.3] [vm:7 :0]  ucp_context.c:1508 UCX  WARN  transport 'rc' is not available
something else
"""


def test_what_ucx_says() -> None:
    assert read_log(LOG) == (
        ("intra-node rma_am(tcp/lo) am(cma/memory)",),
        ("transport 'rc' is not available",),
    )


def child_that(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process be another program."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_child_that_ends_by_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child_that("import os; print('last words', flush=True); os.abort()", tmp_path, monkeypatch)
    facts = parent.run(TryNixl(["UCX"]), NixlTried, 30.0)
    assert facts.told is None and "-6" in facts.problem and "last words" in facts.problem


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "pid"
    child_that(
        f"import os, signal; open({str(mark)!r}, 'w').write(str(os.getpid())); signal.pause()",
        tmp_path,
        monkeypatch,
    )
    facts = parent.run(TryNixl(["UCX"]), NixlTried, 1.0)
    assert facts.told is None and "did not end within 1 s" in facts.problem
    if mark.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)


def test_a_child_that_says_nonsense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child_that("import sys; open(sys.argv[3], 'w').write('[1]')", tmp_path, monkeypatch)
    assert "no result" in parent.run(TryNixl(["UCX"]), NixlTried, 30.0).problem

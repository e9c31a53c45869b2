"""What only the NIXL transport has: installation, backends, threads, logging."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcourier.errors import ConfigError
from kvcourier.transport.interface import Operation, TransferState
from kvcourier.transport.nixl import NixlTransport
from transport.ends import Ends, Memory


def test_without_nixl_the_module_imports_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match="pip install nixl"):
        NixlTransport("a")


@pytest.mark.parametrize(
    "arguments", [{"agent_name": ""}, {"backends": ()}, {"num_threads": -1}], ids=str
)
def test_values_out_of_range_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        NixlTransport(**({"agent_name": "a"} | arguments))  # type: ignore[arg-type]


@pytest.fixture
def nixl() -> None:
    try:
        NixlTransport("probe").close()
    except ConfigError as error:
        pytest.skip(f"NIXL cannot be used here: {error}")


@pytest.mark.nixl
@pytest.mark.usefixtures("nixl")
def test_an_unknown_backend_is_refused_with_the_available_ones() -> None:
    with pytest.raises(ConfigError, match=r"no plugin 'NOPE'; available: .*UCX"):
        NixlTransport("a", backends=("UCX", "NOPE"))


@pytest.mark.nixl
@pytest.mark.usefixtures("nixl")
def test_a_backend_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="UCX"):
        NixlTransport("a", backends=("UCX", "UCX"))


@pytest.mark.nixl
@pytest.mark.usefixtures("nixl")
def test_num_threads_reaches_ucx() -> None:
    def num_os_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = num_os_threads()
    transport = NixlTransport("a", num_threads=3)
    try:
        assert num_os_threads() >= before + 3
    finally:
        transport.close()


@pytest.mark.nixl
@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("operation", list(Operation))
def test_many_pieces_move_with_several_threads(operation: Operation) -> None:
    count, size = 4096, 64
    a, b = NixlTransport("a", num_threads=3), NixlTransport("b", num_threads=3)
    try:
        ours, theirs = Memory(count * size, seed=1), Memory(count * size, seed=2)
        a.register([ours.region])
        b.register([theirs.region])
        a.connect(b.agent_metadata())
        order = np.random.default_rng(3).permutation(count)
        expected = theirs.data if operation is Operation.READ else ours.data
        expected = expected.reshape(count, size).copy()
        handle = a.post(
            operation,
            b.agent_name,
            local=ours.descriptors((order * size).tolist(), [size] * count),
            remote=theirs.descriptors((order * size).tolist(), [size] * count),
            notice=b"all",
        )
        ends = Ends(a, b)
        assert ends.finish(a, handle).state is TransferState.DONE
        ends.until(lambda: ends.payloads(b) == [b"all"])
        target = ours if operation is Operation.READ else theirs
        assert (target.data.reshape(count, size) == expected).all()
        assert ours.canaries_intact() and theirs.canaries_intact()
    finally:
        a.close()
        b.close()


_LOGGING_SCRIPT = """
import logging, sys
mine = logging.FileHandler(sys.argv[1], mode="w")
logging.getLogger().addHandler(mine)
logging.getLogger().setLevel(logging.INFO)
from kvcourier.transport.nixl import NixlTransport
transport = NixlTransport("a")
transport.agent_metadata()
logging.getLogger("mine").info("still here")
logging.getLogger("nixl.x").warning("from nixl")
assert logging.raiseExceptions and logging.getLogger().handlers == [mine]
"""


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.usefixtures("nixl")
def test_the_programs_logging_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {k: v for k, v in os.environ.items() if k != "NIXL_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-c", _LOGGING_SCRIPT, str(log)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert log.read_text().splitlines() == ["still here", "from nixl"]

"""The tests of `inside/`, in the environment that has vLLM: each of its files is one test here.

pytest's output there, with every test by name, is the message of a failure here.
"""

import os
import subprocess
from pathlib import Path

import pytest

VENV = Path(os.environ.get("KVCOURIER_VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm"))
INSIDE = Path(__file__).parent / "inside"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (VENV / "bin/pytest").exists(),
        reason=f"no vLLM with pytest at {VENV}: run `make test-vllm`, or set KVCOURIER_VLLM_VENV",
    ),
]


@pytest.mark.parametrize("path", sorted(INSIDE.glob("test_*.py")), ids=lambda path: path.stem)
def test_inside(path: Path) -> None:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [VENV / "bin/python", "-m", "pytest", "-v", "--tb=short", "-W", "ignore", path],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, f"\n{run.stdout}"

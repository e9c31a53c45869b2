"""Kernels without a GPU: triton's interpreter, in a process of its own.

It is chosen by the environment, when triton is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcourier


def run_interpreted(module: str, timeout_s: float) -> str:
    """What `interpret()` of a test module prints; skips where triton is not installed."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("triton is not installed; it comes with torch for GPUs")
    paths = [Path(__file__).parents[1], Path(kvcourier.__file__).parents[1], *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", f"from {module} import interpret; interpret()"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout

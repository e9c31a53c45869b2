"""What kernels run on: GPUs, if there are any, and triton's interpreter."""

import importlib.util

import pytest


@pytest.fixture(scope="module")
def num_gpus() -> int:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not importlib.util.find_spec("triton"):
        pytest.skip("no CUDA device, or no triton")
    return int(torch.cuda.device_count())

"""Lets the tests of this folder share `training.py`, and computes with one thread."""

import contextlib
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "optimizer"))  # test_adamw.py
sys.path.insert(0, str(Path(__file__).parent / "training_state"))  # test_immutability.py
sys.path += filter(None, [os.environ.get("ULLAGE_PEERS")])  # torchao, where benchmarks/gpu/run.py has installed it

import pytest
import torch

if torch.version.cuda is None:  # before Triton is imported, where it is installed: its interpreter needs no GPU
    os.environ["TRITON_INTERPRET"] = "1"

from one_thread import one_thread  # noqa: F401 - of all tests of this folder
from torch.nn.attention import SDPBackend, sdpa_kernel
from virtual import NoVirtualGpuError, install, present

from ullage.this_machine import planning  # noqa: F401 - its searches are short too

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used; see `gpu`
with contextlib.suppress(Exception):  # tests that need it say why there is none
    install()  # before the first backward of this process


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Every test closes what it has prepared, also where that was refused or has failed."""
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("lane ")]


@pytest.fixture
def gpu():
    """A GPU: CUDA's, or else the virtual one of these tests. It gives the same bits each time.

    Sums with atomic additions do not, such as those of fused attention's backward, nor does cuBLAS whose streams share
    a workspace (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    before = torch.are_deterministic_algorithms_enabled()
    with contextlib.ExitStack() as closing:
        if not torch.cuda.is_available():
            try:
                closing.enter_context(present())
            except NoVirtualGpuError as error:
                pytest.skip(str(error))
        closing.callback(torch.use_deterministic_algorithms, before)
        torch.use_deterministic_algorithms(True)
        closing.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield

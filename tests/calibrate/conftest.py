import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # fake_kernels.py

from amount import ALL
from fake_kernels import Calibrated, put_fakes

from ullage.calibrate import CalibrationOptions, calibrate


@pytest.fixture(scope="module", autouse=True)
def fakes() -> Iterator[None]:
    """Let kernels take no time in all tests here."""
    with pytest.MonkeyPatch.context() as patched:
        put_fakes(patched)
        yield


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    scratch = tmp_path_factory.mktemp("scratch")
    steps: list[tuple[str, float, float]] = []
    options = CalibrationOptions(quick=True, budget_s=3, scratch_dir=scratch, name="here", device="host")
    threads_before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        put_fakes(patched)
        if not ALL:  # rates of DRAM, which tests compare with each other, are measured as always
            patched.setattr("ullage.calibrate.run._NUM_BYTES", 2**24)
            patched.setattr("ullage.calibrate.disk._QUICK_FILE_BYTES", 2**26)
        profile, pairs = calibrate(options, lambda *step: steps.append(step))
    return Calibrated(profile, pairs, steps, scratch, threads_before)

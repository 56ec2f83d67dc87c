"""Products in fp8 are measured on a GPU too: here on the virtual GPU of the executor's tests."""

import os
import sys
from pathlib import Path

import pytest
from forked import completed

from hwprofiles.calibrate.backend import CudaBackend
from hwprofiles.calibrate.compute import ComputeProbe
from hwprofiles.quantity import Curve


def probed() -> None:
    """Print the curve of small products in fp8 on the virtual GPU."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
    from virtual import present  # noqa: PLC0415 - of another folder

    with present():
        backend = CudaBackend(quick=True)
        backend.shapes, CudaBackend.pool_bytes = ((32, 64), (64, 128)), 2**22
        curve = ComputeProbe.create(backend, 0, quick=True).gemm_fp8(100.0, 0.05)
        print(curve.model_dump_json() if curve else None, flush=True)  # noqa: T201 - to the test
    os._exit(0)  # at once, as a virtual device wants it


def test_calibration_measures_products_in_fp8_on_a_gpu() -> None:
    done = completed(probed)
    if "NoVirtualGpuError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    curve = Curve.model_validate_json(done.stdout)
    assert curve.best_rate_per_s() > 0
    assert curve.provenance.origin == "measured"
    assert "fp8 products" in curve.provenance.source

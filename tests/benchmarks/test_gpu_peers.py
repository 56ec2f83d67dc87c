"""The benchmarks for a GPU: what they do there, on the virtual GPU of the executor's tests, and what they leave."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import completed

from benchmarks.gpu.agreement import SETTINGS, planned, summary
from benchmarks.gpu.stand_in import stand_in
from hwprofiles.machine import available_memory_bytes, num_cores
from hwprofiles.registry import load_profile
from planner.plan.document import load_plan
from ullage.analysis.simulation import simulate

ROOT = Path(__file__).parents[2]
HEAD = """
import json, os, sys, torch, ullage
from pathlib import Path
from benchmarks.peers import worker
from benchmarks.peers.engines import ENGINES, InMemory
from benchmarks.peers.jobs import Cell, Job, model_config
from benchmarks.peers.training import make_model
from hwprofiles.registry import load_profile

torch.set_num_threads(1)
torch.cuda.set_per_process_memory_fraction = lambda share: bounds.append(share)
bounds = []
"""


def virtually(*arguments: str) -> None:
    """Be ``python -m virtual ARGUMENTS``."""
    sys.path.insert(0, str(ROOT / "tests" / "executor"))
    sys.argv = ["virtual", *arguments]
    runpy.run_module("virtual", run_name="__main__", alter_sys=True)
    # At once: the thread in which the virtual device goes backward does not outlive the interpreter in good order.
    sys.stdout.flush()
    os._exit(0)


def on_gpu(folder: Path, code: str) -> Any:
    """Run code where there is a GPU, and return what it prints last."""
    script = folder / "script.py"
    script.write_text(HEAD + code, encoding="utf-8")
    done = completed(virtually, str(script), cwd=folder)
    if "NoVirtualGpuError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_probe_takes_all_steps(tmp_path: Path) -> None:
    output = tmp_path / "probe.jsonl"
    probe = ROOT / "benchmarks" / "gpu" / "probe.py"
    done = completed(virtually, str(probe), "--tiny", "--output", str(output), cwd=tmp_path)
    if "NoVirtualGpuError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {line["step"] for line in lines if "error" in line} == {"device attributes"}  # which CUDA's driver tells
    assert {line["step"] for line in lines} >= {"gpu", "touched memory", "attention", "sustained products", "pinning"}
    assert {line["step"] for line in lines} >= {"copies beside products", "host update", "elementwise", "norm", "layer"}
    (touched,) = (line for line in lines if line["step"] == "touched memory")
    assert touched["code"] == 0
    assert float(touched["gib_s_total_available_kb"][0].split()[0]) == 1 / 32
    update = [line for line in lines if line["step"] == "host update"]
    assert [line["threads"] for line in update] == [1, 2, 2]  # by Ullage's kernel: no line says otherwise
    assert min(update[-1]["copies_gb_per_s"]) > 0


@pytest.mark.part(0)
def test_memory_is_bounded_when_the_model_has_left_the_device(tmp_path: Path) -> None:
    # 22 million parameters are 44 MB in bf16, and the bound is less: PyTorch would not let the model be made under it.
    found = on_gpu(
        tmp_path,
        """
making = []
make_ours = ENGINES["ours"]
def made(job):
    trainer = make_ours(job)
    making.append([torch.cuda.max_memory_reserved(), list(bounds)])
    return trainer
ENGINES["ours"] = made
cell = Cell("llama-22m", "bf16", 1, 32, 1, 1.0, 40_000_000, 0)
profile = load_profile("h100").with_device_memory(38_000_000)
plan = ullage.plan(ullage.Request(model_config(cell.model), profile, seq_len=32, micro_batch=1, clip=True))
Path("plan.json").write_text(plan.to_json())
outcome = worker.run(Job(cell, "ours", device="cuda", num_warm_up=1, num_timed=1, plan="plan.json"))
total = torch.cuda.mem_get_info()[1]
told = [outcome.detail["num_alloc_retries"], outcome.detail["attention"]]
print(json.dumps([outcome.error, making, bounds, total, outcome.peak_device_bytes, told]))
""",
    )
    error, ((made_bytes, bounds_then),), bounds, total_bytes, peak_bytes, told = found
    assert error is None
    assert told[0] >= 0
    assert told[1] in ([], ["flash"], ["cudnn"])
    assert made_bytes > 40_000_000  # it was made on the device,
    assert bounds_then == []  # which was not bounded then,
    assert bounds == [pytest.approx(40_000_000 / total_bytes)]
    assert peak_bytes < made_bytes  # and what that took is not counted: segments of 20 MiB, of which few are used here


def test_what_an_engine_keeps_on_the_device_is_paid_for(tmp_path: Path) -> None:
    errors = on_gpu(
        tmp_path,
        """
ENGINES["keeps"] = InMemory  # which alone may have all of the device, by its name
cell = Cell("llama-tiny", "bf16", 1, 16, 1, 1.0, 1_000_000, 0)
jobs = [Job(cell, engine, device="cuda", num_warm_up=1, num_timed=1) for engine in ("keeps", "in_memory")]
print(json.dumps([worker.run(job).error for job in jobs] + [len(bounds)]))
""",
    )
    assert errors[0].startswith("MemoryError: the engine keeps 0.00 GB on the device before it trains, more than")
    assert errors[1:] == [None, 0]


def test_memory_is_pinned_without_rounding_up(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
import gc
from benchmarks.peers.host_memory import pinned_exactly
runtime, registered = torch.cuda.cudart(), {}
class Recorded:
    def cudaHostRegister(self, address, num_bytes, flags):
        registered[address] = num_bytes
        return runtime.cudaHostRegister(address, num_bytes, flags)
    def cudaHostUnregister(self, address):
        del registered[address]
        return runtime.cudaHostUnregister(address)
torch.cuda.cudart = Recorded
values = torch.arange(3 * 5000, dtype=torch.bfloat16).view(3, -1)
pinned = pinned_exactly(values)
equal, then = torch.equal(pinned, values), list(registered.values())
at_its_beginning = pinned.data_ptr() in registered
del pinned
gc.collect()
print(json.dumps([equal, then, at_its_beginning, len(registered)]))
""",
    )
    assert found == [True, [30_000], True, 0]


def test_models_change_their_type_at_home(tmp_path: Path) -> None:
    peaks = on_gpu(
        tmp_path,
        """
cell = Cell("llama-22m")
torch.cuda.reset_peak_memory_stats()
model = make_model(cell, "cuda", torch.float32, home="cpu")
places = {(str(p.device), str(p.dtype)) for p in model.parameters()}
num_params = sum(p.numel() for p in model.parameters())
print(json.dumps([sorted(places), torch.cuda.max_memory_allocated() / num_params]))
""",
    )
    assert peaks[0] == [["cpu", "torch.float32"]]
    assert 2 <= peaks[1] < 2.5  # bytes per parameter: bf16 alone


@pytest.mark.parametrize("name", ["mixed", "fetched", "activations on the host"])
def test_one_kind_of_placement_everywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.agreement._PLANNING_S", 0.2)
    setting = SETTINGS[name]._replace(model="demo-llama", seq_len=64)
    path = tmp_path / "plan.json"
    assert planned(setting, load_profile("h100"), path) is None
    plan = load_plan(path)
    units = plan.decisions.units.values()
    assert setting.placing is not None
    assert {place for unit in units for place in unit.update} == set(setting.placing.update)
    assert setting.placing.params in {unit.params for unit in units}
    assert setting.placing.activations in {unit.activations for unit in units}
    assert plan.prediction.iteration_s == pytest.approx(simulate(plan).period_s, rel=1e-6)


def test_means_leave_out_what_is_compiled() -> None:
    def found(error: float, **more: float) -> dict[str, Any]:
        return {"error": error, "over_bound": 1.2, "memory": {"gpu": {"error": -error / 10}}, **more}

    rows = {"mixed": found(0.01), "planned": found(-0.03, refitted_error=0.02), "compiled": found(0.5)}
    said = summary(rows)
    assert said["num_runs"] == 2
    assert said["time"] == {"mean": pytest.approx(0.02), "worst": -0.03, "worst_case": "planned"}
    assert said["time_after_refit"]["mean"] == pytest.approx(0.02)
    assert said["memory"] == {"mean": pytest.approx(0.002), "worst": 0.003, "worst_case": "planned, gpu"}
    assert said["over_bound_of_own_plans"] == {"planned": 1.2}
    assert summary({"compiled": found(0.5)}) == {"num_runs": 0}


def test_where_calibration_left_nothing_plans_are_for_this_machine() -> None:
    packaged, here = load_profile("h100"), stand_in(load_profile("h100"))
    assert here.host.memory_bytes.value < available_memory_bytes() < packaged.host.memory_bytes.value
    assert (here.host.num_cores, here.host.num_optimizer_cores) == (num_cores(), num_cores())
    assert here.device == packaged.device

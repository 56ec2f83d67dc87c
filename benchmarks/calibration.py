"""How well does calibration repeat itself? Calibrate twice, and compare every quantity and what is predicted by both.

    python benchmarks/calibration.py                about nine minutes; best while nothing else runs
    python benchmarks/calibration.py --quick        about a minute and a half
    python benchmarks/calibration.py --read A B     compare two profiles that one machine was measured for before

Each calibration is a process of its own, as a user would start it. Of every quantity the spread of its repetitions
(p10, p90, their number) is kept beside the ratio of both values; of each prediction, the iteration time of one plan
priced by both profiles, and of the plan that each of them would choose.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.origin import origin, write_result
from hwprofiles.paths import Item, quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.costs.model import CostModel
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.simulate.machine import run_until_steady
from ullage.analysis.provenance import spread, unit_and_value
from ullage.report.profile import differences

RESULTS = Path(__file__).parent / "results"

# What is predicted on each kind of device: model, device memory, tokens per sequence, sequences per micro-batch. Some
# are bound by computing, some, with hardly any tokens, by updates and copies.
SETTINGS: dict[str, tuple[tuple[str, float, int, int], ...]] = {
    "host": (
        ("demo-llama", 180e6, 256, 2),
        ("demo-llama", 120e6, 16, 1),
        ("gpt2", 700e6, 512, 1),
        ("gpt2", 400e6, 16, 1),
        ("opt-350m", 1.2e9, 128, 1),
    ),
    "gpu": (
        ("qwen2.5-0.5b", 70e9, 2048, 8),
        ("llama-3.2-1b", 16e9, 2048, 4),
        ("llama-3.2-1b", 8e9, 256, 1),
        ("llama-3.2-3b", 20e9, 2048, 4),
        ("llama-3.1-8b", 40e9, 4096, 4),
    ),
}


def calibrated(path: Path, *, quick: bool) -> HardwareProfile:
    """Measure this machine in a process of its own."""
    command = [sys.executable, "-m", "ullage", "calibrate", "--output", str(path), "--json"]
    subprocess.run([*command, *(["--quick"] if quick else [])], check=True, stdout=subprocess.DEVNULL)
    return load_profile(str(path))


def prediction(setting: tuple[str, float, int, int], profiles: list[HardwareProfile]) -> dict[str, Any]:
    """Return what both profiles predict of the first one's plan, and of their own."""
    model, memory_bytes, seq_len, micro_batch = setting
    plans = []
    for profile in profiles:
        hardware = profile.with_device_memory(int(memory_bytes))
        plans.append(make_plan(Request(resolve_model(model), hardware, seq_len=seq_len, micro_batch=micro_batch)))
    same_s = [iteration_s(plans[0], profile) for profile in profiles]
    own_s = [plan.prediction.iteration_s for plan in plans]
    return {
        "model": model,
        "device_memory_bytes": memory_bytes,
        "seq_len": seq_len,
        "micro_batch": micro_batch,
        "same_plan_s": same_s,
        "own_plan_s": own_s,
        "ratio": same_s[1] / same_s[0],
        "own_ratio": own_s[1] / own_s[0],
    }


def iteration_s(plan: Plan, profile: HardwareProfile) -> float:
    """Return the iteration time of a plan, priced by another profile than its own."""
    return run_until_steady(plan.schedule(), CostModel.of(profile, plan.units(), plan.decisions)).period_s


def described(item: Item) -> dict[str, Any]:
    """Return a quantity's value (of a curve, its best rate), spread and number of repetitions."""
    unit, value = unit_and_value(item)
    low, high = spread(item) or (None, None)
    return {"value": value, "p10": low, "p90": high, "n": item.provenance.num_samples, "unit": unit}


def main() -> None:
    """Calibrate twice, predict, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the quick calibration")
    parser.add_argument("--read", nargs=2, metavar=("FIRST", "SECOND"), help="profiles to compare; measure nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "calibration.json")
    args = parser.parse_args()
    began, loads = origin("torch", "numba", "numpy"), []
    if args.read:
        profiles = [load_profile(name) for name in args.read]
    else:
        with tempfile.TemporaryDirectory() as folder:
            profiles = []
            for number in range(2):
                loads.append(os.getloadavg()[0])
                profiles.append(calibrated(Path(folder) / f"{number}.json", quick=args.quick))
    first, second = (quantities(profile) for profile in profiles)
    repeated: dict[str, dict[str, Any]] = {
        d.path: {"first": described(first[d.path]), "second": described(second[d.path]), "ratio": d.ratio}
        for d in differences(*profiles)
        if d.ratio is not None and d.path in first and not d.path.endswith(("memory_bytes", "capacity_bytes"))
    }
    predictions = [prediction(setting, profiles) for setting in SETTINGS[profiles[0].device.kind]]
    ratios = [max(q["ratio"], 1 / q["ratio"]) for q in repeated.values()]
    worst = max((p[kind] for p in predictions for kind in ("ratio", "own_ratio")), key=lambda r: max(r, 1 / r))
    summary = {
        "num_quantities": len(repeated),
        "median_quantity_off": statistics.median(ratios) - 1,
        "worst_quantity_off": max(ratios) - 1,
        "worst_prediction_off": max(worst, 1 / worst) - 1,
    }
    result = {
        **began,
        "load_averages": loads,
        "quick": args.quick,
        "summary": summary,
        "quantities": repeated,
        "predictions": predictions,
    }
    write_result(args.output, result)
    print(json.dumps({**summary, "written": args.output.name}))


if __name__ == "__main__":
    main()

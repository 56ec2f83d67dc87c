"""Are plans on this GPU as fast, and as large, as predicted? Ten plans, predicted and measured.

    python benchmarks/gpu/agreement.py --profile profile.json --budget 300      plan, execute, compare
    python benchmarks/gpu/agreement.py --read                                   compare again what lies in the folder
    python benchmarks/gpu/agreement.py --profile laptop.json --model demo-llama --seq-len 64    does it run?

Seven plans have one kind of placement everywhere, so that each lane is busy in one of them at least; three are the
planner's own. All are planned first, at the same time, then executed one after another, the most telling first, each by
``ullage execute`` in a process of its own. What --budget leaves no time for is not begun, and named.

Beside the result file, a folder of each plan has ``plan.json``, ``run.json`` (all measured tasks, for ``ullage
compare``) and ``trace.json.gz`` (predicted beside measured). An error is positive where too much was predicted. *After
a refit*, the profile is fitted to one run, that of ``mixed``, which has tasks on all lanes of a host link, and predicts
the others with it. *span* is the share of an iteration in which a unit is under way on the GPU: from its first kernel
to its last, with the gaps between them.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from benchmarks import prepared
from benchmarks.calibration import iteration_s
from benchmarks.forks import started
from benchmarks.origin import gpu_facts, origin, write_result
from executor.devices.cuda import RESERVED, RETRIES
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.costs.model import CostModel
from planner.decisions import Activations, Decisions, Place, UnitDecision
from planner.graph import Unit
from planner.models import resolve_model
from planner.plan.document import Plan, load_plan
from planner.plan.planning import make_plan
from planner.schedule.series import busy
from planner.search.scoring import Scorer
from ullage.analysis.comparison import Explained, explain_run
from ullage.analysis.runs import MIN_MEASURED, RunRecord, load_run

OUTPUT: Final = Path(__file__).parents[2] / "out" / "gpu" / "agreement.json"
GOALS: Final = {"error": 0.05, "mean_error": 0.03, "refitted_error": 0.04, "memory_error": 0.03, "over_bound": 1.10}
FITTED_TO: Final = "mixed"
_READ: Final = {"goals", "summary", "not_run", "rows"}  # what --read makes again
_PLANNING_S: Final = 12.0
_LIMIT_S: Final = 180.0  # of one execution: the largest model's state is made and registered in a third of that


class Placing(NamedTuple):
    """One kind of placement for a whole model; update places take turns over the subgroups."""

    params: Literal["gpu", "host"]
    update: tuple[Place, ...]
    activations: Activations


class Setting(NamedTuple):
    """What is planned: sequences, tokens of each, micro-batches; ``placing`` is ``None`` for the planner's own choice.

    ``device_bytes``: memory of the device that the plan may use; ``None``: all.
    """

    model: str
    micro_batch: int
    seq_len: int
    num_micro_batches: int = 1
    placing: Placing | None = None
    device_bytes: int | None = None
    compiled: bool = False
    num_iterations: int = 10


SETTINGS: Final[Mapping[str, Setting]] = {
    "host updates": Setting("llama-3.2-1b", 4, 2048, placing=Placing("gpu", (Place.CPU,), "keep")),
    "mixed": Setting("llama-3.2-1b", 4, 2048, placing=Placing("gpu", (Place.CPU, Place.GPU, Place.STREAM), "keep")),
    "resident": Setting("qwen2.5-0.5b", 8, 2048, placing=Placing("gpu", (Place.GPU,), "keep")),
    "fetched": Setting("llama-3.2-3b", 4, 2048, placing=Placing("host", (Place.CPU,), "recompute")),
    "planned": Setting("llama-3.2-3b", 4, 2048, device_bytes=20_000_000_000),
    "streamed": Setting("llama-3.2-1b", 2, 2048, placing=Placing("gpu", (Place.STREAM,), "recompute")),
    "activations on the host": Setting("qwen2.5-1.5b", 4, 4096, placing=Placing("gpu", (Place.CPU,), "offload")),
    "planned, 8B": Setting("llama-3.1-8b", 4, 4096, device_bytes=40_000_000_000, num_iterations=MIN_MEASURED),
    "8B in 12 GiB": Setting("llama-3.1-8b", 4, 2048, 8, device_bytes=12 << 30, num_iterations=MIN_MEASURED),
    "accumulated": Setting("llama-3.2-1b", 4, 2048, 8, placing=Placing("gpu", (Place.CPU,), "recompute")),
    "compiled": Setting("llama-3.2-1b", 4, 2048, device_bytes=16_000_000_000, compiled=True),
}  # fmt: skip
"""The plans, the most telling first."""


def folder_name(name: str) -> str:
    """Return the folder of a setting."""
    return name.replace(",", "").replace(" ", "-")


def placed(plan: Plan, placing: Placing) -> Plan:
    """Return a plan for the same model and machine with one kind of placement, and what is predicted of it."""
    places = itertools.cycle(placing.update)

    def decided(unit: Unit) -> UnitDecision:
        old = plan.decisions.units[unit.name]
        update = tuple(itertools.islice(places, len(old.update)))
        return UnitDecision(
            params=placing.params if update and Place.GPU not in update else "gpu",
            activations=placing.activations if unit.recompute else old.activations,
            update=update,
        )

    units = plan.units()
    decisions = Decisions.model_validate(dict(plan.decisions) | {"units": {unit.name: decided(unit) for unit in units}})
    scorer = Scorer(units, plan.seq_len, CostModel.of(plan.hardware, units, decisions))
    return plan.model_copy(update={"decisions": decisions, "prediction": scorer.predict(decisions)}).sealed()


def request_of(setting: Setting, profile: HardwareProfile) -> Request:
    """Return what is planned for a setting."""
    if setting.device_bytes:
        profile = profile.with_device_memory(min(setting.device_bytes, int(profile.device.memory_bytes.value)))
    return Request(
        resolve_model(setting.model),
        profile,
        seq_len=setting.seq_len,
        micro_batch=setting.micro_batch,
        num_micro_batches=setting.num_micro_batches,
        storage="activations" if setting.placing and setting.placing.activations == "offload" else "never",
    )


def planned(setting: Setting, profile: HardwareProfile, path: Path) -> str | None:
    """Write a setting's plan; return why there is none, if so."""
    try:
        request = request_of(setting, profile)
        if setting.placing is None:
            plan = prepared.planned(request, path.parent.name, _PLANNING_S)
        else:
            plan = make_plan(request, budget_s=_PLANNING_S)
        plan = placed(plan, setting.placing) if setting.placing else plan
    except ValueError as error:
        return f"not planned: {error}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.to_json(), encoding="utf-8")
    return None if plan.prediction.fits else "not executed: the plan does not fit in memory"


def executed(setting: Setting, folder: Path, limit_s: float) -> str | None:
    """Execute a plan in a process of its own; return why there is no run, if so."""
    command = [sys.executable, "-m", "ullage", "execute", str(folder / "plan.json"), "--json"]
    command += [
        "--iterations",
        str(setting.num_iterations),
        "--output-dir",
        str(folder),
        *(["--compile"] * setting.compiled),
        *(["--audit", "off"] * (folder.name != folder_name(FITTED_TO))),
    ]
    process = started(command, os.environ, folder / "log.txt", folder / "screen.json")
    try:
        code = process.wait(limit_s)
    finally:
        process.end()
    if code is None:
        return f"took more than {limit_s:.0f} s"
    lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"ended with {code}: {last}"[:500] if code else None


def row(record: RunRecord, found: Explained) -> dict[str, Any]:
    """Return what is kept of one run: predicted and measured time and memory, and why they differ."""
    compared, plan = found.comparison.to_json(), record.plan
    timeline, steady = record.timeline, record.steady_iterations
    measured_s = found.attribution.measured_s
    chosen = plan.decisions
    return {
        "model": plan.model.name,
        "batch": [chosen.micro_batch, plan.seq_len, chosen.num_micro_batches],
        "device_memory_bytes": plan.hardware.device.memory_bytes.value,
        **compared["phases"]["iteration"],
        "measured_p10": found.p10_s,
        "measured_p90": found.p90_s,
        "cause": found.answer,
        "memory": {tier: part for tier, part in compared["memory"].items() if part["predicted"]},
        "device_span_share": statistics.median(
            busy(timeline, i)["gpu"].integral / timeline.period_s(i) for i in steady
        ),
        "bound_s": plan.certificate.bound_s,
        "over_bound": measured_s / plan.certificate.bound_s,
        "tokens_per_s": chosen.micro_batch * plan.seq_len * chosen.num_micro_batches / measured_s,
        "losses": [record.losses[0], record.losses[-1]],
        "attention": record.attention,
        "reserved_bytes": record.allocator.get(RESERVED),
        "num_alloc_retries": record.allocator.get(RETRIES),
    }


def _explained(path: Path) -> tuple[dict[str, Any], HardwareProfile] | str:
    try:
        record = load_run(path)
        found, _ = explain_run(record)
    except ValueError as error:
        return f"not compared: {error}"
    return row(record, found), found.refitted.profile


def read(pool: Executor, folder: Path, names: Sequence[str], not_run: Mapping[str, str]) -> dict[str, Any]:
    """Return predicted beside measured of all runs in a folder, and what they say together."""
    paths = {name: folder / folder_name(name) / "run.json" for name in names if name not in not_run}
    results = dict(zip(paths, pool.map(_explained, paths.values()), strict=True))
    not_run = dict(not_run) | {name: found for name, found in results.items() if isinstance(found, str)}
    compared = {name: found for name, found in results.items() if not isinstance(found, str)}
    rows = {name: found for name, (found, _) in compared.items()}
    if FITTED_TO in rows:
        for name in rows.keys() - {FITTED_TO}:
            predicted_s = iteration_s(load_plan(folder / folder_name(name) / "plan.json"), compared[FITTED_TO][1])
            rows[name]["refitted_error"] = predicted_s / rows[name]["measured"] - 1
    return {"goals": GOALS, "summary": summary(rows), "not_run": not_run, "rows": rows}


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return means and worst cases. ``--compile`` is not part of a prediction, so its run is in none of them."""
    told = {name: found for name, found in rows.items() if not SETTINGS[name].compiled}
    if not told:
        return {"num_runs": 0}
    times = {name: found["error"] for name, found in told.items()}
    refitted = {name: found["refitted_error"] for name, found in told.items() if "refitted_error" in found}
    memory = {
        f"{name}, {tier}": part["error"] for name, found in told.items() for tier, part in found["memory"].items()
    }
    result: dict[str, Any] = {"num_runs": len(told)}
    for kind, errors in (("time", times), ("time_after_refit", refitted), ("memory", memory)):
        if errors:
            worst = max(errors, key=lambda name: abs(errors[name]))
            mean = statistics.fmean(abs(error) for error in errors.values())
            result[kind] = {"mean": mean, "worst": errors[worst], "worst_case": worst}
    own = {name: found["over_bound"] for name, found in told.items() if SETTINGS[name].placing is None}
    return result | {"over_bound_of_own_plans": own}


def plan_all(pool: Executor, settings: Mapping[str, Setting], profile: HardwareProfile, folder: Path) -> dict[str, str]:
    """Plan; return which settings have no plan to execute, and why."""
    plans = {
        name: pool.submit(planned, s, profile, folder / folder_name(name) / "plan.json") for name, s in settings.items()
    }
    return {name: why for name, future in plans.items() if (why := future.result())}


def measure(settings: Mapping[str, Setting], folder: Path, not_run: Mapping[str, str], end_s: float) -> dict[str, str]:
    """Execute the plans that there are, until a time of the clock; return which settings were not run, and why."""
    not_run = dict(not_run)
    for name, setting in settings.items():
        if name in not_run:
            continue
        left_s = end_s - time.monotonic()
        begin_s = time.monotonic()
        began = time.strftime("%H:%M:%S")  # so that clocks and power of that time can be found
        why = executed(setting, folder / folder_name(name), min(left_s, _LIMIT_S)) if left_s > 5 else "no time was left"
        if why:
            not_run[name] = why
        print(
            f"[{left_s:4.0f} s left] {began} {name}: {why or f'{time.monotonic() - begin_s:.0f} s'}",
            file=sys.stderr,
            flush=True,
        )
    return not_run


def table(result: Mapping[str, Any]) -> str:
    """Return the result as lines to print."""
    lines = ["plan                      predicted   measured    error  refitted   memory  span  over bound"]
    for name, found in result["rows"].items():
        worst = max((part["error"] for part in found["memory"].values()), key=abs)
        refitted = f"{found['refitted_error']:+9.1%}" if "refitted_error" in found else " " * 9
        lines.append(
            f"{name:24} {found['predicted']:9.3f} s {found['measured']:8.3f} s {found['error']:+8.1%} {refitted} "
            f"{worst:+8.1%} {found['device_span_share']:5.0%} {found['over_bound']:11.2f}   {found['cause']}"
        )
    return "\n".join([*lines, *(f"{name}: {why}" for name, why in result["not_run"].items())])


def main() -> None:
    """Plan, execute, read, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="local", metavar="NAME|PATH", help="the machine's profile (its own)")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="for plans and runs (600)")
    parser.add_argument(
        "--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="PLAN", help="these alone"
    )
    parser.add_argument("--model", help="in place of every setting's own")
    parser.add_argument("--seq-len", type=int, metavar="N", help="likewise, tokens of a sequence")
    parser.add_argument("--read", action="store_true", help="execute nothing; compare what lies in the folder")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="PATH", help="result file; runs go beside it")
    args = parser.parse_args()
    folder = args.output.parent / "agreement"
    end_s = time.monotonic() + args.budget
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the execution under way is ended too
    # Forked, so that none of them imports anything, and before CUDA is initialised here, if at all.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        if args.read:
            began = {key: value for key, value in json.loads(args.output.read_text()).items() if key not in _READ}
            not_run = {n: "there is no run" for n in SETTINGS if not (folder / folder_name(n) / "run.json").exists()}
        else:
            profile = load_profile(args.profile)
            began = origin("torch", "transformers", "numba", "numpy")
            chosen = {
                n: s._replace(model=args.model or s.model, seq_len=args.seq_len or s.seq_len)
                for n, s in SETTINGS.items()
                if n in args.only
            }
            not_run = plan_all(pool, chosen, profile, folder)
            if profile.device.kind == "gpu":
                began |= gpu_facts()
            not_run = measure(chosen, folder, not_run, end_s)
            not_run |= {name: "not asked for" for name in SETTINGS if name not in chosen}
            write_result(args.output, {**began, "not_run": not_run})  # so that --read can go on if this is cut
        result = {**began, **read(pool, folder, list(SETTINGS), not_run)}
    write_result(args.output, result)
    print(table(result))


if __name__ == "__main__":
    main()

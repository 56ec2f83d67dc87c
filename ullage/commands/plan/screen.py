"""The screen of `ullage plan`."""

import shlex
from pathlib import Path

from rich.table import Table

from planner.choices.choice import Choice
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.models.captured import counted
from planner.optimizers import OPTIMIZERS
from planner.plan.document import Plan, describe
from planner.schedule.tasks import Lane, MemoryClass, Tier
from planner.simulate.critical_path import used_meanwhile
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import TierMemory
from ullage.analysis.provenance import origin_words
from ullage.commands.plan.checkpoint_screen import checkpoints_screen
from ullage.output.console import console, facts, table
from ullage.output.formatting import TIER_WORDS, binds, percent, si
from ullage.output.plans import batch_line, engine_fits, engine_setting, faster_line, gap_line, mfu, model_line
from ullage.rivals.engines.catalogue import POLICIES, policies_of
from ullage.training.processes import launch_line, ranks_per_node

# If updates on the CPU have at least this share of the critical path, the screen says what slows them.
_MATTERS = 0.25


def plan_screen(plan: Plan, path: Path, *, default_hardware: bool) -> None:
    """Print a plan.

    Args:
        plan: the plan to print.
        path: path of its file.
        default_hardware: whether the hardware is the packaged default, because none was given.
    """
    out = console()
    out.print(facts(_summary(plan, path, default_hardware=default_hardware)))
    out.print()
    out.print(memory_table(plan.prediction.memory))
    out.print()
    out.print(_engine_table(plan))
    if left_out := [name for name in POLICIES if name not in policies_of(plan.decisions.optimizer)]:
        words = OPTIMIZERS[plan.decisions.optimizer].words
        out.print(f"not compared: {', '.join(left_out)}; Ullage does not simulate these engines with {words}")
    if plan.checkpoints is not None:
        for part in checkpoints_screen(plan.checkpoints):
            out.print()
            out.print(part)
    for warning in plan.warnings:
        out.print(f"warning: {warning}", soft_wrap=True)
    if not plan.prediction.converged:
        out.print("warning: simulated iterations differ; times are of one of them")
    out.print(f"plan written to {path}", soft_wrap=True)


def memory_table(memory: dict[Tier, TierMemory]) -> Table:
    """Return peak memory per tier by class, against capacity."""
    result = table("peak memory", "", *(TIER_WORDS[tier] for tier in memory))
    for memory_class in MemoryClass:
        held = [use.by_class.get(memory_class, 0) for use in memory.values()]
        if any(held):
            result.add_row(memory_class.value, *(si(n, "B") if n else "" for n in held))
    result.add_row("all", *(si(use.peak_bytes, "B") for use in memory.values()), style="bold")
    result.add_row("capacity", *(si(use.capacity_bytes, "B") for use in memory.values()))
    result.add_row("used", *(percent(use.peak_bytes / use.capacity_bytes) for use in memory.values()))
    return result


def _summary(plan: Plan, path: Path, *, default_hardware: bool) -> dict[str, str]:
    decided, seen, hardware = plan.decisions, plan.prediction, plan.hardware
    chosen = " (the default; choose another with --hardware)" if default_hardware else ""
    return {
        "model": model_line(plan.model),
        "hardware": f"{hardware.name}{chosen}: {hardware.description}. Its quantities are {origin_words(hardware)}",
        "batch": batch_line(plan),
        **_narrow_state(plan),
        **_choice(plan),
        "fits": _fits(seen.memory),
        "iteration": f"{si(seen.iteration_s, 's')} = forward {si(seen.forward_s, 's')} + backward "
        f"{si(seen.backward_s, 's')} + update {si(seen.update_s, 's')} (updates may run inside the next forward)",
        "speed": f"{seen.tokens_per_s:,.0f} {counted(plan.model)}/s; {si(seen.model_flop_per_s, 'FLOP/s')} of the "
        f"model per device, {percent(mfu(plan))} of the best GEMM rate",
        "binds": binds(seen.critical_s, seen.iteration_s),
        **_host_memory(plan),
        "best": gap_line(plan),
        **({"faster": faster} if (faster := faster_line(plan)) else {}),
        "placement": describe(decided, plan.units()),
        **_execution(plan, path),
        **_storage(plan),
    }


def _narrow_state(plan: Plan) -> dict[str, str]:
    """Return how many bytes a low-precision optimizer state saves."""
    decided = plan.decisions
    if (wide := OPTIMIZERS[decided.optimizer].wide) is None:
        return {}
    own_bytes, wide_bytes = (
        decided.precision.state_bytes_per_param(decided.optimizer),
        OPTIMIZERS[wide].state_bytes_per_param,
    )
    if decided.precision.rounds:  # there the weight is part of the state
        wide_bytes += decided.precision.weight_bytes
    num_params = sum(decided.shard_params(unit) for unit in plan.units()) // decided.pipeline_parallel
    saved = si((wide_bytes - own_bytes) * num_params, "B")
    counted = " with the weight" if decided.precision.rounds else ""
    words = f"{own_bytes:.3g} bytes per parameter{counted}, {wide_bytes} with {wide}: {saved} less for each device"
    return {"state": words}


def _choice(plan: Plan) -> dict[str, str]:
    """Return the chosen parallel degrees and batch sizes, if the planner chose them."""
    choices = {proof.choice for proof in plan.certificate.proofs}
    if len(choices) == 1:
        return {}
    made = Choice.model_validate({name: getattr(plan.decisions, name) for name in Choice.model_fields})
    return {"choice": f"{made.words}: the best found of {len(choices)}, and the bound holds for all of them"}


def _execution(plan: Plan, path: Path) -> dict[str, str]:
    """Return why a plan cannot be executed, or how to start its processes."""
    decided = plan.decisions
    stages = decided.pipeline_parallel
    ahead = [f"{stages} pipeline stages (--pipeline-parallel 1 plans none)"] if stages > 1 else []
    if ahead:
        return {"execution": f"planned and simulated, not executed: {', '.join(ahead)}"}
    if decided.num_devices == 1:
        return {}
    line = launch_line(decided.num_devices, ranks_per_node(plan), plan=shlex.quote(str(path)))
    return {"execution": f"one process per device: {line}"}


def _host_memory(plan: Plan) -> dict[str, str]:
    """Return the use of host memory if updates on the CPU bind, or that host and device share one memory."""
    seen, hardware = plan.prediction, plan.hardware
    if hardware.one_memory:
        words = "host and device share one memory, so offloading to the host gains nothing"
        return {"host memory": words}
    if seen.critical_s.get(Lane.CPU, 0.0) < _MATTERS * seen.iteration_s:
        return {}
    schedule, cost = plan.schedule(), CostModel.of(hardware, plan.units(), plan.decisions)
    found = run_until_steady(schedule, cost)
    used = used_meanwhile(
        found.timeline, found.steady, Lane.CPU, Resource.DRAM, cost.prices(schedule), cost.capacities()
    )
    rate = si(hardware.host.dram_bytes_per_s.value, "B/s")
    return {"host memory": f"optimizer steps on the CPU bind; while they run, they use {percent(used)} of its {rate}"}


def _storage(plan: Plan) -> dict[str, str]:
    """Return the bytes written to drives, which wear them."""
    lanes = {Lane.NVME_WRITE, Lane.NVME_STATE_OUT}
    written_bytes = sum(task.num_bytes for task in plan.schedule().tasks if task.lane in lanes)
    return (
        {"storage": f"{si(written_bytes, 'B')} per device and iteration are written to NVMe, which wears its drives"}
        if written_bytes
        else {}
    )


def _fits(memory: dict[Tier, TierMemory]) -> str:
    if short := [f"{si(use.missing_bytes, 'B')} of {tier} memory" for tier, use in memory.items() if use.missing_bytes]:
        return "no: short of " + " and ".join(short)
    return "yes"


def _engine_table(plan: Plan) -> Table:
    ours_s = plan.prediction.iteration_s
    title = f"engines ({plan.num_simulations} schedules simulated)"
    result = table(title, "engine", "time", "ratio", "fits", "setting", text={3, 4})
    result.add_row("ullage", si(ours_s, "s"), "1.00", "yes", describe(plan.decisions, plan.units()), style="bold")
    for row in plan.engines:
        time_s = row.iteration_s if row.fits else None
        times = (si(time_s, "s"), f"{time_s / ours_s:.2f}") if time_s else ("-", "-")
        result.add_row(row.name, *times, engine_fits(row), engine_setting(row))
    return result

"""``ullage simulate``: one iteration of a plan in detail."""

import argparse
import sys
from pathlib import Path
from typing import Any

from planner.engines import POLICIES
from planner.plan import Plan, load_plan
from planner.prediction import critical_path, memory_peaks
from planner.schedule import Tier
from planner.simulate.machine import Simulation
from planner.timeline import MemoryUse, memory_use
from planner.trace import chrome_trace, write_trace
from ullage.arguments import positive_int
from ullage.commands import Subparsers, command_parser
from ullage.simulation import OURS, cost_model, engine_decisions, schedule_of, simulate

_CHART_COLUMNS = 72


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "simulate",
        run,
        "Simulate a plan's schedule: phases, what every lane does, memory over time, and what binds.",
        """
        ullage simulate plan.json
        ullage simulate plan.json --engine twin-flow 0.4 --trace twin-flow.json.gz
        ullage simulate plan.json --text | less
        """,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="what `ullage plan` wrote")
    parser.add_argument(
        "--engine",
        nargs="+",
        default=[OURS],
        metavar=("NAME", "SETTING"),
        help=f"simulate this instead of the plan's own decisions: {', '.join(POLICIES)}; the setting is the fraction "
        "that the CPU updates (twin-flow) or the stride (interleaved), by default the best one",
    )
    parser.add_argument("--iterations", type=positive_int, metavar="N", help="how many (default: until they repeat)")
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="write a trace for ui.perfetto.dev (.json, .json.gz)"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--text", action="store_true", help="print the schedule, one line per task, and nothing else")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    if len(args.engine) > 2:
        raise ValueError(f"--engine {' '.join(args.engine)}: give a name and at most one setting")
    if args.iterations == 1:
        raise ValueError("--iterations 1: an iteration ends where the next one begins; give at least 2")
    plan = load_plan(args.plan)
    decisions = engine_decisions(plan, *args.engine)
    if args.text:
        sys.stdout.write(schedule_of(plan, decisions).to_text() + "\n")
        return 0
    simulation = simulate(plan, args.iterations, decisions)
    if args.trace:
        write_trace(args.trace, chrome_trace({"predicted": simulation.timeline}))
    if args.json:
        from ullage.console import write_json  # noqa: PLC0415 - the same module as the tables

        write_json(summary(plan, simulation))
    else:
        _print(plan, " ".join(args.engine), simulation)
        if args.trace:
            sys.stdout.write(f"trace written to {args.trace}\n")
    return 0


def summary(plan: Plan, simulation: Simulation) -> dict[str, Any]:
    """Return what is shown, as plain data; seconds and bytes."""
    timeline, steady = simulation.timeline, simulation.steady
    phases = timeline.phases(steady)
    return {
        "phases_s": {
            "forward": phases.forward_s,
            "backward": phases.backward_s,
            "update": phases.update_s,
            "iteration": phases.iteration_s,
        },
        "busy_s": {lane.value: seconds for lane, seconds in timeline.busy_s(steady).items()},
        "critical_s": critical_path(timeline, steady),
        "memory": {
            tier.value: use.model_dump(mode="json")
            for tier, use in memory_peaks(timeline, steady, cost_model(plan)).items()
        },
        "converged": simulation.converged,
        "num_iterations": timeline.num_iterations,
        "num_tasks": len(timeline.schedule.tasks),
    }


def _print(plan: Plan, engine: str, simulation: Simulation) -> None:
    from ullage.console import console, facts, table  # noqa: PLC0415 - --text does without rich
    from ullage.formatting import binds, percent, si  # noqa: PLC0415
    from ullage.screens import memory_table  # noqa: PLC0415

    out = console()
    timeline, steady = simulation.timeline, simulation.steady
    phases = timeline.phases(steady)
    shares = {"forward": phases.forward_s, "backward": phases.backward_s, "update": phases.update_s}
    out.print(
        facts(
            {
                "schedule": f"{plan.model.name} on {plan.hardware.name} by {engine}, {len(timeline.schedule.tasks)} "
                f"tasks, iteration {steady + 1} of {timeline.num_iterations}",
                "iteration": si(phases.iteration_s, "s"),
                **{name: f"{si(s, 's')} ({percent(s / phases.iteration_s)})" for name, s in shares.items()},
                "binds": binds(critical_path(timeline, steady), phases.iteration_s),
            }
        )
    )
    lanes = table("lanes", "lane", "busy", "idle", "busy share")
    for lane, busy_s in timeline.busy_s(steady).items():
        idle_s = max(phases.iteration_s - busy_s, 0.0)
        lanes.add_row(lane.value, si(busy_s, "s"), si(idle_s, "s"), percent(busy_s / phases.iteration_s))
    out.print()
    out.print(lanes)
    out.print()
    out.print(memory_table(memory_peaks(timeline, steady, cost_model(plan))))
    for tier, use in memory_use(timeline, steady).items():
        out.print()
        out.print(_chart(tier, use, phases.iteration_s), markup=False)


def _chart(tier: Tier, use: MemoryUse, period_s: float) -> str:
    """Return one line per class of how its bytes change over the iteration, all to the scale of the tier's peak."""
    from ullage.formatting import si, sparkline  # noqa: PLC0415

    rows = {name.value: columns(use, values, period_s) for name, values in use.num_bytes.items()}
    totals = tuple(map(sum, zip(*use.num_bytes.values(), strict=True)))
    rows["all"] = columns(use, totals, period_s)
    lines = [f"{name:<12}|{sparkline(values, use.peak_bytes)}|" for name, values in rows.items()]
    return "\n".join([f"{tier} memory of one rank over the iteration (full height {si(use.peak_bytes, 'B')})", *lines])


def columns(use: MemoryUse, values: tuple[int, ...], period_s: float) -> list[int]:
    """Return the most bytes held within each column of the chart.

    Args:
        use: says when the amounts change.
        values: the amounts from those times on.
        period_s: what the whole chart covers.
    """
    result = [0] * _CHART_COLUMNS
    ends_s = (*use.times_s[1:], period_s)
    for start_s, end_s, value in zip(use.times_s, ends_s, values, strict=True):
        first = min(int(start_s / period_s * _CHART_COLUMNS), _CHART_COLUMNS - 1)
        last = max(min(int(end_s / period_s * _CHART_COLUMNS), _CHART_COLUMNS - 1), first)
        for column in range(first, last + 1):
            result[column] = max(result[column], value)
    return result

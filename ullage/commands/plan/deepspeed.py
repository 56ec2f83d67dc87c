"""``ullage plan --deepspeed``: training by a DeepSpeed configuration beside the plan."""

import argparse

from hwprofiles.files import write_whole
from planner.choices.request import Request
from planner.optimizers import OPTIMIZERS
from planner.plan.document import describe
from planner.schedule.tasks import Tier
from ullage.analysis.iteration import Iteration
from ullage.cli.options import given_options
from ullage.integrations.deepspeed import SideBySide, side_by_side, words
from ullage.output.formatting import si
from ullage.report.charts import Table
from ullage.report.terminal import Shown, answer
from ullage.rivals.deepspeed.file import load_config
from ullage.rivals.deepspeed.request import imported


def beside_deepspeed(args: argparse.Namespace, request: Request) -> int:
    """Simulate the configuration, plan, write and print. Return 1 if the configuration does not fit in memory."""
    if args.global_batch is not None:
        raise ValueError("--global-batch is given by train_batch_size of the configuration; leave it out")
    if args.mtbf is not None:
        raise ValueError("--mtbf is for a plan, not for a comparison with DeepSpeed; leave --mtbf or --deepspeed out")
    config = load_config(args.deepspeed)
    request, assumed = imported(config, request, given_options(args).__contains__)
    found = side_by_side(request, config.zero_optimization, assumed)
    if found.ours is not None:
        write_whole(args.output, found.ours.to_json())
    answer(args, found.to_json(), *_shown(found), *([f"plan written to {args.output}"] if found.ours else []))
    return 1 if found.theirs.missing else 0


def _shown(found: SideBySide) -> tuple[Shown, ...]:
    """Return DeepSpeed's iteration beside the plan's; all figures are predictions."""
    request = found.request
    tiers = [tier for tier in Tier if tier in found.theirs.peaks]
    summary = {
        "training": f"{request.model.name} on {request.num_devices} device(s) of {request.hardware.name}: "
        f"{request.micro_batch} sequences of {request.seq_len} tokens x {request.num_micro_batches} micro-batch(es), "
        f"{found.theirs.decisions.precision.weights}, {OPTIMIZERS[request.optimizer].words}",
        "DeepSpeed": f"{words(found.zero)}, " + describe(found.theirs.decisions, found.theirs.units),
    }
    if found.ours is not None:
        summary["Ullage"] = describe(found.ours.decisions, found.ours.units())
    sides = {"DeepSpeed": found.theirs} | ({"Ullage": found.our_iteration} if found.our_iteration else {})
    columns = ("", "fits", "iteration", "forward", "backward", "update", *(tier.value for tier in tiers))
    rows = tuple((name, *_cells(seen, tiers)) for name, seen in sides.items())
    lines = [f"DeepSpeed does not fit: {found.theirs.missing}"] if found.theirs.missing else []
    lines += [f"no plan: {found.missing}"] if found.missing else []
    lines += [f"the plan is {found.ratio:.2f} x as fast (predicted)"] if found.ratio is not None else []
    lines += [f"- {line}" for line in found.reasons] + [f"note: {line}" for line in found.assumed]
    return summary, Table("predicted", columns, rows), "", *lines


def _cells(seen: Iteration, tiers: list[Tier]) -> list[str]:
    phases = seen.phases
    times = [si(s, "s") for s in (seen.period_s, phases.forward_s, phases.backward_s, phases.update_s)]
    held = [si(seen.peaks[tier].peak_bytes, "B") if tier in seen.peaks else "" for tier in tiers]
    return ["no" if seen.missing else "yes", *times, *held]

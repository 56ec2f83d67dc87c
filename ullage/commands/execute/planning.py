"""The plan of ``ullage execute --model ...``, for this machine and the memory that is free now."""

import argparse
import os
import sys
from pathlib import Path

from hwprofiles.files import check_output, make_folder
from planner.plan.document import Plan
from ullage.cli.request import request_of
from ullage.output.progress import search_progress
from ullage.rivals import make_plan
from ullage.this_machine.planning import (
    MOST_SIMULATIONS,
    Options,
    free_memory,
    machine_now,
    made_by_rank_0,
    world_size,
)
from ullage.this_machine.profile import profile_here


def planned(args: argparse.Namespace, output_dir: Path) -> Plan:
    """Make the plan that the options describe, write it into the output folder and return it.

    If the machine has no profile, it is measured first. Of several ranks, rank 0 measures, plans and writes.

    Raises:
        ValueError: the model or machine does not exist, or nothing fits.
        OSError: the plan cannot be written.
    """
    path = output_dir / "plan.json"
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        make_folder("--output-dir", output_dir)
        check_output("--output-dir", path)  # before the search
    free = free_memory()
    args.num_devices = args.num_devices or world_size()
    options: Options = {} if args.device_memory is None else {"device_memory": args.device_memory}

    def make() -> Plan:
        if args.hardware is None:
            profile_here()  # becomes the default of --hardware
        request = request_of(args, lambda profile: machine_now({"hardware": profile, **options}, free))
        with search_progress() as progress:
            return make_plan(request, max_simulations=MOST_SIMULATIONS, progress=progress)

    plan = made_by_rank_0(make)
    if is_first:
        plan.save(path)
        sys.stderr.write(f"ullage execute: {plan}; plan written to {path}\n")
    return plan

"""``ullage plan``: plan, print and write; if nothing fits, print changes with which something does."""

import argparse
import atexit
import dataclasses
import gc
import json
import sys

from hwprofiles.files import write_whole
from planner.choices.request import Request
from planner.plan.document import Plan
from planner.plan.planning import InfeasibleError
from planner.plan.unlike import make_unlike_plan
from planner.search import no_garbage_collection
from ullage.cli.exit_codes import BAD_INPUT
from ullage.cli.options import PACKAGED_HARDWARE, Options, given_options
from ullage.cli.request import checkpoints_of, unlike_request, with_pfs
from ullage.output.formatting import si
from ullage.output.progress import progress_bar, search_progress
from ullage.rivals import engine_rows, make_plan
from ullage.this_machine.request import request_here


@no_garbage_collection()
def plan_command(args: argparse.Namespace) -> int:
    """Plan, print and write the plan.

    Returns:
        The exit code.
    """
    atexit.register(gc.freeze)  # otherwise Python's exit searches millions of objects for cycles
    asked = Options(**given_options(args))
    checkpoints = checkpoints_of(asked)
    if args.beside is not None:
        return _plan_unlike(args, asked)
    request = request_here(asked)
    if args.pfs_bandwidth is not None:
        request = dataclasses.replace(request, hardware=with_pfs(request.hardware, args.pfs_bandwidth))
    if args.deepspeed is not None:
        from ullage.commands.plan.deepspeed import beside_deepspeed  # noqa: PLC0415 - few have a configuration

        return beside_deepspeed(args, request)
    try:
        with search_progress() as progress:
            plan = make_plan(request, progress=progress, budget_s=args.budget)
    except InfeasibleError as error:
        return _refuse(args, asked, request, error)
    if checkpoints is not None:
        from ullage.rivals.checkpoints.beside import protected  # noqa: PLC0415 - few ask for checkpoints

        plan = protected(plan, checkpoints)
    return _show(args, plan)


def _plan_unlike(args: argparse.Namespace, asked: Options) -> int:
    """Plan for devices of several kinds; print and write."""
    if wrong := next((flag for flag in ("mtbf", "deepspeed") if getattr(args, flag) is not None), None):
        raise ValueError(f"--{wrong} is not planned for devices of several kinds; leave it or --beside out")
    request, machines = unlike_request(asked, args.beside)
    with progress_bar() as show:

        def divided(count: int, sequences: tuple[int, ...]) -> None:
            show(f"{count} micro-batch(es), of {' and '.join(map(str, sequences))} sequences a device", 0, 0)

        plan = make_unlike_plan(request, machines, budget_s=args.budget, divided=divided)
    return _show(args, plan)


def _show(args: argparse.Namespace, plan: Plan) -> int:
    text = plan.to_json()
    if args.json:
        write_whole(args.output, text)
        sys.stdout.write(text)
        return 0
    from ullage.report.plan import plan_part  # noqa: PLC0415 - rich is slow to import, and --json does without
    from ullage.report.terminal import show  # noqa: PLC0415

    write_whole(args.output, text)
    is_default = args.hardware is None and plan.hardware.name == PACKAGED_HARDWARE
    chosen = " (the default; choose another with --hardware)" if is_default else ""
    show(plan_part(plan, path=args.output, chosen=chosen), f"plan written to {args.output}")
    return 0


def _refuse(args: argparse.Namespace, asked: Options, request: Request, error: InfeasibleError) -> int:
    """Print that nothing fits, and each change with which something does, as soon as it is found.

    Then print the same for every other engine.
    """
    from ullage.cli.remedies import remedies_of  # noqa: PLC0415 - only here
    from ullage.report.plan import engine_line  # noqa: PLC0415 - only here

    _print_line(f"error: {error}")
    found = []
    with progress_bar() as show:
        show("searching for a plan that fits", 0, 0)
        for remedy in remedies_of(asked, request):
            found.append(remedy._asdict())
            time = f"({si(remedy.iteration_s, 's')} per iteration before any search)"
            _print_line(f"it fits with {remedy.change} {time}{remedy.effect and f': {remedy.effect}'}")
    if not found:
        _print_line("no change that was tried makes it fit")
    rows = []
    with progress_bar() as show:
        show("simulating other engines", 0, 0)
        for row in engine_rows(request):
            rows.append(row)
            _print_line(engine_line(row))
    if args.json:
        missing_bytes = {tier.value: num_bytes for tier, num_bytes in error.missing_bytes.items()}
        document = {
            "fits": False,
            "error": str(error),
            "proven": error.proven,
            "missing_bytes": missing_bytes,
            "fits_with": found,
            "engines": [row.model_dump(mode="json") for row in rows],
        }
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return BAD_INPUT


def _print_line(words: str) -> None:
    sys.stderr.write(f"ullage plan: {words}\n")
    sys.stderr.flush()  # it stays on the screen after an interrupt

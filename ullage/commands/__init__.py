"""The subcommands, one a file. Each has ``add_parser(subparsers)`` and ``run(args) -> exit code``."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = object

SUMMARIES = {
    "doctor": "say what this machine has, and what is wrong with it",
    "calibrate": "measure what this machine can do",
    "plan": "find the fastest way to train a model on some hardware",
    "whatif": "say what it would take: other machines, models, batches, and their cost",
    "execute": "run a plan",
    "launch": "print the line that starts a plan on all its devices",
    "checkpoint": "list, check, export and remove checkpoints",
    "simulate": "show one iteration of a plan or an engine in detail",
    "verify": "check that a plan holds what it states",
    "explain": "say why a plan is what it is, and what comes next",
    "compare": "compare a prediction with a run",
    "report": "show a plan, a run or a study as one HTML page",
    "validate": "predict published runs, and show the errors",
    "models": "list the models that are known by name",
    "hardware": "list, show, compare and check hardware profiles",
    "import-deepspeed": "set a configuration of DeepSpeed beside a plan",
    "export-deepspeed": "write the nearest configuration of DeepSpeed to a plan",
    "completion": "print what completes these commands in a shell",
}
"""The commands and what each does, in the order of the help text."""


def command_parser(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], description: str, examples: str
) -> argparse.ArgumentParser:
    """Add the parser of a command.

    Args:
        subparsers: where to.
        name: of the command, a key of :data:`SUMMARIES`.
        run: what runs it.
        description: what it does, for its help text.
        examples: command lines, one a line.
    """
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser = subparsers.add_parser(
        name,
        help=SUMMARIES[name],
        description=description,
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser

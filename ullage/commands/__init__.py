"""The subcommands: one file each, or one folder where a command has screens of its own.

Each has ``add_parser(subparsers)``. Its ``run(args)`` returns an exit code.
"""

import argparse
import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from hwprofiles import __version__
from ullage.cli.exit_codes import BAD_INPUT

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


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # No option begins so: what follows one is its value, such as -1GB, and is refused by its rule.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


def build_parser(*commands: str) -> argparse.ArgumentParser:
    """Return the parser; only these commands are imported and have their options, the others only their summaries."""
    parser = _Parser(
        prog="ullage",
        description="Plan, simulate and execute the training of models that are too big for the GPUs at hand.",
        epilog=(
            "exit codes: 0 fine, 1 a check failed, 2 bad input, 130 interrupted by Ctrl-C (SIGINT), 143 by SIGTERM. "
            "ULLAGE_TRACEBACK=1 shows where an error comes from."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ullage {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in SUMMARIES.items():
        if name in commands:
            importlib.import_module(f"ullage.commands.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def command_parser(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], description: str, examples: str
) -> argparse.ArgumentParser:
    """Add the parser of a command.

    Args:
        subparsers: where to.
        name: of the command, a key of :data:`SUMMARIES`.
        run: what runs it.
        description: its purpose, for the help text.
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
    parser.set_defaults(run=run, command=name)
    return parser

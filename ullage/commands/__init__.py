"""The subcommands: one file each, or one folder for a command with screens of its own.

Each has ``DESCRIPTION`` and ``EXAMPLES`` for its help, and ``add_arguments(parser)``. Its ``run(args)`` returns an exit
code.
"""

import argparse
import difflib
import importlib
import itertools
import re
import textwrap
from typing import Any, NoReturn

from hwprofiles import __version__
from ullage.cli.exit_codes import BAD_INPUT

SUMMARIES = {
    "doctor": "show cores, memory and GPUs of this machine, and the first problem",
    "calibrate": "measure what this machine can do",
    "plan": "find the fastest way to train a model on some hardware",
    "whatif": "plan with other machines, models and batches, and compare speed and cost",
    "execute": "run a plan",
    "launch": "print the line that starts a plan on all its devices",
    "checkpoint": "list, check, export and remove checkpoints",
    "simulate": "show one iteration of a plan or an engine in detail",
    "verify": "check the prediction and the proofs of a plan",
    "explain": "show what bounds a plan, and what each decision is worth",
    "compare": "compare a prediction with a run",
    "report": "show a plan, a run or a study as one HTML page",
    "web": "serve a page that answers what training would take",
    "validate": "predict published runs, and show the errors",
    "models": "list the models that are known by name",
    "hardware": "list, show, compare and check hardware profiles",
    "export-deepspeed": "write the configuration of DeepSpeed that is nearest to a plan",
    "completion": "print the completion script for a shell",
}
"""The commands with their summaries, in the order of the help text."""

_FOLDERS = {"plan", "execute"}  # commands in command.py of a folder of their own


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # No option begins like this, so argparse passes a value such as -1GB on to its type, which refuses it.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments. A command refuses unknown ones first, since what it lacks may be a word that is misspelt."""
        words = itertools.takewhile("--".__ne__, args or ())
        names = [word.partition("=")[0] for word in words if word.startswith("--") and " " not in word]
        unknown = next((name for name in names if name not in self._option_string_actions), None)
        if unknown is not None and self._subparsers is None:
            near = difflib.get_close_matches(unknown, self._option_string_actions, n=2)
            self.error(f"{unknown} is not an option" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        parsed, extras = super().parse_known_args(args, namespace)
        if extras and self._subparsers is None:
            self.error(f"{' '.join(extras)}: too many arguments")
        return parsed, extras

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return arg_string if action.type is None else action.type(arg_string)  # type: ignore[operator]
        except ValueError as error:  # says what is wrong; argparse would only name the type
            raise argparse.ArgumentError(action, str(error)) from None

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


def build_parser(*commands: str) -> argparse.ArgumentParser:
    """Return the parser. Only ``commands`` are imported and have options; every other command has only its summary."""
    parser = _Parser(
        prog="ullage",
        description="Plan, simulate and execute the training of models that are too big for the GPUs at hand.",
        epilog=(
            "exit codes: 0 success, 1 a check failed, 2 bad input, 130 interrupted by Ctrl-C (SIGINT), 143 by SIGTERM. "
            "ULLAGE_TRACEBACK=1 shows where an error comes from."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ullage {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in SUMMARIES.items():
        if name in commands:
            module = f"ullage.commands.{name.replace('-', '_')}"
            _add_command(subparsers, name, importlib.import_module(f"{module}.command" if name in _FOLDERS else module))
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _add_command(subparsers: Any, name: str, command: Any) -> None:
    """Add the parser of a command, which a module of this package has."""
    examples = textwrap.indent(textwrap.dedent(command.EXAMPLES).strip(), "  ")
    parser = subparsers.add_parser(
        name,
        help=SUMMARIES[name],
        description=command.DESCRIPTION,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.set_defaults(run=command.run, command=name)

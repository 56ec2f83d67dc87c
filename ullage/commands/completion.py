"""``ullage completion``: print a shell's completion script."""

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from hwprofiles.registry import list_profiles
from planner.models.registry import list_models
from ullage.commands import SUMMARIES, build_parser

SHELLS: Final = ("bash", "zsh", "fish")


DESCRIPTION = """\
Print a script with which a shell completes commands, options, files, and names of models and machines."""
EXAMPLES = """
    ullage completion bash | tee ~/.local/share/bash-completion/completions/ullage
    ullage completion zsh | tee ~/.zfunc/_ullage
    ullage completion fish | tee ~/.config/fish/completions/ullage.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab  # noqa: PLC0415 - may be missing
    except ImportError as error:
        raise ModuleNotFoundError("completion needs shtab; pip install 'ullage[completion]'", name="shtab") from error
    parser = build_parser(*SUMMARIES)
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    names = {"model": tuple(list_models()), "hardware": (*list_profiles(), "local")}
    for command in commands.choices.values():
        for action in command._actions:
            _describe(action, names, {"file": shtab.FILE, "folder": shtab.DIRECTORY})
    sys.stdout.write(shtab.complete(parser, args.shell) + "\n")
    return 0


def _describe(action: Any, names: dict[str, tuple[str, ...]], places: dict[str, Any]) -> None:
    """Set how the shell completes an option: with known names, or with files."""
    if action.dest in names:
        action.choices = names[action.dest]
    elif action.type is Path or _first_word(action) in {"PATH", "DIR", "PLACE"}:
        action.complete = places["folder" if _first_word(action) in {"DIR", "PLACE"} else "file"]


def _first_word(action: Any) -> str:
    return action.metavar.partition("[")[0] if isinstance(action.metavar, str) else ""

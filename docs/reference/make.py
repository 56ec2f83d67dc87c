"""Write the reference from the program itself: ``python docs/reference/make.py``; with ``--check``, say what differs.

Commands come from their parsers, files from the classes that read and write them, and every word from where it is used.
"""

import argparse
import dataclasses
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hwprofiles.profile import HardwareProfile
from planner.plan.document import Plan
from ullage.analysis.runs import RunRecord
from ullage.commands import SUMMARIES, build_parser
from ullage.whatif.prices import Prices
from ullage.whatif.study import Study

HERE = Path(__file__).parent
FILES: dict[str, tuple[str, str, list[type[BaseModel]]]] = {
    "profile.md": (
        "Hardware profiles",
        "What `ullage calibrate` writes and `--hardware` reads.",
        [HardwareProfile],
    ),
    "plan.md": ("plan.json", "What `ullage plan --output` writes; all other commands read it.", [Plan]),
    "run.md": ("run.json", "What `ullage execute` writes, and `ullage compare` and `ullage report` read.", [RunRecord]),
    "study.md": ("study.json", "What `ullage whatif` reads and writes: what is asked, and what came of it.", [Study]),
    "prices.md": ("prices.json", "What machines cost, for `ullage whatif --prices`.", [Prices]),
}
PAGES: dict[type[BaseModel], str] = {HardwareProfile: "profile.md", Plan: "plan.md"}
"""Classes that other pages only link to."""

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_ATTRIBUTE = re.compile(r"^ {4}([\w, ]+?)(?: \([^)]*\))?: (.*)$")


def main() -> int:
    """Write all pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not as it would be")
    args = parser.parse_args()
    stale = [path for path, text in pages() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path, text in () if args.check else pages():
        path.write_text(text, encoding="utf-8")
    if args.check and stale:
        names = ", ".join(path.name for path in stale)
        sys.stderr.write(f"{names} is not what the program says: run `python docs/reference/make.py`\n")
    return int(args.check and bool(stale))


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page with its text."""
    yield HERE / "commands.md", "\n".join(commands())
    for name, (title, what, roots) in FILES.items():
        yield HERE / name, "\n".join(schema(title, what, roots))


def commands() -> Iterator[str]:
    """Yield the lines of the page of all commands."""
    yield "# Commands"
    yield from ("", "Made by `python docs/reference/make.py` from the parsers themselves.", "")
    yield from (f"- [{name}](#ullage-{name}): {summary}" for name, summary in SUMMARIES.items())
    for name in SUMMARIES:
        yield from command(f"ullage {name}", subparser(build_parser(name), name))


def subparser(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    chosen: argparse.ArgumentParser = found.choices[name]
    return chosen


def command(title: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of a command, and of those below it."""
    yield from ("", f"## {title}", "", " ".join((parser.description or "").split()))
    for group in parser._action_groups:
        rows = [action for action in group._group_actions if not hidden(action)]
        if not rows:
            continue
        if group.title not in {"options", "positional arguments"}:
            yield from ("", f"**{group.title}**")
        yield from ("", "| option | what |", "|---|---|")
        yield from (f"| {spelled(action)} | {cell(meaning(action))} |" for action in rows)
    if parser.epilog:
        lines = [
            line.strip() for line in parser.epilog.splitlines() if line.strip() and not line.startswith("examples")
        ]
        yield from ("", *(f"    {line}" for line in lines))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from command(f"{title} {name}", below)


def hidden(action: argparse.Action) -> bool:
    """Return whether an option is not for the page."""
    return action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def spelled(action: argparse.Action) -> str:
    """Return an option as it is given."""
    shown = action.metavar if action.metavar is not None else None
    if shown is None and action.choices is not None:
        shown = "{" + ",".join(map(str, action.choices)) + "}"
    if shown is None and action.nargs != 0:
        shown = action.dest.upper()
    names = ", ".join(action.option_strings)
    text = " ".join(filter(None, (names, shown if isinstance(shown, str) else " ".join(shown or ()))))
    more = " ..." if action.nargs in {"+", "*"} else ""
    return f"`{text}{more}`".replace("|", "\\|")


def meaning(action: argparse.Action) -> str:
    """Return the help of an option, with what it stands for filled in."""
    return (action.help or "") % {**vars(action), "prog": "ullage"}


def schema(title: str, what: str, roots: list[type[BaseModel]]) -> Iterator[str]:
    """Yield the lines of a page of a file."""
    yield from (f"# {title}", "", what)
    yield from (
        "",
        "Made by `python docs/reference/make.py` from the classes that read it. A field that is not here is",
    )
    yield "an error that names it. Times are in seconds, sizes in bytes, rates per second."
    for model in reached(roots):
        text, described = documented(model)
        yield from ("", f"## {model.__name__}", "", text, "", "| field | type | default | what |", "|---|---|---|---|")
        for name, field in fields_of(model).items():
            about = described.get(name, field.description or "")
            yield f"| `{name}` | {spelled_type(field)} | {default(field)} | {cell(about)} |"


def reached(roots: list[type[BaseModel]]) -> list[type[BaseModel]]:
    """Return the classes that a file is made of, outermost first."""
    found: dict[type[BaseModel], None] = {}
    waiting = list(roots)
    while waiting:
        model = waiting.pop(0)
        if model not in found and (model in roots or model not in PAGES):
            found[model] = None
            waiting += [inner for field in fields_of(model).values() for inner in models(field.annotation)]
    return list(found)


def fields_of(model: type[Any]) -> dict[str, FieldInfo]:
    """Return the fields of a class that is read from files."""
    if issubclass(model, BaseModel):
        return model.model_fields
    found = {}
    for each in dataclasses.fields(model):
        found[each.name] = FieldInfo.from_annotated_attribute(each.type, each.default)  # type: ignore[arg-type]
        found[each.name].description = each.metadata.get("help")
    return found


def is_read(annotation: Any) -> bool:
    """Return whether an annotation is a class that refuses unknown fields in files."""
    is_class = inspect.isclass(annotation)
    return is_class and (issubclass(annotation, BaseModel) or hasattr(annotation, "__pydantic_config__"))


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes that an annotation names."""
    if is_read(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from models(inner)


def documented(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of a class, and of each of its fields, also of those that it inherits."""
    base = model.__base__
    inherited = documented(base)[1] if base and base is not BaseModel and issubclass(base, BaseModel) else {}
    text = inspect.getdoc(model) or ""
    intro, _, rest = text.partition("\nAttributes:\n")
    described: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines():
        if found := _ATTRIBUTE.match(line):
            names = [name.strip() for name in found[1].split(",")]
            described |= dict.fromkeys(names, found[2])
        elif line.startswith("     ") and names:
            described |= {name: f"{described[name]} {line.strip()}" for name in names}
        else:
            names = []
    paragraphs = [" ".join(paragraph.split()) for paragraph in intro.split("\n\n")]
    shown = [paragraph for paragraph in paragraphs if not paragraph.startswith(("Raises:", "Args:", "Returns:"))]
    return "\n\n".join(map(plain, shown)), inherited | described


def spelled_type(field: FieldInfo) -> str:
    """Return a field's type as words."""
    unit = next((u for m in field.metadata for u in [unit_of(m)] if u), "")
    return cell(type_name(field.annotation) + (f" ({unit})" if unit else ""))


def type_name(annotation: Any) -> str:
    """Return a type as words."""
    if get_origin(annotation) is not None:
        return generic_name(get_origin(annotation), get_args(annotation))
    words = {type(None): "null", str: "text", int: "integer", float: "number", bool: "true or false"}
    if annotation in words:
        return words[annotation]
    if is_read(annotation):
        return f"[{annotation.__name__}]({PAGES.get(annotation, '')}#{annotation.__name__.lower()})"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    return getattr(annotation, "__name__", str(annotation))


def generic_name(origin: Any, inner: tuple[Any, ...]) -> str:
    """Return a type with parameters as words."""
    if origin is typing.Annotated:
        unit = next((u for m in inner[1:] for u in [unit_of(m)] if u), "")
        return type_name(inner[0]) + (f" ({unit})" if unit else "")
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in {types.UnionType, typing.Union}:
        return " or ".join(map(type_name, inner))
    if issubclass(origin, Mapping):
        return f"{{{type_name(inner[0])}: {type_name(inner[1])}}}"
    if origin is tuple and ... not in inner:
        return "[" + ", ".join(map(type_name, inner)) + "]"
    return f"list of {type_name(inner[0])}"


def unit_of(metadata: Any) -> str:
    """Return the unit that a check of quantities or curves asks for."""
    check = getattr(metadata, "func", None)
    cells = inspect.getclosurevars(check).nonlocals if inspect.isfunction(check) else {}
    found: str = cells.get("unit") or (f"over {cells['size_unit']}" if "size_unit" in cells else "")
    return found


def default(field: FieldInfo) -> str:
    """Return a field's default."""
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "as below"
    return cell(f"`{value.value if isinstance(value, enum.Enum) else value}`")


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return plain(" ".join(text.split())).replace("|", "\\|").replace("\\\\|", "\\|")


def plain(text: str) -> str:
    """Return text without the roles of docstrings."""
    return _ROLE.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", text).replace("``", "`")


if __name__ == "__main__":
    sys.exit(main())

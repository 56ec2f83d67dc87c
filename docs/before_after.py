"""Write the table of `architecture/before_after.md`: the code now, beside the code before it was put in order.

Run `python docs/before_after.py [REVISION]` in a clone with its whole history.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BEFORE = "aff547b"
PACKAGES = ("hwprofiles", "planner", "executor", "ullage")
PAGE = Path(__file__).parent / "architecture" / "before_after.md"
HOUSE_WORDS = "asked, told, kept, together, apart, chance, sight, marks, knobs, keeping, come_back, whereabouts"
_HOUSE_WORD = re.compile(rf"(?:^|_)(?:{HOUSE_WORDS.replace(', ', '|')})(?:$|_)")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Code(NamedTuple):
    """The Python files of one revision."""

    texts: dict[str, str]
    trees: dict[str, ast.Module]


def read(revision: str) -> Code:
    """Read all Python files and pages of a revision."""
    archive = subprocess.run(["git", "archive", revision], check=True, capture_output=True).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.isfile() and member.name.endswith((".py", ".md")):
                texts[member.name] = files.extractfile(member).read().decode()  # type: ignore[union-attr]
    trees = {name: ast.parse(text) for name, text in texts.items() if name.endswith(".py")}
    return Code(texts, trees)


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield every identifier: of definitions, parameters, variables, attributes and imports."""
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTION, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from (node.asname or node.name).split(".")


def imports_of(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield the modules that another one imports when it is imported: not inside functions, nor for types alone."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def folder_circles(code: Code) -> int:
    """Return how many circles the imports form between a package's folders, and modules beside them."""
    modules = {name[:-3].replace("/", ".").removesuffix(".__init__"): name for name in code.trees}

    def place(module: str) -> str:
        return ".".join(module.split(".")[:2])

    edges = defaultdict(set)
    for module, name in modules.items():
        if module.split(".")[0] in PACKAGES:
            for other in imports_of(code.trees[name], set(modules)):
                if other.split(".")[0] in PACKAGES and place(other) != place(module):
                    edges[place(module)].add(place(other))

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            for other in edges[pending.pop()] - seen:
                seen.add(other)
                pending.append(other)
        return seen

    reach = {start: reached(start) for start in list(edges)}
    circles = {frozenset(b for b in reach if b in reach[a] and a in reach[b]) for a in reach if a in reach[a]}
    return len(circles)


def rows(code: Code) -> dict[str, str]:
    """Return all figures of a revision, as they are printed."""
    product = {name: text for name, text in code.texts.items() if name.split("/")[0] in PACKAGES and name in code.trees}
    lines = {name: text.count("\n") for name, text in product.items()}
    folders = Counter(str(Path(name).parent) for name in product)
    classes = {
        f"{name}::{node.name}": sum(isinstance(member, _FUNCTION) for member in node.body)
        for name in product
        for node in ast.walk(code.trees[name])
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, str] = {}
    for package in PACKAGES:
        inside = [name for name in product if name.startswith(f"{package}/")]
        found[f"`{package}`: Python files"] = f"{len(inside)}"
        found[f"`{package}`: files in its top folder"] = f"{folders[package]}"
        found[f"`{package}`: lines"] = f"{sum(lines[name] for name in inside):,}"
    found["lines of the packages"] = f"{sum(lines.values()):,}"
    found["most files in a folder"] = f"{max(folders.values())}"
    found["folders with more than 15 files"] = f"{sum(count > 15 for count in folders.values())}"
    found["lines of the longest file"] = f"{max(lines.values()):,}"
    found["files of more than 450 lines"] = f"{sum(count > 450 for count in lines.values())}"
    found["classes"] = f"{len(classes)}"
    found["methods of the largest class"] = f"{max(classes.values())}"
    found["classes of more than 25 methods"] = f"{sum(count > 25 for count in classes.values())}"
    found["circles of imports between folders (or modules beside them)"] = f"{folder_circles(code)}"
    for what, of in (("packages", product), ("tests", [name for name in code.trees if name.startswith("tests/")])):
        count = sum(bool(_HOUSE_WORD.search(name.lower())) for path in of for name in names_in(code.trees[path]))
        found[f"house words among the identifiers of {what}"] = f"{count:,}"
    for page in ("README.md", "DESIGN.md"):
        text = code.texts.get(page)
        found[f"`{page}`"] = f"{text.count(chr(10))} lines, {len(text.encode()) / 1000:.1f} kB" if text else "-"
    pages = [name for name in code.texts if name.startswith("docs/") and name.endswith(".md")]
    found["pages under `docs/`"] = f"{len(pages)}"
    return found


def main() -> None:
    """Measure both revisions, and write the table."""
    given = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    after = subprocess.run(["git", "rev-parse", "--short=7", given], check=True, capture_output=True, text=True)
    revision = after.stdout.strip()
    before_rows, after_rows = rows(read(BEFORE)), rows(read(revision))
    table = "\n".join(f"| {name} | {before_rows[name]} | {after_rows[name]} |" for name in after_rows)
    before_table, _, rest = PAGE.read_text().partition("| quantity |")
    after_table = rest.partition("\n\n")[2]
    PAGE.write_text(
        f"{before_table}| quantity | before ({BEFORE}) | after ({revision}) |\n|---|---|---|\n{table}\n\n{after_table}"
    )


if __name__ == "__main__":
    main()

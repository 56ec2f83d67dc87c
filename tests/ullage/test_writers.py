"""Nothing writes a file but through :func:`hwprofiles.files.write_whole`, except what is named here with its reason."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hwprofiles", "planner", "executor", "ullage")

# Calls by the last name: of anything (a module, a path, a writer of another library) that makes or changes a file.
WRITERS = frozenset(
    [
        "write_text",
        "write_bytes",
        "mkstemp",
        "mkdtemp",
        "NamedTemporaryFile",
        "TemporaryFile",
        "savez",
        "savez_compressed",
        "savetxt",
        "tofile",
        "save_file",
        "save_pretrained",
        "to_csv",
        "to_json_file",
        "to_parquet",
        "write_to_textfile",
        "write_html",
        "write_image",
        "savefig",
        "rename",
        "renames",
        "symlink_to",
        "hardlink_to",
        "symlink",
        "touch",
        "copy2",
        "copyfile",
        "copytree",
        "move",
        "memmap",
        "SummaryWriter",
        "FileIO",
        "ZipFile",
        "GzipFile",
        "mknod",
        "mkfifo",
        "truncate",
        "creat",
    ]
)
SAVING = frozenset(
    {"json", "np", "numpy", "pickle", "torch", "yaml"}
)  # ``save`` and ``dump`` of anything else are ours
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}

ALLOWED = {
    "hwprofiles/files.py": "the one place",
    "ullage/calibrate/disk.py": "a probe of drives: a file of its own, without a name while it is used",
    "executor/driver/pipeline.py": "state for other stages, into memory",
    "ullage/calibrate/run.py": "a probe of torch.save, into memory",
    "executor/memory/nvme_files.py": "state while training, and on its way between two plans, in files without others",
    "executor/checkpoint/files/system_calls.py": "checkpoints: one method per system call",
    "executor/checkpoint/places/folder.py": "checkpoints: folders get their names by renaming",
    "executor/checkpoint/files/lock.py": "a lock that a run holds, with its process's number",
    "executor/checkpoint/places/locating.py": "checkpoints at URLs, through fsspec",
    "executor/checkpoint/files/writer.py": "checkpoints, through checkpoint/files.py",
    "ullage/main.py": "standard output becomes /dev/null when nobody reads it",
    "executor/weights/folder.py": "weights for transformers: a new folder, which appears whole",
    "executor/weights/saving.py": "configurations and tokenizers, into such a folder",
    "ullage/training/exporting.py": "a configuration, into such a folder",
    "ullage/this_machine/profile.py": "the profile of another machine makes room for this one's",
    "ullage/training/elastic.py": "iterations of a run, a line each, to which the next start adds",
    "ullage/training/text.py": "memory maps that are only read",
    "ullage/web/question.py": "what a visitor sent, in a folder that goes with the answer",
    "ullage/web/worker.py": "a plan that is known, in such a folder",
    "ullage/whatif/running/store.py": "results as they come: a line is appended and synced, under a lock",
}


def writers(tree: ast.AST) -> Iterator[str]:
    """Yield what is called that may write a file."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    yield from (alias.name for node in imports for alias in node.names if alias.name in WRITERS)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = getattr(function.value, "id", "") if isinstance(function, ast.Attribute) else ""
        words = {node.attr for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Attribute)}
        if name == "open" and (words & WRITING_FLAGS or any(map(is_writing_mode, arguments(call)))):
            yield "open"
        elif name == "fdopen" and any(map(is_writing_mode, arguments(call))):
            yield "fdopen"
        elif name == "replace" and (owner == "os" or (len(call.args) == 1 and not call.keywords)):
            yield "replace"  # of a path; of a string there are two arguments, and of a dataclass there are keywords
        elif name in WRITERS or (name in {"save", "dump"} and owner in SAVING):
            yield name


def arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords if keyword.arg == "mode")


def is_writing_mode(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and 0 < len(node.value) <= 4
        and set(node.value) <= set("rwaxbt+")
        and bool(set(node.value) & set("wax+"))
    )


def test_only_the_named_modules_write_files() -> None:
    found = {
        str(path.relative_to(ROOT)): Counter(writers(ast.parse(path.read_text(encoding="utf-8"))))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    strangers = {path: dict(calls) for path, calls in found.items() if calls and path not in ALLOWED}
    assert not strangers, "write through hwprofiles.files.write_whole"
    assert not [path for path in ALLOWED if not found.get(path)], "writes nothing any more: take it off the list"


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')",
        "path.open('xb')",
        "open(path, mode='a')",
        "gzip.open(path, 'wt')",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "os.fdopen(3, 'wb')",
        "path.write_text(text)",
        "Path(x).write_bytes(data)",
        "os.replace(a, b)",
        "partial.replace(path)",
        "numpy.save(path, values)",
        "figure.savefig(path)",
        "json.dump(data, file)",
        "frame.to_csv(path)",
        "save_file(tensors, path)",
        "tempfile.NamedTemporaryFile()",
    ],
)
def test_a_writer_is_found(line: str) -> None:
    assert list(writers(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.open('rb')",
        "text.replace('w', 'a')",
        "dataclasses.replace(a, b=1)",
        "os.open(p, os.O_RDONLY)",
    ],
)
def test_a_reader_is_not(line: str) -> None:
    assert not list(writers(ast.parse(line)))

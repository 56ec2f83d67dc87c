"""Every output of every command, at every kind of place: written, written into, or refused before any work."""

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import special_files
from report_objects import slower_run

from planner.plan.document import Plan
from ullage.analysis.runs import save_run
from ullage.commands import SUMMARIES, build_parser
from ullage.main import main


@dataclasses.dataclass(frozen=True)
class Output:
    """A file that a command writes.

    Attributes:
        arguments: of the command; ``{...}`` are made below.
        suffix: that its name must have.
        quick: whether the command takes little time, so that it is really run.
        streams: whether devices and pipes are written into.
    """

    arguments: str
    suffix: str = ".json"
    quick: bool = True
    streams: bool = True


OUTPUTS = {
    "plan --output": Output("plan --model {model} --seq-len 128 --hardware rtx-4090 --budget 0.1 --json"),
    "simulate --trace": Output("simulate {plan}", ".json.gz"),
    "simulate --figure": Output("simulate {plan}", ".html"),
    "compare --trace": Output("compare {run}"),
    "compare --refit": Output("compare {run}"),
    "report --output": Output("report {plan}", ".html", quick=False),
    "export-deepspeed --output": Output("export-deepspeed {plan}"),
    "whatif --output": Output("whatif --model {model} --seq-len 128 --hardware rtx-4090 --workers 1", streams=False),
    "whatif --table": Output("whatif --model {model} --seq-len 128 --hardware rtx-4090 --workers 1", ".csv"),
    "calibrate --output": Output("calibrate --quick", quick=False),
    "hardware --output": Output("hardware check", quick=False),
}
FOLDERS = {
    "execute --output-dir": "execute {host_plan}",
}
INPUTS = {"plan --deepspeed"}
OTHERS = {"execute --storage-dir"}  # scratch

Run = Callable[[str, str, Path], int]


def test_all_paths_of_all_commands_are_known() -> None:
    """A new output is tried as all others are."""
    parser = build_parser(*SUMMARIES)
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found = {
        f"{name} {action.option_strings[0]}"
        for name, command in commands.choices.items()
        for action in command._actions
        if action.type is Path and action.option_strings
    }
    assert found == {*OUTPUTS, *FOLDERS, *INPUTS, *OTHERS}


@pytest.fixture
def run(
    plan_path: Path, plan: Plan, host_plan: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """What runs a command with an output at a path."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # where default outputs go
    save_run(slower_run(plan), tmp_path / "run.json")
    named = {"plan": plan_path, "host_plan": host_plan, "model": tiny_model}
    named |= {"run": tmp_path / "run.json", "out": tmp_path / "out"}
    words = {key: str(path) for key, path in named.items()}

    def run(name: str, arguments: str, path: Path) -> int:
        return main([word.format(**words) for word in arguments.split()] + [name.split()[1], str(path)])

    return run


def one_line(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> None:
    """Check that all that was printed is one line."""
    out, err = capsys.readouterr()
    assert err.startswith(f"ullage {name.split(maxsplit=1)[0]}: error: ")
    assert err.count("\n") == 1, err
    assert not out
    for word in words:
        assert word in err


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_cannot_be_written_is_reported_before_any_work(
    name: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is imported for the work, nothing is read or written, and what is there stays."""
    output, option = OUTPUTS[name], name.split()[1]
    capsys.readouterr()
    (tmp_path / f"folder{output.suffix}").mkdir()
    (tmp_path / f"nothing{output.suffix}").symlink_to(tmp_path / "no" / f"file{output.suffix}")
    (tmp_path / f"file{output.suffix}").touch()
    (tmp_path / f"loop{output.suffix}").symlink_to(f"loop{output.suffix}")
    cases = {
        "folder": "is a folder; give the name of a file",
        "socket": "is a socket; give the name of",
        "nothing": "there is no such folder; make it first",
        "loop": "Too many levels of symbolic links; give",
        f"file{output.suffix}/inner": "there is no such folder; make it first",
        "n" * 256: "File name too long; give",
    }
    if not output.streams:
        os.mkfifo(tmp_path / f"pipe{output.suffix}")
        special_files.device(tmp_path / f"full{output.suffix}", 7, "/dev/full")
        cases |= {"pipe": "is a pipe; give the name of a regular", "full": "is a device; give the name of a regular"}
    with special_files.unix_socket(tmp_path / f"socket{output.suffix}"):
        before = {path: path.lstat().st_ino for path in tmp_path.iterdir()}
        for case, words in cases.items():
            path = tmp_path / f"{case}{output.suffix}"
            assert run(name, output.arguments, path) == 2, case
            one_line(capsys, name, option, words)
        assert {path: path.lstat().st_ino for path in tmp_path.iterdir() if path.name != "out"} == before
    assert run(name, output.arguments, Path("/dev/stdout")) == 2
    one_line(capsys, name, option)


@pytest.mark.part(4)
@pytest.mark.parametrize("name", [name for name, output in OUTPUTS.items() if output.streams and output.quick])
def test_devices_and_pipes_are_written_into(
    name: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets what a file does; a full device is one line; both stay what they are, and links stay links."""
    output = OUTPUTS[name]
    real, link = tmp_path / "elsewhere", tmp_path / f"link{output.suffix}"
    link.symlink_to(real)
    assert run(name, output.arguments, link) == 0
    assert link.is_symlink()
    pipe, full = tmp_path / f"pipe{output.suffix}", tmp_path / f"full{output.suffix}"
    special_files.device(full, 7, "/dev/full")
    with special_files.fifo(pipe) as came:
        before = [special_files.identity(path) for path in (pipe, full)]
        assert run(name, output.arguments, pipe) == 0
        assert came()[:60] == real.read_bytes()[:60] != b""  # a plan says how long it was searched for
        capsys.readouterr()
        assert run(name, output.arguments, full) == 2
        assert f"{full}: No space left on device; make room, or give" in capsys.readouterr().err
        assert [special_files.identity(path) for path in (pipe, full)] == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_made_is_reported_before_any_work(
    name: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "nothing").symlink_to(tmp_path / "no")
    for path in (tmp_path / "pipe", tmp_path / "file", tmp_path / "file" / "inner"):
        assert run(name, FOLDERS[name], path) == 2
        one_line(capsys, name, str(path))
    assert not (tmp_path / "out.html").exists()


def test_a_pipe_that_nobody_reads_any_more_is_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not the end of the pipe that prints, which ends a command in silence."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        assert run("export-deepspeed --output", "export-deepspeed {plan}", Path(f"/dev/fd/{write_end}")) == 2
    finally:
        os.close(write_end)
    assert capsys.readouterr().err.endswith(f"/dev/fd/{write_end}: Broken pipe\n")

"""What shells complete, asked of a real one."""

import shutil
import subprocess

import pytest

from ullage.commands import SUMMARIES
from ullage.main import main


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "ullage.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script, line: str, folder) -> set[str]:
    """Return what bash offers for the last word of a line."""
    ask = f"""
source {script}
COMP_WORDS=({line.replace("|", "''")}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_LINE="${{COMP_WORDS[*]}}"
COMP_POINT=${{#COMP_LINE}}
_shtab_ullage
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, cwd=folder)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ullage |", set(SUMMARIES)),
        ("ullage exec", {"execute"}),
        ("ullage execute --check", {"--checkpoint-dir"}),
        ("ullage plan --optimizer a", {"adamw", "adamw-bf16", "adamw-8bit", "adagrad"}),
        ("ullage plan --hardware h100x4", {"h100x4-80g", "h100x4-56core-nvme"}),
        ("ullage plan --model opt-13", {"opt-13b"}),
        ("ullage verify pl", {"plan.json"}),
        ("ullage execute plan.json --data to", {"tokens.npy"}),
    ],
)
def test_bash_completes(script, tmp_path, line, offered):
    for name in ("plan.json", "tokens.npy"):
        (tmp_path / name).touch()
    assert completed(script, line, tmp_path) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_what_is_for_them(shell, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "checkpoint-dir" in text
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_a_missing_library_is_named(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'ullage[completion]'" in capsys.readouterr().err

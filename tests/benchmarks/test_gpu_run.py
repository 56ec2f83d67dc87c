"""All stages on a GPU, in one call: what each may take, what comes back, and what fails without stopping others."""

import gzip
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.forks import ADDRESS, Server, started
from benchmarks.gpu.bundle import _BUILT, _LIBRARIES, _OURS, _PEERS, MOST_BYTES, fits, problems
from benchmarks.gpu.run import DEFAULT, FILES, MOST_FILES, STAGES, Results, Run, Stage, limits_s
from hwprofiles.registry import load_profile

ROOT = Path(__file__).parents[2]


def dry(folder: Path, scale: float, stub: str, *arguments: str) -> tuple[int, str]:
    """Run all stages with a stub in Python's place, in a share of all times; return the code and what was printed."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable} -IS\n{stub}")
    python.chmod(0o755)
    code = f"""
import sys
from benchmarks import forks
from benchmarks.gpu import run
sys.executable = {str(python)!r}
run.END_S = forks.END_S = 8.0 * {scale}
run._LEAST_S, run._SPARE_S = 5.0 * {scale}, 10.0 * {scale}
run.STAGES = {{n: s._replace(limit_s=s.limit_s * {scale}, least_s=s.least_s * {scale}) for n, s in run.STAGES.items()}}
run.main()
"""
    command = [sys.executable, "-c", code, "--results", str(folder / "results"), "--bundle", str(folder / "none")]
    command += ["--no-server", "--budget", str(580 * scale), *arguments]
    environment = os.environ | {"OUT": str(folder / "back"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=100, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


# In Python's place: each stage says how it was asked, leaves what the real one would, and takes its time.
STUB = """
import json, os, sys, time
from pathlib import Path
arguments, back = sys.argv[1:], Path({back!r})
name = next(name for name, words in {words}.items() if all(word in arguments for word in words))
options = dict(zip(arguments, arguments[1:]))
there = sorted(os.listdir(back)) if back.exists() else []
with open({asked!r}, "a") as file:
    file.write(json.dumps([name, "OUT" in os.environ, options.get("--budget"), there]) + chr(10))
if output := options.get("--output", options.get("--junitxml")):
    Path(output).write_text("{{}}")
    for number in range(3):
        folder = Path(output).parent / "agreement" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text("{{}}")
print('{{"failure": null}}')
time.sleep({took}[name])
sys.exit(3 if name == "tests" else 0)
"""
WORDS = {
    "probe": ["benchmarks/gpu/probe.py"],
    "doctor": ["doctor"],
    "tests": ["pytest"],
    "calibrate": ["calibrate"],
    "tokens": ["tokens-64k"],
    "peers": ["benchmarks/gpu/peers.py"],
    "compiled": ["compiled"],
    "agreement": ["benchmarks/gpu/agreement.py"],
}


@given(st.data())
def test_each_stage_leaves_to_later_ones_what_they_are_guaranteed(data: st.DataObject) -> None:
    seconds = st.floats(0, 300)
    stages = []
    for _ in range(data.draw(st.integers(1, 6))):
        least_s = data.draw(seconds)
        stages.append(Stage("", least_s + data.draw(seconds), least_s))
    left_s = sum(stage.least_s for stage in stages) + data.draw(seconds)
    limits = list(limits_s(stages, left_s))
    assert sum(limits) <= left_s * (1 + 1e-9) + 1e-9
    for stage, limit_s in zip(stages, limits, strict=True):
        assert stage.least_s - 1e-6 <= limit_s <= stage.limit_s  # whatever those before it took


def test_what_all_stages_are_guaranteed_fits_ten_minutes() -> None:
    chosen = [STAGES[name] for name in DEFAULT]
    assert sum(stage.least_s for stage in chosen) <= 560
    assert all(stage.least_s <= stage.limit_s for stage in STAGES.values())
    peers = DEFAULT.index("peers")
    assert list(limits_s(chosen, 560))[peers] >= 110  # even if all stages before took all that they may
    for stage in STAGES.values():  # files and tests that are named are there
        for word in stage.arguments.split():
            path, _, test = word.partition("::")
            if path.endswith(".py") and "{" not in path:
                assert f"def {test}(" in (ROOT / path).read_text() or not test
    assert DEFAULT[0] == "probe"


def test_a_dry_run_of_all_stages(tmp_path: Path) -> None:
    # A fiftieth of the time: calibration hangs, the tests fail, all others take a tenth of their limit.
    scale, asked, back = 0.02, tmp_path / "asked.jsonl", tmp_path / "back"
    took = {name: STAGES[name].limit_s * scale / 10 for name in DEFAULT} | {"calibrate": 60.0}
    code, said = dry(tmp_path, scale, STUB.format(took=took, words=WORDS, back=str(back), asked=str(asked)))
    assert code == 1, said
    stages = json.loads((back / "stages.json").read_text())
    codes = dict.fromkeys(DEFAULT, 0) | {"tests": 3, "calibrate": 124}
    assert {name: stage["code"] for name, stage in stages.items()} == codes, said
    names = {path.name for path in back.iterdir()}
    assert len(names) <= MOST_FILES
    assert {"results.tar.gz", "doctor.json", "agreement.json", "peers.json", "probe.jsonl"} <= names
    assert names <= {"results.tar.gz", *FILES}
    with tarfile.open(back / "results.tar.gz") as kept:
        archived = set(kept.getnames())
    assert {
        "stages/peers.json",
        "logs/calibrate.txt",
        "tests.xml",
        "agreement/2/run.json",
        "peers_64k.json",
    } <= archived
    calls = [json.loads(line) for line in asked.read_text().splitlines()]
    assert [name for name, *_ in calls] == list(DEFAULT)
    for name, has_out, _, there in calls:
        assert not has_out  # $OUT is ours
        assert ("results.tar.gz" in there) == (name != DEFAULT[0])  # after each stage
    # Calibration took all that it may, and left the others theirs.
    assert stages["calibrate"]["limit_s"] <= STAGES["calibrate"].limit_s * scale + 0.1
    assert all(stages[name]["limit_s"] >= STAGES[name].least_s * scale - 0.1 for name in DEFAULT)


ENDED = "ZX"  # waited for or not


def state(pid: int) -> str:
    """Return the letter of a process's state (see proc_pid_stat(5)); ``X``: there is none."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "X"


def until(there: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + 20
    while not there():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def becomes(pid: int, states: str) -> bool:
    """Wait until a process is in one of some states."""
    until(lambda: state(pid) in states)
    return True


def test_processes_are_forked_and_end_as_others_do(tmp_path: Path) -> None:
    program, log = tmp_path / "program.py", tmp_path / "log.txt"
    program.write_text(
        "import os, sys, time\n"
        "child = os.fork() or time.sleep(100)\n"
        "print(os.environ['WORD'], sys.argv[1:], 'colorsys' in sys.modules, child, flush=True)\n"
        "if sys.argv[1] == 'sleep': time.sleep(100)\n"
        "os.kill(os.getpid(), 9) if sys.argv[1] == 'kill' else sys.exit(7)\n"
    )
    environment = os.environ | {"WORD": "one"}
    server = Server(environment, tmp_path / "server.txt", ["colorsys", "no_such_module"])
    try:
        assert server.ready(60), (tmp_path / "server.txt").read_text()
        for argument, code in (("exit", 7), ("kill", -9), ("sleep", None), ("exit", 7)):
            process = started([sys.executable, str(program), argument], environment | {"WORD": argument}, log)
            until(lambda: log.read_text().endswith("\n"))
            assert process.wait(20 if argument != "sleep" else 0.05) == code
            for paused in (True, False) if code is None else ():
                process.pause(paused=paused)
                assert becomes(process.pid, "T" if paused else "RS")
            process.end(0.2)  # and what it has started
            assert process.wait(5) in {code, -15}
            *words, child = log.read_text().split()
            assert words == [argument, f"['{argument}']", "True"]  # its own environment, and what was imported before
            assert becomes(process.pid, ENDED)
            assert becomes(int(child), ENDED)
    finally:
        server.close()
    assert "no_such_module" in (tmp_path / "server.txt").read_text()
    # Where there is no server any more, a new interpreter does the same.
    assert ADDRESS in environment
    process = started([sys.executable, str(program), "exit"], environment, log)
    assert process.wait(20) == 7
    process.end(0.2)
    assert log.read_text().startswith("one ['exit'] False")


def test_what_runs_beside_pauses_while_something_is_measured(tmp_path: Path) -> None:
    args = SimpleNamespace(budget=60.0)
    run = Run(args, Results(tmp_path / "results", None))  # type: ignore[arg-type]
    build = started(["sleep", "100"], os.environ, tmp_path / "log.txt")
    run._beside["build"] = build
    run._pause_others(0.0)
    assert becomes(build.pid, "T")
    run._pause_others(0.1)  # now it is needed, and is not there in time
    assert becomes(build.pid, ENDED)
    assert not run._beside


def test_an_archive_that_is_too_large_leaves_out_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.run.MOST_BYTES", 100_000)
    results = Results(tmp_path / "results", tmp_path / "back")
    results.write("stages/doctor.json", {"code": 0})
    (results.folder / "agreement").mkdir()
    (results.folder / "agreement" / "trace.bin").write_bytes(os.urandom(200_000))
    (results.folder / "profile.json").write_text("{}")
    results.bring_back()
    (results.folder / "profile.json").unlink()
    results.bring_back()
    with tarfile.open(tmp_path / "back" / "results.tar.gz") as kept:
        assert set(kept.getnames()) == {"stages/doctor.json", "left_out.json"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"results.tar.gz"}
    assert not list((tmp_path / "back").glob("*.part"))


@pytest.mark.parametrize(
    ("wheel", "fitting"),
    [
        ("hjson-3.1.0-py3-none-any.whl", True),
        ("highspy-1.16.0-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl", True),
        ("torchao-0.18.0-cp310-abi3-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl", True),
        ("pydantic_core-2.50.5-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("highspy-1.16.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl", False),
        ("ours-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("ours-1-cp313-abi3-manylinux_2_28_x86_64.whl", False),
        ("ours-1-cp312-cp312-manylinux_2_40_x86_64.whl", False),  # a newer C library
        ("ours-1-cp312-cp312-manylinux_2_28_aarch64.whl", False),
        ("ours-1-cp312-cp312-linux_x86_64.whl", True),  # built here
    ],
)
def test_wheels_of_the_bundle_fit_the_device(wheel: str, fitting: bool, tmp_path: Path) -> None:
    assert fits(wheel) == fitting
    for place, names in (("ours", (*_OURS, *_LIBRARIES)), ("peers", (*_PEERS, *_BUILT))):
        (tmp_path / place).mkdir()
        for name in names:
            (tmp_path / place / f"{name.replace('-', '_')}-1-py3-none-any.whl").touch()
    assert problems(tmp_path, 50 << 20) == []
    (tmp_path / "peers" / wheel).write_bytes(bytes(1 << 20))
    found = "\n".join(problems(tmp_path, MOST_BYTES - 1))
    assert f"{MOST_BYTES / 2**20 + 1:.1f} MiB with the working tree, more than 60 MiB" in found
    assert (f"{wheel} is not for Python 3.12" in found) != fitting
    (tmp_path / "ours" / "pydantic-1-py3-none-any.whl").unlink()
    assert "ours has 0 wheels of pydantic, not one" in problems(tmp_path, 0)


@pytest.mark.part(0)
def test_what_was_executed_is_kept(tmp_path: Path) -> None:
    model, results, back = tmp_path / "tiny", tmp_path / "results", tmp_path / "back"
    model.mkdir()
    results.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes | heads))
    profile = load_profile("epyc-turin-2c").model_copy(update={"measured_on": None})
    (results / "profile.json").write_text(profile.model_dump_json())
    plans = f"--only mixed fetched --model {model / 'config.json'} --seq-len 64"
    checkpoints = f"--tiny --rounds 1 --iterations 2 --folder {tmp_path}"
    command = ["bash", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "agreement", "checkpoints"]
    command += ["--with", "agreement", plans, "--with", "checkpoints", checkpoints, "--budget", "280"]
    command += ["--results", str(results), "--bundle", str(tmp_path / "none")]
    environment = os.environ | {"OUT": str(back), "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout.decode()[-3000:] + done.stderr.decode()[-3000:]
    server = (results / "logs" / "server.txt").read_text()
    assert "there are" not in server  # other threads
    assert "CUDA was asked" not in server
    found = json.loads((results / "agreement.json").read_text())
    assert found["rows"].keys() == {"mixed", "fetched"}
    assert found["not_run"]["planned"] == "not asked for"
    mixed, fetched = found["rows"]["mixed"], found["rows"]["fetched"]
    assert mixed["error"] == pytest.approx(mixed["predicted"] / mixed["measured"] - 1)
    assert "refitted_error" in fetched  # by the profile that is fitted to the other
    assert "refitted_error" not in mixed
    placed = json.loads((results / "agreement" / "mixed" / "plan.json").read_text())["decisions"]["units"]
    assert {place for unit in placed.values() for place in unit["update"]} == {"cpu", "gpu", "stream"}
    with gzip.open(results / "agreement" / "fetched" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.split()[0] for name in processes} == {"predicted", "measured"}
    lost = json.loads((results / "checkpoints.json").read_text())["lost"]
    assert lost.keys() == {"torch.save", "dcp.async_save", "ours"}
    with tarfile.open(back / "results.tar.gz") as kept:
        names = set(kept.getnames())
    assert {"agreement.json", "checkpoints.json", "logs/agreement.txt", "agreement/mixed/run.json"} <= names

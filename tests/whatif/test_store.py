import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ullage.whatif.running.store import Store
from ullage.whatif.study import Result, load_study

RESULTS = {f"key{i}": Result(status="refused", reason=f"because {i / 3} é") for i in range(4)}
STUDY = ("--hardware", "a100-80", "--sweep", "pcie=1x..30x..1x", "--workers", "2", "--json")


def filled(path: Path) -> bytes:
    with Store(path) as store:
        for key, result in RESULTS.items():
            store.put(key, result)
    return path.read_bytes()


def test_what_was_put_is_there_again(tmp_path):
    filled(tmp_path / "s.jsonl")
    with Store(tmp_path / "s.jsonl") as store:
        assert store.results == RESULTS


def test_a_line_cut_off_anywhere_costs_only_itself(tmp_path):
    whole = filled(tmp_path / "whole.jsonl")
    begin = whole[:-1].rfind(b"\n") + 1
    for end in range(begin, len(whole)):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:end])
        with Store(path) as store:
            assert len(store.results) == 3
            store.put("key3", Result(status="refused"))  # shorter than what was cut off
        assert path.read_bytes().count(b"\n") == len(path.read_bytes().splitlines()) == 4
        with Store(path) as store:
            assert store.results["key3"] == Result(status="refused")


def test_a_damaged_line_is_passed_over(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(filled(path).replace(b"refused", b"refuXed", 1))
    with Store(path) as store:
        assert store.results == {key: RESULTS[key] for key in ("key1", "key2", "key3")}


def test_looking_again_keeps_what_was_there_before(tmp_path):
    """An interruption looks again; the study may have been interrupted before."""
    filled(tmp_path / "s.jsonl")
    more = Result(status="refused", reason="later")
    for number in range(3):
        with Store(tmp_path / "s.jsonl") as store:
            store.put(f"more{number}", more)
            for _ in range(2):
                store.look_again()
                assert len(store.results) == len(RESULTS) + number + 1
    with Store(tmp_path / "s.jsonl") as store:
        assert store.results == RESULTS | {f"more{number}": more for number in range(3)}


def test_other_files_are_left_alone(tmp_path):
    for text in ("not a store", '{"schema_version": 1}', "\n\n"):
        (tmp_path / "notes.txt").write_text(text)
        with pytest.raises(ValueError, match="is not a store of results"):
            Store(tmp_path / "notes.txt")
        assert (tmp_path / "notes.txt").read_text() == text


def test_one_study_writes_at_a_time(tmp_path):
    with Store(tmp_path / "s.jsonl"), pytest.raises(ValueError, match="another study"):
        Store(tmp_path / "s.jsonl")
    Store(tmp_path / "s.jsonl").__exit__(None, None, None)


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def wait_for_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(lines(path)) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def test_a_killed_study_goes_on_and_computes_nothing_again(tiny, start, tmp_path):
    store = tmp_path / "study.points.jsonl"
    killed = start("--model", tiny, *STUDY)
    wait_for_lines(killed, store, 5)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    done = lines(store)
    whole = [line for line in done if line.endswith(b"}}")]
    assert 5 <= len(whole) < 30
    resumed = start("--model", tiny, *STUDY)
    out, error = resumed.communicate(timeout=120)
    assert (resumed.returncode, error) == (0, "")
    after = lines(store)
    assert after[: len(whole)] == whole
    keys = [json.loads(line)["key"] for line in after]
    assert len(keys) == len(set(keys)) == 30
    (tmp_path / "fresh").mkdir()
    fresh = start("--model", tiny, *STUDY, "--output", "fresh/study.json")
    assert fresh.communicate(timeout=120)[0] == out == (tmp_path / "study.json").read_text()
    assert load_study(tmp_path / "study.json").complete


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tiny, start, tmp_path):
    store = tmp_path / "study.points.jsonl"
    process = start("--model", tiny, *STUDY, start_new_session=True)
    wait_for_lines(process, store, 3)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.count("\n")) == (130, "", 1), error
    assert f"{len(lines(store))} of 30 points are stored in study.points.jsonl; run the same command" in error
    assert not (tmp_path / "study.json").exists()
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):  # no worker outlives it, but for the moment that ending takes
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def test_ctrl_c_while_workers_start_is_one_line(tiny, start):
    process = start("--model", tiny, *STUDY, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:  # the first worker, beside what tracks resources
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error.count("\n")) == (130, 1), error


def test_a_full_disk_costs_one_line(tiny, start, tmp_path):
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    process = start("--model", tiny, *STUDY, "--workers", "1", preexec_fn=small_files)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out, error.count("\n")) == (2, "", 1)
    assert "study.points.jsonl: File too large" in error
    store = tmp_path / "study.points.jsonl"
    with Store(store) as stored:
        assert 0 < len(stored.results) == len(lines(store))

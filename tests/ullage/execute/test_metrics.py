"""What TensorBoard and Prometheus see of an execution."""

import errno
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from planner.schedule.tasks import Tier
from ullage.analysis.runs import load_run
from ullage.integrations.metrics import Metrics, Prometheus, Sample, TensorBoard
from ullage.main import main

SAMPLE = Sample(6, 2.5, 1e-3, 0.5, 0.4, 256.0, {Tier.GPU: 10}, 2, 1)


def read(path: Path) -> dict[str, float]:
    """Return what a collector reads, by name and the labels but for the model's."""
    found = {}
    for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_both_see_every_iteration(host_plan: Path, tmp_path: Path) -> None:
    board, file = tmp_path / "board", tmp_path / "ullage.prom"
    arguments = ["execute", str(host_plan), "--iterations", "7", "--output-dir", str(tmp_path / "out")]
    assert main([*arguments, "--tensorboard", str(board), "--metrics-file", str(file)]) == 0
    run = load_run(tmp_path / "out" / "run.json")
    events = EventAccumulator(str(board)).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(run.losses, rel=1e-6)
    assert [event.step for event in events.Scalars("loss")] == list(range(7))
    predicted = [event.value for event in events.Scalars("seconds per iteration/predicted")]
    assert predicted == pytest.approx([run.plan.prediction.iteration_s] * 7, rel=1e-6)
    found = read(file)
    assert found["ullage_running"] == 0
    assert found["ullage_iteration"] == 7
    assert found["ullage_loss"] == pytest.approx(run.losses[-1])
    assert found["ullage_held_bytes host"] == run.memory[Tier.HOST]
    tokens = run.plan.decisions.micro_batch * run.plan.seq_len
    assert found["ullage_tokens_per_second"] * found["ullage_iteration_seconds"] == pytest.approx(tokens)
    assert [path.name for path in tmp_path.glob("ullage.prom*")] == ["ullage.prom"], "it is written whole"


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "there").mkdir()
    file, warnings = folder / "ullage.prom", []
    prometheus = Prometheus(file, "a model")
    assert read(file)["ullage_running"] == 1
    monkeypatch.setattr("ullage.integrations.metrics._PERIOD_S", 0.0)
    prometheus.write(SAMPLE)
    found = read(file)
    assert (found["ullage_checkpoints_total saved"], found["ullage_checkpoints_total failed"]) == (2, 1)
    shutil.rmtree(folder)
    metrics = Metrics([prometheus], warnings.append)
    monkeypatch.setattr(Sample, "of", lambda *_: SAMPLE)
    for _ in range(2):
        metrics.after(None, None)
    metrics.close()
    assert len(warnings) == 1
    assert "Prometheus gets no more metrics" in warnings[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metrics-file", "metrics.txt"], "node_exporter reads only names that end in .prom"),
        (["--metrics-file", "missing/metrics.prom"], "there is no such folder; make it first"),
        (["--tensorboard", __file__], "there is a file of that name, not a folder"),
    ],
)
def test_bad_places_are_reported_before_training(host_plan, tmp_path, capsys, monkeypatch, options, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["execute", str(host_plan), "--iterations", "7", *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "module"), [("--tensorboard", "torch.utils.tensorboard"), ("--metrics-file", "prometheus_client")]
)
def test_missing_libraries_are_named(host_plan, tmp_path, capsys, monkeypatch, option, module) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    assert main(["execute", str(host_plan), "--iterations", "7", option, "x.prom"]) == 2
    assert "pip install 'ullage[metrics]'" in capsys.readouterr().err


def test_a_full_drive_ends_tensorboard_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer import record_writer  # noqa: PLC0415

    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    def write(_self: object, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = TensorBoard(tmp_path)
    sink.write(SAMPLE)
    threads = [thread for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread"]
    monkeypatch.setattr(record_writer.RecordWriter, "write", write)
    with pytest.raises(OSError, match="No space"):
        for _ in range(1000):
            sink.write(SAMPLE)
            time.sleep(0.01)
    for thread in threads:
        thread.join(5)
    assert shown == []

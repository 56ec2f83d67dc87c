"""Metrics during training: event files for TensorBoard, and a text file for Prometheus.

Rank 0 writes both. If one cannot be written, Ullage warns once and stops writing it; training goes on.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, final

from hwprofiles.files import check_output, make_folder, write_whole
from planner.schedule.tasks import Tier
from ullage.training.trainer import Step, Trainer

_PERIOD_S: Final = 1.0  # between two writes of the text file; readers poll less often


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Metrics after one iteration.

    Attributes:
        iteration: counted from 0.
        loss: see :class:`ullage.training.trainer.Step`.
        learning_rate: the largest learning rate of all groups in the next iteration.
        measured_s, predicted_s: measured seconds of the iteration, and the plan's prediction.
        tokens_per_s: measured over all ranks together, without padding.
        held_bytes: bytes that this rank has allocated permanently, by tier.
        num_saved, num_failed: checkpoints of this process so far, on all levels.
        eval_loss: loss of the held-out data, if they were evaluated after this iteration.
    """

    iteration: int
    loss: float
    learning_rate: float
    measured_s: float
    predicted_s: float
    tokens_per_s: float
    held_bytes: Mapping[Tier, int]
    num_saved: int
    num_failed: int
    eval_loss: float | None = None

    @classmethod
    def of(cls, step: Step, trainer: Trainer, eval_loss: float | None = None) -> "Sample":
        """Return a trainer's metrics after a step."""
        failed = sum(outcome.error is not None for outcome in trainer.outcomes)
        return cls(
            iteration=step.iteration,
            loss=step.loss,
            learning_rate=max(float(group["lr"]) for group in trainer.optimizer.param_groups),
            measured_s=step.measured_s,
            predicted_s=trainer.plan.prediction.iteration_s,
            tokens_per_s=step.num_tokens / step.measured_s,
            held_bytes={tier: sum(use.static_bytes.values()) for tier, use in trainer.session.memory().items()},
            num_saved=len(trainer.outcomes) - failed,
            num_failed=failed,
            eval_loss=eval_loss,
        )


class Sink(Protocol):
    """A destination of samples."""

    def write(self, sample: Sample) -> None:
        """Write a sample. May raise OSError."""
        ...

    def close(self) -> None:
        """Write samples that are still buffered. May raise OSError."""
        ...


@final
class TensorBoard:
    """Event files for TensorBoard in a folder.

    Args:
        folder: made if it does not exist. If an earlier run wrote there, TensorBoard hides its iterations that are
            repeated.

    Raises:
        ModuleNotFoundError: TensorBoard is missing.
        ValueError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - takes a second, and may be missing
        except ImportError as error:
            raise ModuleNotFoundError(
                "--tensorboard needs TensorBoard; pip install 'ullage[metrics]'", name="tensorboard"
            ) from error
        make_folder("--tensorboard", folder)
        self._open: Callable[..., Any] = SummaryWriter
        self._folder = str(folder)
        self._writer: Any = None
        self._hook = threading.excepthook

    def write(self, sample: Sample) -> None:
        """Add a point to every curve."""
        if self._writer is None:
            self._writer = self._open(self._folder, purge_step=sample.iteration)
            threading.excepthook = self._unless_reported
        values = {
            "loss": sample.loss,
            "learning rate": sample.learning_rate,
            "seconds per iteration/measured": sample.measured_s,
            "seconds per iteration/predicted": sample.predicted_s,
            "tokens per second": sample.tokens_per_s,
            **{f"held bytes/{tier.value}": num_bytes for tier, num_bytes in sample.held_bytes.items()},
        }
        if sample.eval_loss is not None:
            values["evaluation loss"] = sample.eval_loss
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, sample.iteration)

    def close(self) -> None:
        """Write the rest."""
        if self._writer is not None:
            self._writer.close()
            threading.excepthook = self._hook

    def _unless_reported(self, error: threading.ExceptHookArgs) -> None:
        """Pass over the traceback of TensorBoard's thread on a full drive: the next :meth:`write` raises its error."""
        if not (type(error.thread).__name__ == "_AsyncWriterThread" and isinstance(error.exc_value, OSError)):
            self._hook(error)


@final
class Prometheus:
    """A file in Prometheus' text format, for the textfile collector of its node exporter. It is replaced in one step.

    Args:
        path: path of the file; the collector requires the ending ``.prom``.
        model: label of all metrics.

    Raises:
        ModuleNotFoundError: Prometheus' client is missing.
        ValueError: the path does not end in ``.prom``, or cannot be written.
    """

    def __init__(self, path: Path, model: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge  # noqa: PLC0415 - may be missing
        except ImportError as error:
            raise ModuleNotFoundError(
                "--metrics-file needs Prometheus' client; pip install 'ullage[metrics]'", name="prometheus_client"
            ) from error
        if path.suffix != ".prom":
            raise ValueError(
                f"--metrics-file {path}: node_exporter reads only names that end in .prom; give such a name"
            )
        check_output("--metrics-file", path, only_regular=True)
        self._path = path
        self._labels = {"model": model}
        self._registry = CollectorRegistry()
        self._latest: Sample | None = None
        self._written_s = -_PERIOD_S

        def gauge(name: str, words: str, *labels: str) -> Gauge:
            return Gauge(f"ullage_{name}", words, ("model", *labels), registry=self._registry)

        self._running = gauge("running", "1 during training, 0 after it has ended normally")
        self._time = gauge("last_iteration_time_seconds", "Unix time at which the last iteration ended")
        self._gauges = {
            "iteration": gauge("iteration", "Iterations that have ended"),
            "loss": gauge("loss", "Mean loss over micro-batches and ranks"),
            "learning_rate": gauge("learning_rate", "Largest learning rate of all parameter groups"),
            "measured_s": gauge("iteration_seconds", "Measured time of the last iteration"),
            "predicted_s": gauge("predicted_iteration_seconds", "Predicted time of an iteration"),
            "tokens_per_s": gauge("tokens_per_second", "Measured tokens per second of all ranks together"),
        }
        self._eval_loss = gauge("eval_loss", "Loss of the latest evaluation of held-out data")
        self._held = gauge("held_bytes", "Memory that rank 0 has allocated permanently", "tier")
        self._checkpoints = Counter(
            "ullage_checkpoints", "Finished checkpoints of rank 0", ("model", "result"), registry=self._registry
        )
        self._running.labels(**self._labels).set(1)
        self._write()

    def write(self, sample: Sample) -> None:
        """Write a sample. It is in the file within about a second, or with the next sample."""
        self._time.labels(**self._labels).set_to_current_time()
        for name, gauge in self._gauges.items():
            gauge.labels(**self._labels).set(getattr(sample, name) + (name == "iteration"))
        if sample.eval_loss is not None:
            self._eval_loss.labels(**self._labels).set(sample.eval_loss)
        for tier, num_bytes in sample.held_bytes.items():
            self._held.labels(**self._labels, tier=tier.value).set(num_bytes)
        before = self._latest
        for result, name in (("saved", "num_saved"), ("failed", "num_failed")):
            more = getattr(sample, name) - (getattr(before, name) if before else 0)
            self._checkpoints.labels(**self._labels, result=result).inc(more)
        self._latest = sample
        if time.monotonic() - self._written_s >= _PERIOD_S:
            self._write()

    def close(self) -> None:
        """Write that training has ended."""
        self._running.labels(**self._labels).set(0)
        self._write()

    def _write(self) -> None:
        from prometheus_client import generate_latest  # noqa: PLC0415 - see above

        write_whole(
            self._path, generate_latest(self._registry), durable=False
        )  # so that training does not wait for a drive
        self._written_s = time.monotonic()


@final
class Metrics:
    """All sinks of a training run.

    Args:
        sinks: destinations of samples.
        warn: called once for each sink that fails.
    """

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn

    def after(self, step: Step, trainer: Trainer, eval_loss: float | None = None) -> None:
        """Write the metrics of a finished step, and the loss if an evaluation followed it."""
        if self._sinks:
            sample = Sample.of(step, trainer, eval_loss)
            self._all(lambda sink: sink.write(sample))

    def close(self) -> None:
        """Write the rest."""
        self._all(lambda sink: sink.close())

    def _all(self, do: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                do(sink)
            except OSError as error:
                self._sinks.remove(sink)
                where = f"{error.filename}: " if error.filename else ""
                self._warn(f"warning: {type(sink).__name__} gets no more metrics: {where}{error.strerror or error}")

"""``ullage execute``: train under a plan, watch for drift, and compare the run with its prediction."""

import contextlib
import dataclasses
import math
import platform
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from executor.devices.lanes import NUM_RECORDED
from executor.weights import save
from hwprofiles.files import check_output, make_folder
from hwprofiles.machine import check_measured_here
from planner.models.captured import counted
from planner.plan.document import Plan
from planner.schedule.tasks import MemoryClass, Tier
from planner.schedule.timeline import Timeline
from planner.schedule.trace import chrome_trace, write_trace
from ullage.analysis.comparison import Comparison, compare_record
from ullage.analysis.runs import MIN_MEASURED, RunRecord, rows, save_run
from ullage.analysis.simulation import simulate
from ullage.cli.interruption import InterruptedTrainingError, Interruption
from ullage.commands.execute.data import (
    Evaluations,
    check_data,
    check_places,
    check_room,
    num_iterations,
    training_data,
)
from ullage.data import Data
from ullage.integrations.metrics import Metrics, Prometheus, Sink, TensorBoard
from ullage.output.console import console, write_json
from ullage.output.formatting import si
from ullage.output.plans import tokens_per_iteration
from ullage.report.run import comparison_section
from ullage.report.terminal import show
from ullage.training.checkpoints import CheckpointOptions, where_saved
from ullage.training.drift import DriftWatch, warning
from ullage.training.levels import buffer_bytes, levels_of
from ullage.training.options import DEFAULT_CHECKPOINTS, MIN_CHECKPOINTS, ExecuteOptions
from ullage.training.out_of_memory import warning_of_retries
from ullage.training.processes import Process
from ullage.training.replanning import Replanned
from ullage.training.text import Tokens
from ullage.training.trainer import Step, Trainer, check_machine

# Iterations that warm up (first touches, compiled kernels) are not measured, nor is the one whose memory is metered.
_FIRST_STEADY = 3
REPLAN_AFTER = 10
_WARMUP_ITERATIONS = 5
_BAR = 10  # columns of the bar, so that a progress line has at most 80
_RUN, _TRACE = "run.json", "trace.json.gz"
_LATEST = 10  # the progress shows the median of this many latest iterations


def execute(plan: Plan, options: ExecuteOptions) -> RunRecord | None:
    """Train a plan's model, measure every task, and compare with the prediction.

    The data are text or tokens; a captured model may have one random batch instead. Under a plan for several devices,
    each process calls this function; rank 0 measures, prints and writes.

    At the end of training, it writes ``run.json`` (with the plan) and ``trace.json.gz`` (both timelines) into the
    output folder, each in one step.

    Raises:
        PlanError: the plan was made for another kind of machine, or for another number of processes.
        ValueError: there are too few tokens, the model does not know a token, or the function of a
            captured model does not exist.
        OSError: the data cannot be read or the results cannot be written.
        OutOfMemoryError: training takes more memory of a tier than there is.
        RankError: another rank has failed.
        CheckpointError: checkpoints cannot be made in their folder, or the one to resume from is of another model.
        InterruptedTrainingError: a signal ended training; the state is in a checkpoint, if there is a place for them.
    """
    _check_checkpoints(options)
    check_data(options)
    if options.epochs is None:
        _check_length(options, num_iterations(options, None))
    check_places(options)
    process = Process.of(plan)
    check_machine(plan, process, options.device)
    if not options.allow_other_machine:
        check_measured_here(plan.hardware)
    data = training_data(plan, options, process)
    length = num_iterations(options, data)
    _check_length(options, length)
    if process.is_first:
        make_folder("--output-dir", options.output_dir)  # before training, so that a bad path does not waste a run
        for name in (_RUN, _TRACE):
            check_output("--output-dir", options.output_dir / name)
        check_room(plan, options, length)
    sinks = _sinks(options, plan) if process.is_first else []
    storage = options.storage_dir or options.output_dir
    with Trainer(
        plan,
        data=data,
        lr=options.lr,
        seed=options.seed,
        position=options.data_position,
        storage_dir=storage,
        compile_blocks=options.compile_blocks,
        audit=options.audit,
        cores=options.cores,
        checkpoints=_checkpoints(plan, options),
        weights=options.weights,
    ) as trainer:
        trained = _train(options, trainer, data, length, sinks)
    if process.is_first and trained.record is not None:
        _write(options, trained.record, trained.replanned)
    if options.checkpoint_places:
        _print_checkpoints(options, trainer, trained)
    elif trained.signal is not None:
        kept = f"what was measured is in {options.output_dir / _RUN}" if trained.record else "nothing was measured"
        raise InterruptedTrainingError(f"interrupted after iteration {trainer.iteration}; {kept}", trained.signal)
    if trained.not_saved is not None:
        again = "train again with --checkpoint-dir, so that nothing is lost"
        if options.checkpoint_places:
            again = f"save again with `ullage checkpoint export {options.checkpoint_places[0]} --output-dir DIR`"
        raise OSError(f"the model was not saved: {trained.not_saved}; make room, and {again}") from trained.not_saved
    return trained.record


def _check_checkpoints(options: ExecuteOptions) -> None:
    if not options.checkpoint_places:
        if options.resume:
            raise ValueError("--resume needs the place of the checkpoints; give --checkpoint-dir PLACE")
        for option, numbers in (("--checkpoint-every", options.checkpoint_every), ("--keep", options.keep)):
            if numbers:
                given = ",".join(map(str, numbers))
                raise ValueError(f"{option} {given} needs a place for checkpoints; give --checkpoint-dir PLACE")
    if too_few := [count for count in options.keep if count < MIN_CHECKPOINTS]:
        raise ValueError(
            f"--keep {too_few[0]} is too few, because one checkpoint may be damaged; give --keep {MIN_CHECKPOINTS} or "
            "more"
        )


def _check_length(options: ExecuteOptions, length: int) -> None:
    words = f"--epochs {options.epochs} is {length} iterations, which is" if options.epochs else f"{length} iterations"
    if length < 1:
        raise ValueError(f"{words} too few to train; leave out --drop-last, or give more data")
    if options.replan and length < REPLAN_AFTER + MIN_MEASURED:
        raise ValueError(
            f"--replan plans again after {REPLAN_AFTER} iterations and measures at least {MIN_MEASURED} more, but "
            f"there are {length}; run at least {REPLAN_AFTER + MIN_MEASURED}"
        )


def _checkpoints(plan: Plan, options: ExecuteOptions) -> CheckpointOptions | None:
    if not options.checkpoint_places:
        return None
    levels = levels_of(
        plan, options.checkpoint_places, options.checkpoint_every, options.keep or (DEFAULT_CHECKPOINTS,)
    )
    return CheckpointOptions(levels, buffer_bytes(plan))


def _print_checkpoints(options: ExecuteOptions, trainer: Trainer, trained: "_Trained") -> None:
    """Print where the last checkpoint is. If a signal ended training, raise its error."""
    # Only rank 0 knows how checkpoints ended.
    where = where_saved(trainer.outcomes) if trainer.process.is_first else "rank 0 prints the place of its checkpoint"
    if trained.signal is not None:
        raise InterruptedTrainingError(
            f"interrupted after iteration {trainer.iteration}; {where}; continue with --resume", trained.signal
        )
    if trainer.process.is_first and not options.json:
        console().print(where, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class _Trained:
    record: RunRecord | None  # None if a signal came before the first iteration ended
    replanned: Replanned | None
    signal: int | None  # the signal that ended training early
    not_saved: OSError | None  # why ``--save`` failed


def _train(
    options: ExecuteOptions, trainer: Trainer, data: Tokens | Data | None, length: int, sinks: list[Sink]
) -> _Trained:
    """Train with a cosine learning-rate schedule with warm-up; with ``--replan``, change to a faster plan on the way.

    The function closes the trainer at the end and handles signals until then.
    """

    def factor(iteration: int) -> float:
        warm_up = min((iteration + 1) / _WARMUP_ITERATIONS, 1.0)
        return warm_up * 0.5 * (1 + math.cos(math.pi * iteration / length))

    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, factor)
    trainer.stateful["scheduler"] = scheduler
    watch = _watch(trainer.plan)
    losses: list[float] = []
    replanned, before, first = None, None, None
    with (
        _progress(length, trainer) as (show, warn),
        _interruption(options, warn, alone=trainer.plan.decisions.num_devices == 1) as interruption,
        contextlib.ExitStack() as closing,
    ):
        if options.resume:
            _resume(options, trainer, length, warn)
        evaluations = Evaluations(data, options.eval_every, length, warn)
        num_seen = 0
        metrics = Metrics(sinks, warn)
        closing.callback(metrics.close)
        for step in trainer.run(max(length - trainer.iteration, 0)):
            scheduler.step()
            losses.append(step.loss)
            show(step)
            metrics.after(step, trainer, evaluations.after(step, trainer))
            if trainer.session.iteration == NUM_RECORDED:  # later recordings replace these in the session
                first = trainer.session.timeline()
            if drifts := watch.after(trainer.session, trainer.session.iteration - 1):
                warn(warning(drifts))
            num_seen = _warn_about_checkpoints(trainer, num_seen, warn)
            if options.replan and len(losses) == REPLAN_AFTER:
                before = _record(options, trainer, losses, evaluations, trainer.session.timeline())
                replanned = trainer.replan()
                warn(str(replanned))
                watch = _watch(trainer.plan)
            if interruption is not None and trainer.session.collectives.mean(float(interruption.signal is not None)):
                break  # all ranks leave after the same iteration
        record = None
        if losses:
            timeline = trainer.session.timeline() if first is None else first
            record = _record(options, trainer, losses, evaluations, timeline)
        ended_by = None if interruption is None else interruption.signal
        not_saved = _save(options, trainer, data, ended_by, warn)
        trainer.close(give_back=False)
        _warn_about_checkpoints(trainer, num_seen, warn, skip=trainer.iteration)
    if record is not None and replanned is not None and replanned.switched:
        record = record.model_copy(update={"before": before})
    return _Trained(record, replanned, ended_by, not_saved)


def _save(
    options: ExecuteOptions,
    trainer: Trainer,
    data: Tokens | Data | None,
    ended_by: int | None,
    report: Callable[[str], None],
) -> OSError | None:
    """With ``--save``, save the model and the tokenizer of its data, unless training was interrupted.

    Return why that failed: what was measured, and a last checkpoint, are worth keeping.
    """
    if options.save is not None and ended_by is None:
        tokenizer = data.tokenizer if isinstance(data, Data) else None
        try:
            save(trainer.optimizer, options.save, dtype=options.save_dtype, tokenizer=tokenizer)
        except OSError as error:
            return error
        report(f"model saved in {options.save}")
    return None


def _sinks(options: ExecuteOptions, plan: Plan) -> list[Sink]:
    sinks: list[Sink] = []
    if options.tensorboard is not None:
        sinks.append(TensorBoard(options.tensorboard))
    if options.metrics_file is not None:
        sinks.append(Prometheus(options.metrics_file, plan.model.name))
    return sinks


def _warn_about_checkpoints(
    trainer: Trainer, num_seen: int, warn: Callable[[str], None], skip: int | None = None
) -> int:
    """Warn about failed checkpoints after the first ``num_seen`` outcomes, except step ``skip``.

    Return the number of outcomes.
    """
    outcomes = trainer.outcomes[num_seen:]
    for outcome in outcomes:
        if outcome.error is not None and outcome.step != skip:
            warn(f"warning: checkpoint of step {outcome.step}: {outcome.error}")
    return num_seen + len(outcomes)


def _interruption(
    options: ExecuteOptions, warn: Callable[[str], None], *, alone: bool
) -> contextlib.AbstractContextManager[Interruption | None]:
    """Return the handler of signals. Ranks without checkpoints have none: they would have to agree each time."""
    saves = bool(options.checkpoint_places)
    return Interruption(warn, saves=saves) if saves or alone else contextlib.nullcontext()


def _resume(options: ExecuteOptions, trainer: Trainer, length: int, warn: Callable[[str], None]) -> None:
    found = trainer.resume()
    for reason in found.refused:
        warn(f"warning: skipped a checkpoint: {reason}")
    if found.path is None:
        warn(f"no checkpoint in {' or '.join(options.checkpoint_places)}: training starts from the beginning")
    elif found.step >= length:
        more = "--iterations" if options.epochs is None else "--epochs"
        raise ValueError(f"{found.path} has all {length} iterations already; train longer with {more}")
    else:
        warn(f"continuing from {found.path}")


def _watch(plan: Plan) -> DriftWatch:
    simulation = simulate(plan)
    return DriftWatch(simulation.timeline, simulation.steady)


def _write(options: ExecuteOptions, record: RunRecord, replanned: Replanned | None) -> None:
    if line := warning_of_retries(record.allocator):
        console(stderr=True).print(line, soft_wrap=True)
    parts = {"": record} | ({" before": record.before} if record.before else {})
    timelines: dict[str, Timeline] = {}
    for words, part in parts.items():
        timelines |= {f"predicted{words}": simulate(part.plan).timeline, f"measured{words}": part.timeline}
    try:
        save_run(record, options.output_dir / _RUN)
        write_trace(options.output_dir / _TRACE, chrome_trace(timelines))
    finally:  # if the drive is full, the screen is what remains
        _report(options, record, {words: compare_record(part) for words, part in parts.items()}, replanned)


@contextlib.contextmanager
def _progress(num_iterations: int, trainer: Trainer) -> Iterator[tuple[Callable[[Step], None], Callable[[str], None]]]:
    """Yield a function that shows a finished iteration, and a function that prints a line above the progress.

    The progress shows the loss, and the median seconds of the latest iterations beside the prediction.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    shown = trainer.process.is_first
    latest_s: deque[float] = deque(maxlen=_LATEST)

    def show(step: Step) -> None:
        words = f"loss {step.loss:.3f}"
        if step.iteration >= _FIRST_STEADY:
            latest_s.append(step.measured_s)
            predicted_s = trainer.plan.prediction.iteration_s
            measured_s = statistics.median(latest_s)
            ratio = measured_s / predicted_s
            words += f", {si(measured_s, 's')} ({si(predicted_s, 's')} predicted, {ratio:.2f} x)"
        bar.update(task, completed=step.iteration + 1, description=words)

    def warn(line: str) -> None:
        if shown:
            bar.console.print(line, soft_wrap=True)

    columns = (BarColumn(bar_width=_BAR), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("", total=num_iterations)
        yield show, warn


def _record(
    options: ExecuteOptions, trainer: Trainer, losses: list[float], evaluations: Evaluations, timeline: Timeline
) -> RunRecord:
    memory = trainer.session.memory()
    ranks = dict.fromkeys(
        (Tier.HOST, Tier.NVME), trainer.process.per_node
    )  # only runs with equal shares match the prediction
    words = [platform.node() or "this machine", f"torch {torch.__version__}"]
    words += ["blocks compiled" if options.compile_blocks else "", _cores(trainer), trainer.session.storage]
    return RunRecord(
        plan=trainer.plan,
        machine=", ".join(filter(None, words)),
        losses=tuple(losses),
        eval_losses=tuple(evaluations.losses),
        start_s=rows(timeline.start_s),
        end_s=rows(timeline.end_s),
        steady_iterations=tuple(range(_FIRST_STEADY, timeline.num_iterations - 1)),
        memory={tier: use.peak_bytes * ranks.get(tier, 1) for tier, use in memory.items()},
        static_bytes={
            tier: {kind: n * ranks.get(tier, 1) for kind, n in use.static_bytes.items()} for tier, use in memory.items()
        },
        device_bytes=dict(memory[Tier.GPU].dynamic_bytes_of),
        allocator=dict(memory[Tier.GPU].allocator),
        data_position=trainer.position,
        num_left=trainer.session.num_left,
        attention=trainer.session.attention,
        checkpoint_bytes=memory[Tier.HOST].static_bytes.get(MemoryClass.CHECKPOINT, 0),
    )


def _cores(trainer: Trainer) -> str:
    return str(trainer.session.cores) + (" (rank 0)" if trainer.process.per_node > 1 else "")


def _report(
    options: ExecuteOptions, record: RunRecord, compared: Mapping[str, Comparison], replanned: Replanned | None
) -> None:
    losses, comparison = record.losses, compared[""]
    if options.json:
        extra: dict[str, Any] = {} if replanned is None else {"replan": replanned.to_json()}
        if " before" in compared:
            extra["replan"]["comparison_before"] = compared[" before"].to_json()
        if record.eval_losses:
            extra["eval_losses"] = [list(entry) for entry in record.eval_losses]
        write_json({"losses": list(losses), "output_dir": str(options.output_dir), **comparison.to_json(), **extra})
        return
    out = console()
    plan = record.plan
    tokens = tokens_per_iteration(plan)
    iteration = next(row for row in comparison.phases if row.name == "iteration")
    out.print(f"{plan.model.name}: {len(losses)} iterations, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if record.eval_losses:
        made, loss = record.eval_losses[-1]
        lowest = min(record.eval_losses, key=lambda entry: entry[1])
        out.print(f"evaluation loss {loss:.3f} after iteration {made}; lowest {lowest[1]:.3f} after {lowest[0]}")
    if iteration.measured:
        out.print(f"{tokens / iteration.measured:,.0f} {counted(plan.model)}/s on {record.machine}")
    out.print()
    show(comparison_section(comparison))
    out.print()
    if replanned is not None:
        out.print(replanned.render(iteration.measured))
        out.print()
    if not (options.output_dir / _TRACE).exists():
        return
    out.print(f"run written to {options.output_dir / _RUN}")
    out.print(f"trace written to {options.output_dir / _TRACE} (open it in ui.perfetto.dev)")

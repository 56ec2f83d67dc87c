"""``ullage execute``: train under a plan, watch for drift, and compare the run with its prediction."""

import argparse
import contextlib
import dataclasses
import platform
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from executor.checkpoint.levels import Level
from executor.devices.lanes import NUM_RECORDED
from executor.distributed.meeting import world_size
from executor.prepare import OffloadedOptimizer
from executor.weights.files import weights_folder
from executor.weights.saving import save
from hwprofiles.files import check_output, make_folder
from hwprofiles.machine import check_measured_here
from planner.models.captured import counted
from planner.plan.document import Plan
from planner.schedule.tasks import MemoryClass, Tier
from planner.schedule.timeline import Timeline
from ullage.analysis.comparison import Comparison, compare_record
from ullage.analysis.runs import RunRecord, rows, save_run
from ullage.analysis.simulation import simulate
from ullage.cli.interruption import Interruption, SignalledError
from ullage.commands.execute.checks import REPLAN_AFTER, as_planned, check_changes, check_options, check_room
from ullage.output.console import console
from ullage.output.formatting import si
from ullage.report.run import comparison_section, replanned_table
from ullage.report.terminal import Shown, answer
from ullage.report.trace import chrome_trace, write_trace
from ullage.this_machine.planning import Options
from ullage.training.batches import Batches, tokens_for
from ullage.training.checkpoints import Saver, where_saved
from ullage.training.drift import DriftWatch, warning
from ullage.training.elastic import IterationLog, Start, in_words, planned_for, shared_folder
from ullage.training.levels import buffer_bytes, levels_of, usable
from ullage.training.loop import Step, train
from ullage.training.models import check_machine, position, prepared
from ullage.training.out_of_memory import warning_of_retries
from ullage.training.processes import check_processes, is_first_process, rank, ranks_per_node
from ullage.training.replanning import Replanned, replan

# Iterations that warm up (first touches, compiled kernels) are not measured, nor is the one whose memory is metered.
_FIRST_STEADY = 3
_BAR = 10  # columns of the bar, so that a progress line has at most 80
_RUN, _TRACE = "run.json", "trace.json.gz"
_LATEST = 10  # the progress shows the median of this many latest iterations


def execute(plan: Plan, args: argparse.Namespace) -> RunRecord | None:
    """Train a plan's model, measure every task, and compare with the prediction.

    The data are text or tokens; a captured model has one random batch instead. Under a plan for several devices, each
    process calls this function; rank 0 measures, prints and writes.

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
        SignalledError: a signal ended training; the state is in a checkpoint, if there is a place for them.
    """
    check_options(args)
    check_changes(plan, replan=args.replan, elastic=args.elastic)
    first_plan, levels, progress = plan, None, None
    if args.checkpoint_dirs:
        levels = usable(plan, levels_of(plan, args.checkpoint_dirs), is_first=is_first_process())
        if args.elastic:
            plan, progress = _for_who_is_there(plan, levels, args.num_iterations)
    check_processes(plan)
    plan = plan.of_rank(rank())
    check_machine(plan)
    if not args.allow_other_machine:
        check_measured_here(plan.hardware)
    tokens = tokens_for(plan, args.data)
    batches = Batches(plan, tokens, args.seed, position(plan)[0].reader, first_plan.decisions.num_sequences)
    batches.position = args.data.get("skip", 0)
    if is_first_process():
        make_folder("--output-dir", args.output_dir)  # before training, so that a bad path does not waste a run
        for name in (_RUN, _TRACE):
            check_output("--output-dir", args.output_dir / name)
        check_room(plan, args)
    options = _options(args, first_plan)
    weights = None if args.weights is None else weights_folder(args.weights)
    model, optimizer = prepared(plan, lr=args.lr, seed=args.seed, weights=weights, options=options)
    with contextlib.ExitStack() as failing:

        @failing.push
        def leave(*error: Any) -> None:  # the session, of which a change of plans makes another, tells other ranks
            optimizer.session.__exit__(*error)

        saver = None if levels is None else Saver(optimizer, levels, batches)
        if saver is not None:
            failing.callback(saver.close, waits=False)
        if progress is not None:
            failing.callback(progress.close)
        trained = _train(args, model, optimizer, batches, saver, progress)
    if is_first_process() and trained.record is not None:
        _write(args, trained.record, trained, batches.num_sequences)
    _end(args, trained, saver)
    return trained.record


def _options(args: argparse.Namespace, plan: Plan) -> Options:
    options: Options = {
        "storage_dir": args.storage_dir or args.output_dir,
        "audit": args.audit,
        "cores": args.cores,
    }
    if args.compile_blocks is not None:
        options["compile_blocks"] = args.compile_blocks
    if args.checkpoint_dirs:
        options["checkpoint_buffer_bytes"] = buffer_bytes(plan)
    return options


def _for_who_is_there(plan: Plan, levels: Sequence[Level], num_iterations: int) -> tuple[Plan, IterationLog | None]:
    """Return a plan for the ranks that are there, and what rank 0 keeps of the run over all its starts."""
    folder = shared_folder(levels)
    progress = IterationLog(folder, plan, world_size(), num_iterations) if is_first_process() else None
    return planned_for(plan, world_size(), folder), progress


def _end(args: argparse.Namespace, trained: "_Trained", saver: Saver | None) -> None:
    """Print where the last checkpoint is. If a signal ended training, or the model was not saved, raise that."""
    if saver is not None:
        # Only rank 0 knows how checkpoints ended.
        where = where_saved(saver.outcomes) if is_first_process() else "rank 0 prints the place of its checkpoint"
        kept = f"{where}; continue with --resume"
    else:
        kept = f"what was measured is in {args.output_dir / _RUN}" if trained.record else "nothing was measured"
    if trained.signal is not None:
        raise SignalledError(trained.signal, f"interrupted after iteration {trained.num_iterations}; {kept}")
    if saver is not None and is_first_process() and not args.json:
        console().print(where, soft_wrap=True)
    if trained.not_saved is not None:
        again = "train again with --checkpoint-dir, so that nothing is lost"
        if args.checkpoint_dirs:
            again = f"save again with `ullage checkpoint export {args.checkpoint_dirs[0]['']} --save DIR`"
        raise OSError(f"the model was not saved: {trained.not_saved}; make room, and {again}") from trained.not_saved


@dataclasses.dataclass(frozen=True)
class _Trained:
    record: RunRecord | None  # None if a signal came before the first iteration ended
    replanned: Replanned | None
    num_iterations: int  # that have ended, also before the checkpoint that was resumed from
    signal: int | None  # the signal that ended training early
    not_saved: OSError | None  # why ``--save`` failed
    starts: tuple[Start, ...]  # of an elastic run, but the first


def _train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: OffloadedOptimizer,
    batches: Batches,
    saver: Saver | None,
    progress: IterationLog | None,
) -> _Trained:
    """Train, with ``--replan`` under a faster plan later on, and close the session. Handle signals until then."""
    watch = None if optimizer.pipeline else DriftWatch(simulate(optimizer.plan))
    losses: list[float] = []
    replanned, before, first = None, None, None
    # Ranks without checkpoints handle no signals: they would have to agree each time.
    handles = saver is not None or optimizer.plan.decisions.num_devices == 1
    with (
        _progress(args.num_iterations, optimizer) as (show, warn),
        Interruption(warn, saves=saver is not None) if handles else contextlib.nullcontext() as interruption,
    ):
        goes_on = args.resume or args.elastic
        iteration = _resume(args, saver, warn) if saver is not None and goes_on else 0
        num_seen = 0
        for step in train(model, optimizer, batches, iteration, args.num_iterations, saver):
            session, iteration = optimizer.session, step.iteration + 1
            losses.append(step.loss)
            show(step)
            if progress is not None and (start := progress.add(step, batches.position)):
                warn(str(start))
            if session.iteration == NUM_RECORDED:  # later recordings replace these in the session
                first = session.timeline()
            if watch is not None and (drifts := watch.after(session, session.iteration - 1)):
                warn(warning(drifts))
            num_seen = _warn_about_checkpoints(saver, num_seen, warn)
            if args.replan and len(losses) == REPLAN_AFTER:
                before = _record(optimizer, batches, losses, session.timeline())
                replanned = _replan(optimizer, saver)
                warn(str(replanned))
                watch = DriftWatch(simulate(optimizer.plan))
            if interruption is not None and optimizer.session.collectives.mean(float(interruption.signal is not None)):
                break  # all ranks leave after the same iteration
        record = None
        if losses:
            timeline = optimizer.session.timeline() if first is None else first
            schedule = optimizer.plan.schedule(takes_snapshots=saver is not None)
            record = _record(optimizer, batches, losses, as_planned(timeline, schedule, position(optimizer.plan)[1]))
        signal = None if interruption is None else interruption.signal
        not_saved = _save(args, optimizer, warn) if signal is None else None
        if saver is not None:
            saver.save(iteration)
            saver.close(waits=True, brings_down=True)
        optimizer.session.close(give_back=False)
        _warn_about_checkpoints(saver, num_seen, warn, skip=iteration)
    if record is not None and replanned is not None and replanned.switched:
        record = record.model_copy(update={"before": before})
    starts = () if progress is None else tuple(progress.starts)
    return _Trained(record, replanned, iteration, signal, not_saved, starts)


def _replan(optimizer: OffloadedOptimizer, saver: Saver | None) -> Replanned:
    if saver is None:
        return replan(optimizer)
    replanned = replan(optimizer, lambda: saver.close(waits=True))
    if replanned.switched:
        saver.open(optimizer)
    return replanned


def _save(args: argparse.Namespace, optimizer: OffloadedOptimizer, report: Callable[[str], None]) -> OSError | None:
    """With ``--save``, save the model.

    Return why that failed: what was measured, and a last checkpoint, are worth keeping.
    """
    if args.save:
        try:
            save(optimizer, args.save[""], dtype=args.save.get("dtype"))
        except OSError as error:
            return error
        report(f"model saved in {args.save['']}")
    return None


def _warn_about_checkpoints(
    saver: Saver | None, num_seen: int, warn: Callable[[str], None], skip: int | None = None
) -> int:
    """Warn about failed checkpoints after the first ``num_seen`` outcomes, except step ``skip``.

    Return the number of outcomes.
    """
    outcomes = [] if saver is None else saver.outcomes[num_seen:]
    for outcome in outcomes:
        if outcome.error is not None and outcome.step != skip:
            warn(f"warning: checkpoint of step {outcome.step}: {outcome.error}")
    return num_seen + len(outcomes)


def _resume(args: argparse.Namespace, saver: Saver, warn: Callable[[str], None]) -> int:
    """Resume from the newest checkpoint, if there is one; return the number of its iterations."""
    found = saver.resume()
    for reason in found.refused:
        warn(f"warning: skipped a checkpoint: {reason}")
    if found.path is None:
        places = " or ".join(each[""] for each in args.checkpoint_dirs)
        warn(f"no checkpoint in {places}: training starts from the beginning")
    elif found.step >= args.num_iterations:
        line = f"{found.path} has all {args.num_iterations} iterations already; train longer with --iterations"
        if not args.elastic:
            raise ValueError(line)
        warn(line)  # a start after the end, for a failure that came then
    else:
        warn(f"continuing from {found.path}")
    return found.step


def _write(args: argparse.Namespace, record: RunRecord, trained: _Trained, num_sequences: int) -> None:
    if line := warning_of_retries(record.allocator):
        console(stderr=True).print(line, soft_wrap=True)
    parts = {"": record} | ({" before": record.before} if record.before else {})
    timelines: dict[str, Timeline] = {}
    for words, part in parts.items():
        timelines |= {f"predicted{words}": simulate(part.plan).timeline, f"measured{words}": part.timeline}
    try:
        save_run(record, args.output_dir / _RUN)
        write_trace(args.output_dir / _TRACE, chrome_trace(timelines))
    finally:  # if the drive is full, the screen is what remains
        compared = {words: compare_record(part) for words, part in parts.items()}
        _report(args, record, compared, trained, num_sequences)


@contextlib.contextmanager
def _progress(
    num_iterations: int, optimizer: OffloadedOptimizer
) -> Iterator[tuple[Callable[[Step], None], Callable[[str], None]]]:
    """Yield a function that shows a finished iteration, and a function that prints a line above the progress.

    The progress shows the loss, and the median seconds of the latest iterations beside the prediction.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    shown = is_first_process()
    latest_s: deque[float] = deque(maxlen=_LATEST)

    def show(step: Step) -> None:
        words = f"loss {step.loss:.3f}"
        if step.iteration >= _FIRST_STEADY:
            latest_s.append(step.measured_s)
            predicted_s = optimizer.plan.prediction.iteration_s
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
    optimizer: OffloadedOptimizer,
    batches: Batches,
    losses: list[float],
    timeline: Timeline,
) -> RunRecord:
    session = optimizer.session
    memory, per_node = session.memory(), ranks_per_node(optimizer.plan)
    # Only runs with equal shares match the prediction.
    ranks = dict.fromkeys((Tier.HOST, Tier.NVME), per_node)
    cores = str(session.cores) + (" (rank 0)" if per_node > 1 else "")
    words = [platform.node() or "this machine", f"torch {torch.__version__}"]
    words += ["blocks compiled" if session.options.compile_blocks else "", cores, session.storage]
    return RunRecord(
        plan=optimizer.plan,
        machine=", ".join(filter(None, words)),
        losses=tuple(losses),
        start_s=rows(timeline.start_s),
        end_s=rows(timeline.end_s),
        steady_iterations=tuple(range(_FIRST_STEADY, timeline.num_iterations - 1)),
        memory={
            tier: use.peak_bytes * ranks.get(tier, 1)
            for tier, use in memory.items()
            if tier is not Tier.GPU or use.dynamic_peak_bytes is not None
        },
        static_bytes={
            tier: {kind: n * ranks.get(tier, 1) for kind, n in use.static_bytes.items()} for tier, use in memory.items()
        },
        device_bytes=dict(memory[Tier.GPU].dynamic_bytes_of),
        allocator=dict(memory[Tier.GPU].allocator),
        data_position=batches.position,
        num_left=session.num_left,
        num_unexpected=session.num_unexpected,
        attention=session.attention,
        checkpoint_bytes=memory[Tier.HOST].static_bytes.get(MemoryClass.CHECKPOINT, 0) * per_node,
    )


def _report(
    args: argparse.Namespace,
    record: RunRecord,
    compared: Mapping[str, Comparison],
    trained: _Trained,
    num_sequences: int,
) -> None:
    losses, comparison, replanned = record.losses, compared[""], trained.replanned
    extra: dict[str, Any] = {} if replanned is None else {"replan": replanned.to_json()}
    if " before" in compared:
        extra["replan"]["comparison_before"] = compared[" before"].to_json()
    if trained.starts:
        extra["starts"] = [start._asdict() for start in trained.starts]
    data = {"losses": losses, "output_dir": str(args.output_dir), **comparison.to_json(), **extra}
    plan, run, trace = record.plan, args.output_dir / _RUN, args.output_dir / _TRACE
    iteration_s = next(row for row in comparison.phases if row.name == "iteration").measured
    lines = [f"{plan.model.name}: {len(losses)} iterations, loss {losses[0]:.3f} -> {losses[-1]:.3f}"]
    if iteration_s:
        rate = num_sequences * plan.seq_len / iteration_s
        lines.append(f"{rate:,.0f} {counted(plan.model)}/s on {record.machine}")
    if trained.starts:
        lines.append(in_words(trained.starts))
    shown: list[Shown] = [*lines, comparison_section(comparison)]
    if replanned is not None:
        shown += [replanned_table(replanned, iteration_s), str(replanned)]
    if trace.exists():
        shown += ["", f"run written to {run}", f"trace written to {trace} (open it in ui.perfetto.dev)"]
    answer(args, data, *shown)

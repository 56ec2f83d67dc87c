"""Training as planned: ``prepare`` for a loop of your own, ``execute`` for the whole job."""

import contextlib
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.memory import DeviceMemoryError
from executor.optimizer.table import stock_of
from executor.options import SessionOptions
from executor.prepare import OffloadedOptimizer, prepare_session
from executor.session import Session
from hwprofiles.allocator import keep_freed_memory
from planner.models.captured import counted
from planner.optimizers import Optimizer
from planner.plan import Plan, PlanError
from planner.schedule import Tier
from planner.trace import chrome_trace, write_trace
from ullage.comparison import Comparison, compare, render_comparison
from ullage.console import console, write_json
from ullage.feeds import Feed, feed_of
from ullage.options import ExecuteOptions
from ullage.processes import Process, ranks_per_node
from ullage.runs import RunRecord, rows, save_run
from ullage.simulation import simulate

# What warms up (first touches, compiled kernels) is not measured, nor is the iteration whose memory is metered.
_METERED = 1
_FIRST_STEADY = 3
MIN_ITERATIONS = _FIRST_STEADY + 3
_MAX_GRADIENT_NORM = 1.0
_WARMUP_ITERATIONS = 5
# What `ullage execute` trains with, beside its --lr.
_HYPER_PARAMETERS: dict[Optimizer, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "sgd": {"momentum": 0.9},
    "adagrad": {},
    "lion": {"betas": (0.95, 0.98), "weight_decay": 0.1},
}


def prepare(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, *, storage_dir: Path | None = None
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Put a model and its optimizer under a plan; keep your own training loop, with the returned optimizer.

    Args:
        model: an unmodified module whose parameters are those the plan was made for (a ``transformers`` model of the
            planned configuration, say). It takes the planned type; under a bf16 plan the values of a float32 model
            live on as its master copy.
        optimizer: the planned one (``torch.optim.AdamW``, ``Adam``, ``SGD``, ``Adagrad`` or :class:`ullage.Lion`) over
            its parameters or some of them, in any groups; LR schedulers may be built on it or on the result. What is
            not in it, or frozen, stays as it is, though the plan has room for its state and gradient.
        plan: made for the machine this runs on.
        storage_dir: folder on the planned drives, if the plan keeps optimizer state on NVMe.

    Returns:
        The model and the optimizer to use from now on; ``optimizer.session`` executes the plan.

    A plan for several devices is executed by one process for each, which ``torchrun`` starts: see
    :func:`executor.prepare.prepare_session`.

    Raises:
        ValueError: the plan cannot be executed here, or the model is not the planned one.
        DeviceMemoryError: less memory is free than planned.
        RankError: another rank has failed.
    """
    return prepare_session(model, optimizer, plan.units(), plan.decisions, _session_options(plan, storage_dir))


def execute(plan: Plan, options: ExecuteOptions) -> RunRecord:
    """Train a plan's model, measure every task, and compare with the prediction.

    It is trained on text, or on one random batch if it was captured. Under a plan for several devices this is one of
    the processes; the first of them measures, prints and writes.

    Writes ``run.json`` (with the plan) and ``trace.json.gz`` (both timelines) into the output folder, each whole or not
    at all, when training has ended.

    Raises:
        PlanError: the plan was made for another kind of machine, or for another number of processes.
        ValueError: too few iterations, too little text, or a captured model that is not there.
        OSError: the text cannot be read or the results cannot be written.
        DeviceMemoryError: training takes more of a tier than it has.
        RankError: another rank has failed.
    """
    if options.num_iterations < MIN_ITERATIONS:
        raise ValueError(f"{options.num_iterations} iterations are too few to measure; run at least {MIN_ITERATIONS}")
    process = Process.of(plan)
    _check_machine(plan, options, process)
    feed = feed_of(plan, options, process.rank)
    if process.is_first:
        options.output_dir.mkdir(parents=True, exist_ok=True)  # before training: a bad path must not cost a run
    model, optimizer, scheduler = _make(plan, options, feed, process)
    with optimizer.session as session:
        losses = list(_train(plan, options, feed, model, optimizer, scheduler, process))
        record = _record(plan, session, losses, feed, process)
        session.close(give_back=False)
    if process.is_first:
        _write(plan, options, record)
    return record


def _write(plan: Plan, options: ExecuteOptions, record: RunRecord) -> None:
    simulation = simulate(plan)
    comparison = compare(
        simulation.timeline,
        simulation.steady,
        record.timeline,
        record.steady_iterations,
        {tier: use.peak_bytes for tier, use in plan.prediction.memory.items()},
        record.memory,
    )
    trace = options.output_dir / "trace.json.gz"
    save_run(record, options.output_dir / "run.json")
    write_trace(trace, chrome_trace({"predicted": simulation.timeline, "measured": record.timeline}))
    _report(options, record, comparison)


def _check_machine(plan: Plan, options: ExecuteOptions, process: Process) -> None:
    kind = plan.hardware.device.kind
    wanted = {"auto": kind, "host": "host", "cuda": "gpu"}[options.device]
    if wanted != kind:
        raise PlanError(
            f"the plan was made for a {kind} device ({plan.hardware.name}), but --device asks for {options.device}; "
            "plan for that machine: `ullage calibrate`, then `ullage plan --hardware local`"
        )
    if kind == "gpu" and not torch.cuda.is_available():
        raise PlanError(
            f"the plan was made for {plan.hardware.name}, but this machine has no GPU that PyTorch can use; "
            "run `ullage calibrate` here and plan with --hardware local"
        )
    if kind == "gpu" and (count := torch.cuda.device_count()) <= process.local_rank:
        raise PlanError(
            f"the plan is for {process.per_node} devices on a node, but this machine has {count}; plan with --gpus "
            f"{count}, or for a profile of this machine"
        )
    wanted_cores = plan.hardware.device.num_cores * process.per_node
    if kind == "host" and (cores := len(os.sched_getaffinity(0))) < wanted_cores:
        raise PlanError(
            f"the plan computes on {wanted_cores} cores, but this process may use {cores}; "
            "run `ullage calibrate` here and plan with --hardware local"
        )


def _session_options(plan: Plan, storage_dir: Path | None) -> SessionOptions:
    hardware, per_node = plan.hardware, ranks_per_node(plan)
    return SessionOptions(
        device="cuda" if hardware.device.kind == "gpu" else "cpu",
        num_threads=max(hardware.host.num_optimizer_cores // per_node, 1),
        gpu_capacity_bytes=int(hardware.device.memory_bytes.value),
        host_capacity_bytes=int(hardware.host.memory_bytes.value) // per_node,
        storage_dir=storage_dir,
        record=True,
    )


def _make(
    plan: Plan, options: ExecuteOptions, feed: Feed, process: Process
) -> tuple[nn.Module, OffloadedOptimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Make the planned model with random weights, its optimizer, and a cosine schedule with warm-up."""
    if plan.hardware.device.kind == "host":
        torch.set_num_threads(plan.hardware.device.num_cores)
        keep_freed_memory()
    else:
        torch.cuda.set_device(process.local_rank)
    torch.manual_seed(options.seed)
    model = feed.model().train()
    optimizer = stock_of(plan.decisions.optimizer)(
        model.parameters(), lr=options.lr, **_HYPER_PARAMETERS[plan.decisions.optimizer]
    )

    def factor(iteration: int) -> float:
        warm_up = min((iteration + 1) / _WARMUP_ITERATIONS, 1.0)
        return warm_up * 0.5 * (1 + math.cos(math.pi * iteration / options.num_iterations))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    prepared = prepare(model, optimizer, plan, storage_dir=options.storage_dir or options.output_dir)
    if process.rank:
        torch.manual_seed(options.seed + process.rank)  # of what is left to chance in training (dropout)
    return *prepared, scheduler


def _train(
    plan: Plan,
    options: ExecuteOptions,
    feed: Feed,
    model: nn.Module,
    optimizer: OffloadedOptimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    process: Process,
) -> Iterator[float]:
    """Train, and yield the loss of every iteration: the mean over all ranks."""
    decisions = plan.decisions
    device = next(model.parameters()).device
    with _progress(options.num_iterations, shown=process.is_first) as tell:
        for iteration in range(options.num_iterations):
            metered = optimizer.session.metered() if iteration == _METERED else contextlib.nullcontext()
            total = torch.zeros((), device=device)
            with metered:
                for _ in range(decisions.num_micro_batches):
                    loss = feed.loss(model, device) / decisions.num_micro_batches
                    loss.backward()  # type: ignore[no-untyped-call]
                    total += loss.detach()
                if decisions.clip:
                    optimizer.clip_grad_norm_(_MAX_GRADIENT_NORM)
                optimizer.step()
            scheduler.step()
            if iteration == _METERED:
                _check_memory(plan, optimizer.session)
            loss_value = optimizer.session.mean(float(total))
            if not math.isfinite(loss_value):
                raise ValueError(
                    f"the loss is {loss_value} in iteration {iteration}; use a smaller --lr than {options.lr:g}"
                )
            tell(iteration, loss_value)
            yield loss_value


def _check_memory(plan: Plan, session: Session) -> None:
    """Keep to the device's capacity where nothing else does: the arena is part of ordinary memory."""
    use = session.memory()[Tier.GPU]
    capacity = int(plan.hardware.device.memory_bytes.value)
    if plan.hardware.device.kind == "host" and use.peak_bytes > capacity:
        planned = plan.gpu_memory
        held = "; ".join(f"{c} {n / 1e6:.1f} MB" for c, n in sorted(use.static_bytes.items()))
        raise DeviceMemoryError(
            f"the device holds {use.peak_bytes / 1e6:.1f} MB at its peak ({held}; what comes and goes "
            f"{(use.dynamic_peak_bytes or 0) / 1e6:.1f} MB), but has {capacity / 1e6:.1f} MB; predicted were "
            f"{planned.peak_bytes / 1e6:.1f} MB. Plan with a --device-memory that is smaller than this prediction by "
            "what it was too low"
        )


@contextlib.contextmanager
def _progress(num_iterations: int, *, shown: bool) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("", total=num_iterations)
        yield lambda iteration, loss: bar.update(task, completed=iteration + 1, description=f"loss {loss:.3f}")


def _record(plan: Plan, session: Session, losses: list[float], feed: Feed, process: Process) -> RunRecord:
    timeline = session.timeline()
    ranks = dict.fromkeys((Tier.HOST, Tier.NVME), process.per_node)  # whose shares are equal, as the prediction has it
    return RunRecord(
        plan=plan,
        machine=", ".join(
            filter(None, (platform.node() or "this machine", f"torch {torch.__version__}", session.storage))
        ),
        losses=tuple(losses),
        start_s=rows(timeline.start_s),
        end_s=rows(timeline.end_s),
        steady_iterations=tuple(range(_FIRST_STEADY, timeline.num_iterations - 1)),
        memory={tier: use.peak_bytes * ranks.get(tier, 1) for tier, use in session.memory().items()},
        data_position=feed.position,
    )


def _report(options: ExecuteOptions, record: RunRecord, comparison: Comparison) -> None:
    losses = record.losses
    if options.json:
        write_json({"losses": list(losses), "output_dir": str(options.output_dir), **comparison.to_json()})
        return
    out = console()
    plan = record.plan
    decided = plan.decisions
    tokens = decided.data_parallel * decided.num_micro_batches * decided.micro_batch * plan.seq_len
    iteration = next(row for row in comparison.phases if row.name == "iteration")
    out.print(f"{plan.model.name}: {len(losses)} iterations, loss {losses[0]:.3f} -> {losses[-1]:.3f}", markup=False)
    if iteration.measured:
        out.print(f"{tokens / iteration.measured:,.0f} {counted(plan.model)}/s on {record.machine}", markup=False)
    out.print()
    out.print(render_comparison(comparison))
    out.print()
    out.print(f"run written to {options.output_dir / 'run.json'}", markup=False)
    out.print(f"trace written to {options.output_dir / 'trace.json.gz'} (open it in ui.perfetto.dev)", markup=False)

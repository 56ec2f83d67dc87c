"""Make a plan from a user's model, optimizer and one batch, for the memory that is free on this machine now."""

import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from executor import options as executor_options
from executor.distributed.meeting import meeting, world_size
from executor.module.batches import named_inputs
from executor.module.guards import check_kinds, check_memory, check_plain, check_unprepared
from executor.optimizer.reference import rounds
from executor.optimizer.table import entry_of
from executor.prepare import OffloadedOptimizer
from executor.training_state.rng_state import preserved_rng_state
from hwprofiles.machine import available_memory_bytes
from hwprofiles.paths import replace
from hwprofiles.profile import FOR_LIBRARIES_BYTES, Dtype, Fabric, HardwareProfile
from hwprofiles.quantity import Provenance, Quantity
from planner.choices.request import Request
from planner.decisions import Precision
from planner.models.captured import CapturedInput, CapturedModel
from planner.plan.document import Plan, PlanError, gigabytes
from planner.plan.planning import InfeasibleError, make_plan
from planner.schedule.tasks import Tier
from planner.terms import AuditTime, CoreChoice, Storage
from ullage.calibrate.run import USABLE_SHARE
from ullage.capture.inputs import Example, input_of
from ullage.capture.module import capture_called
from ullage.capture.records import DTYPES, CaptureError, strided
from ullage.cli.default_hardware import machine_named
from ullage.cli.options import option_value
from ullage.output.progress import search_progress
from ullage.this_machine.checks import check_tokens, check_trainable
from ullage.this_machine.profile import print_line, profile_here

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""The inputs of a model: ``model(**batch)``, ``model(*batch)`` or ``model(batch)``. Tensors may be inside of others."""

Step = Callable[[nn.Module, Any], Any]
"""A step of the user's loop up to the loss: called with the model and a batch, it returns the loss."""

MOST_SIMULATIONS: Final = 150
"""Maximum number of simulations of one call. More gain little, and the user waits for each."""


_REMEDIES: Final = {
    Tier.GPU: "give a smaller example batch, a larger device_memory={enough}, one process for each of several devices "
    "(torchrun), or use a device with more memory",
    Tier.HOST: "give storage_dir=..., a folder on a drive, or use a host with more memory",
    Tier.NVME: "use a larger drive",
}
"""Remedies for a tier that is too small, in the words of ``prepare``."""


_prepared: Final = weakref.WeakSet[OffloadedOptimizer]()


class Options(TypedDict, total=False):
    """Options for planning, if no plan is given, and for executing the plan; all are optional.

    Attributes:
        hardware: name or path of a profile, or a profile. Default: this machine's own.
        device_memory: bytes of each device, or a text like ``"8GB"``. Default: the free memory, without what the plans
            of other prepared models take.
        num_micro_batches: micro-batches of one step. Default: 1.
        pipeline: stages that share the layers, each on devices of its own. Then ``optimizer.forward_backward(batches)``
            takes the place of forward and backward. Default: 1.
        collectives: how ranks gather weights and sum gradients: ``"fabric"``, with NCCL or gloo, or ``"host"``, through
            host memory that the ranks of a machine share. Default: the faster.
        clip: whether your loop clips gradients by their norm. Default: ``True``.
        speculate: whether updates begin in backward, before the norm is known, and are taken back in steps that clip.
            It pays where few do. Default: ``False``. See [Note: Speculation] in :mod:`executor.driver.speculation`.
        precision: ``"bf16"`` or ``"fp32"``, type of weights and gradients. Default: that of the model's weights.
        storage: what may be offloaded beside optimizer state and parameters. Default: activations; with a
            ``storage_dir``, everything to the drives too.
        storage_dir: folder on the planned drives, if the plan keeps anything on NVMe.
        compile_blocks: compile the repeated blocks with ``torch.compile`` (attention, MLP and norms, each by itself)
            when they first run, which takes a while. Default: where a given plan is for compiled kernels; only then are
            predicted times those of compiled blocks. Blocks whose activations are offloaded are not compiled. Rounding
            and the random numbers of dropout are then those of the compiled kernels.
        cores: cores of this machine that its ranks divide. Default: all cores that the process may use. Threads are
            bound if there are several ranks or if cores are given. ``"free"``: threads are not bound. See
            [Note: Shares of cores] in :mod:`executor.devices.cores`.
        checkpoint_buffer_bytes: host memory for snapshots that are not written yet. Without it, no checkpoints can be
            made; see :class:`ullage.Checkpoints`.
        audit: compare the first iterations with plain PyTorch on your model and data, and print a line about it
            (``"first"``, the default); also those after every so many iterations (a number); or never (``"off"``). If
            they differ, ``step()`` raises :class:`ullage.AuditError`. See [Note: Audit] in :mod:`executor.audit.audit`.
    """

    hardware: str | HardwareProfile
    device_memory: int | str
    num_micro_batches: int
    pipeline: int
    collectives: Literal["fabric", "host"]
    clip: bool
    speculate: bool
    precision: Dtype
    storage: Storage
    storage_dir: str | Path | None
    compile_blocks: bool
    cores: CoreChoice
    checkpoint_buffer_bytes: int
    audit: AuditTime


PLAN_OPTIONS: Final = [name for name in Options.__annotations__ if name not in executor_options.Options.__annotations__]
"""The options that a given plan has decided."""


def plan_here(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    options: Options,
    step: Step | None = None,
) -> Plan:
    """Return a plan for an existing model, for the memory that is free now, without a comparison with other engines.

    It is for ``step(model, batch)``, or for a call of the model with the batch. Of several ranks, rank 0 measures,
    captures and plans. All ranks return its plan or raise its error.

    Raises:
        InfeasibleError: no plan fits.
        ValueError: the model or the batch cannot be captured, or the optimizer is unknown.
    """
    check_kinds(model, optimizer)
    check_unprepared(model)
    check_plain(model)
    check_memory(model, optimizer)
    check_trainable(model)
    check_tokens(model, batch)
    stages, started = options.get("pipeline") or 1, world_size()
    if started % stages:
        raise ValueError(
            f"pipeline is {stages}, but {started} process(es) were started; start one for each stage (torchrun "
            f"--nproc-per-node {stages}), or leave pipeline out"
        )
    free = free_memory(model, {name: options.get(name) for name in (*PLAN_OPTIONS, "audit")})
    with preserved_rng_state():  # the model's forward may draw numbers

        def make() -> Plan:
            entry, captured = entry_of(optimizer), capture_live(model, batch, options.get("precision"), step)
            _report_written(captured, started // stages)
            rounded = captured.dtype == "bf16" and any(map(rounds, optimizer.param_groups))
            request = Request(
                captured,
                machine_now(options, free),
                num_devices=world_size(),
                seq_len=captured.seq_len,
                micro_batch=captured.micro_batch,
                num_micro_batches=options.get("num_micro_batches", 1),
                pipeline_parallel=options.get("pipeline"),
                pipeline_order="1f1b" if options.get("compile_blocks") else None,  # see Choice.why_not_apart
                collectives=options.get("collectives"),
                precision=Precision(weights=captured.dtype, master="bf16" if rounded else None),
                optimizer=entry.planned_as,
                clip=options.get("clip", True) or bool(entry.whole),  # which reads all gradients at the step
                speculate=options.get("speculate", False),
                storage=options.get("storage", "activations"),
            )
            for words in captured.assumed or ():
                print_line(words)
            with search_progress() as progress:
                try:
                    return make_plan(request, max_simulations=MOST_SIMULATIONS, progress=progress)
                except InfeasibleError as error:
                    device, lacking = request.hardware.device, error.missing_bytes.get(Tier.GPU, 0)
                    margin = FOR_LIBRARIES_BYTES if device.kind == "gpu" else 0
                    enough = repr(_rounded_up(int(device.memory_bytes.value) + lacking + margin))
                    own = {tier: remedy.format(enough=enough) for tier, remedy in _REMEDIES.items()}
                    raise error.with_remedies({**own, Tier.GPU: _of_others(lacking) + own[Tier.GPU]}) from None

        return made_by_rank_0(make)


def _report_written(captured: CapturedModel, ranks: int) -> None:
    """Print what has to stay on the device because forward writes to it; of so many ranks that share it.

    Raises:
        ValueError: it cannot: see [Note: Written weights] in :mod:`planner.setup`.
    """
    if not captured.written:
        return
    name, more = captured.written[0], len(captured.written) - 1
    planned = {spec.name for operator in captured.operators() for spec in operator.parameters}
    trained = [written for written in captured.written if written in planned]
    if trained and (captured.dtype != "fp32" or ranks > 1):
        raise ValueError(
            f"forward writes to the parameter {trained[0]} (as nn.Embedding does with max_norm), which is planned only "
            f"in fp32 and on one device that has its layer, not in {captured.dtype} on {ranks}; leave that out, or let "
            "forward compute with a changed copy"
        )
    print_line(
        f"forward writes to {name}{f' and {more} more parameters' if more else ''}: what holds them stays on the "
        "device, and is not audited"
    )


def _rounded_up(num_bytes: int) -> str:
    """Return a size that is not smaller, as ``device_memory`` takes it."""
    unit, name = next(((u, n) for u, n in ((10**9, "GB"), (10**6, "MB")) if num_bytes >= u), (1000, "kB"))
    return f"{math.ceil(100 * num_bytes / unit) / 100:.2f}{name}"


def share_device(optimizer: OffloadedOptimizer) -> None:
    """Let later plans in this process leave a prepared model the device memory of its plan, until its session ends."""
    _prepared.add(optimizer)


def _others() -> list[OffloadedOptimizer]:
    """Return those of prepared models that hold device memory."""
    return [other for other in _prepared if not other.session.closed and not other.session.runtime.parked]


def _of_others(lacking_bytes: int) -> str:
    """Return a remedy if other prepared models take device memory, so that so many bytes lack; else nothing."""
    held = {other.plan.model.name: other.plan.gpu_memory.peak_bytes for other in _others()}
    if not held:
        return ""
    most = max(held, key=held.__getitem__)
    less = f"={held[most] - lacking_bytes}" if lacking_bytes < held[most] else ""
    return (
        f"the plan{'s' * (len(held) > 1)} of {', '.join(held)} take{'s' * (len(held) == 1)} "
        f"{gigabytes(sum(held.values()))} of the device: prepare {most} with device_memory{less}, a smaller one; or "
    )


def capture_live(
    model: nn.Module, batch: Batch, precision: Dtype | None = None, step: Step | None = None
) -> CapturedModel:
    """Capture an existing model with a batch. Its large weights are neither read nor copied.

    Args:
        model: any module.
        batch: inputs of the model.
        precision: type of the planned weights. Default: that of the model's weights.
        step: what to capture in place of a call of the model; see :func:`ullage.prepare`.

    Raises:
        CaptureError: the model cannot be captured, or does not run with the batch.
        ValueError: the batch or the type of the weights cannot be planned.
    """
    if precision is not None and precision not in DTYPES:
        raise ValueError(f"precision is {precision!r}, which cannot be planned; give one of {', '.join(DTYPES)}")
    dtype = precision or _dtype_of(model)
    args, kwargs = _arguments(batch) if step is None else ((batch,), {})
    if not (args or kwargs):
        raise ValueError("the example batch is empty; give one batch of your loop, the largest")
    packed = tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, PackedSequence))
    # Recurrent layers read the sizes of batches where no operator shows it.
    sizes = {id(value.batch_sizes) for value in packed if isinstance(value, PackedSequence)}
    inputs = [
        (name, value)
        for name, value in named_inputs(args, kwargs)
        if id(value) not in sizes and (step is None or input_of(name, value))
    ]
    if not inputs and step is None:  # of texts or trees alone: its call is planned as a step
        return capture_live(model, batch, precision, lambda model, _batch: model(*args, **kwargs))
    specs = tuple(_input(name, value, position) for position, (name, value) in enumerate(inputs))
    tensors = [value for _, value in inputs]
    values = {number: value.cpu() for number, value in enumerate(tensors)}
    example = Example(args, kwargs, tensors, values, step=step)
    try:
        found = capture_called(model, specs, dtype, example, as_on_gpu=torch.cuda.is_available())
    except CaptureError as error:
        trained = [(name, parameter.dtype) for name, parameter in model.named_parameters() if parameter.requires_grad]
        others = [f"{name} is {of}" for name, of in trained if of.to_real() is not DTYPES[dtype]]
        if not others:
            raise
        raise CaptureError(
            f"{error}. A plan has all trained weights in {DTYPES[dtype]}, but {others[0]}: if that is why, convert it"
        ) from error
    return found.of_one_size()  # the planner cannot change the size of the user's batches


def _dtype_of(model: nn.Module) -> Literal["bf16", "fp32"]:
    """Return the type of the majority of trained weights."""
    counts: dict[torch.dtype, int] = {}
    for parameter in [p for p in model.parameters() if p.requires_grad] or list(model.parameters()):
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    if not counts:
        raise ValueError(f"{type(model).__name__} has no parameters; give the model that is trained")
    most = max(counts, key=counts.__getitem__).to_real()  # complex ones are refused where they are named
    for name, dtype in DTYPES.items():
        if dtype is most:
            return name
    smaller = "float32" if most is torch.float64 else "bfloat16"
    raise ValueError(
        f"the model's weights are {most}, which cannot be planned; convert it first: model.to(torch.{smaller})"
    )


def _arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with, positional and by keyword."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        if others := [name for name in batch if not isinstance(name, str)]:
            raise TypeError(f"the example batch has a key {others[0]!r}; name each input as the model's forward does")
        return (), dict(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return tuple(batch), {}
    raise TypeError(
        f"the third argument is {type(batch).__name__}; give a plan (ullage.plan or ullage.load_plan), or an "
        "example batch: a dict, a tuple or a tensor that the model is called with"
    )


def _input(name: str, value: Tensor, position: int) -> CapturedInput:
    if value.is_nested:
        raise ValueError(
            f"{name or f'input {position + 1}'} of the example batch is a nested tensor, which has no shape to plan "
            "for; give the model a padded tensor with lengths or a mask"
        )
    if (found := input_of(name, value)) is None:
        raise ValueError(
            f"{name or f'input {position + 1}'} of the example batch is {value.dtype}, but must be "
            "floating-point, whole numbers or bool; convert it before the call of the model"
        )
    return found


def free_memory(model: nn.Module | None = None, asked: Mapping[str, object] | None = None) -> tuple[int | None, int]:
    """Return the bytes that are free for training on a device (``None`` without a GPU), and on this host.

    They include memory of the model on a GPU, because weights move. What plans of other prepared models are going to
    take, as for activations, is not free. All ranks call it together, and get what the one with least has.

    Args:
        model: what is trained.
        asked: options that must be the same on all ranks.

    Raises:
        ValueError: one is not.
    """
    device = None
    if torch.cuda.is_available():
        held = strided([*model.parameters(), *model.buffers()]) if model else []
        own = {id(t): t.nbytes for t in held if t.is_cuda}
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        device = torch.cuda.mem_get_info()[0] + cached + sum(own.values()) - FOR_LIBRARIES_BYTES
    host = int(available_memory_bytes() * USABLE_SHARE)
    promised = sum(max(o.plan.gpu_memory.peak_bytes - o.session.runtime.gpu.used_bytes, 0) for o in _others())
    if device is None:
        host -= promised
    else:
        device -= promised
    if world_size() > 1:
        words = {name: str(getattr(value, "name", value)) for name, value in (asked or {}).items()}
        with meeting(world_size()) as ranks:
            every = [json.loads(text) for text in ranks.exchange(json.dumps((device, host, words)))]
        for rank, (*_, others) in enumerate(every):
            if name := next((name for name, word in others.items() if word != every[0][-1][name]), None):
                raise ValueError(
                    f"{name} is {every[0][-1][name]} on rank 0 and {others[name]} on rank {rank}, but one plan is for "
                    "all ranks; give all of them the same"
                )
        device = None if device is None else min(of_rank for of_rank, *_ in every if of_rank is not None)
        host = min(of_rank for _, of_rank, _ in every)
    return device, host


def machine_now(options: Options, free: tuple[int | None, int], num_ranks: int | None = None) -> HardwareProfile:
    """Return the machine with the memory that is free now, and with one device per rank.

    Args:
        options: may name a machine, and the memory of a device.
        free: what is free, of a device and of the host.
        num_ranks: ranks of this machine. Default: those that ``torchrun`` has started on it.

    Raises:
        ValueError: ``device_memory`` is more than is free, or the profile is of another kind of device.
    """
    (device_bytes, host_bytes), profile = free, options.get("hardware")
    if not isinstance(profile, HardwareProfile):
        profile = profile_here() if profile is None else machine_named(profile)
    kind = "host" if device_bytes is None else "gpu"
    if profile.device.kind != kind:
        raise PlanError(
            f"profile {profile.name} is of a {profile.device.kind} device, but this machine computes on a {kind}; "
            "leave hardware out, or run `ullage calibrate` here"
        )
    num_ranks = num_ranks or int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())
    if kind == "host" and num_ranks > profile.devices_per_node:
        profile = _divided(profile, num_ranks)
    most = device_bytes if device_bytes is not None else host_bytes // num_ranks - 1
    wanted = option_value("device_memory", options.get("device_memory"))
    if wanted is not None:
        margin = FOR_LIBRARIES_BYTES if kind == "gpu" else 0
        if not margin < wanted <= most + margin:
            least = f", of which {margin} B are for libraries" if margin else ""
            raise ValueError(
                f"device_memory is {wanted} B, but {most + margin} B are free for each device{least}; give another size"
            )
        wanted -= margin
    if wanted is None:
        whole = int(profile.device.memory_bytes.value) - sum(o.plan.gpu_memory.peak_bytes for o in _others())
        wanted = most if kind == "gpu" else min(whole, most // 2)
    if wanted <= 0:
        raise ValueError(f"no device memory is left for this model; {_of_others(sys.maxsize)}close their sessions")
    host = host_bytes - (wanted * num_ranks if kind == "host" else 0)
    origin = Provenance(origin="assumed", source="free when it was planned, or asked for")
    return replace(profile, {"device.memory_bytes": wanted, "host.memory_bytes": host}, origin)


def _divided(profile: HardwareProfile, num_devices: int) -> HardwareProfile:
    """Return a host whose cores stand in for several devices, which communicate over loopback."""
    origin = Provenance(origin="assumed", source="gloo over loopback")
    fabric = Fabric(
        bytes_per_s=Quantity(value=1e9, unit="bytes_per_s", provenance=origin),
        latency_s=Quantity(value=3e-4, unit="s", provenance=origin),
    )
    joined = tuple((f"host{number}", "dram") for number in range(profile.devices_per_node, num_devices))
    data = profile.model_dump(mode="json", exclude_none=True) | {
        "devices_per_node": num_devices,
        "intra_node": fabric.model_dump(mode="json", exclude_none=True),
        "topology": [*profile.topology, *joined],
    }
    return HardwareProfile.model_validate(data)


def made_by_rank_0(make: Callable[[], Plan]) -> Plan:
    """Make a plan on rank 0 and return it on all ranks.

    Raises:
        InfeasibleError, ValueError, OSError: on rank 0, the error of ``make``.
        RankError: on other ranks, ``make`` failed on rank 0; or a rank has failed, or is missing.
    """
    if world_size() == 1:
        return make()
    with meeting(world_size()) as ranks:
        plan = make() if dist.get_rank() == 0 else None
        text, *_ = ranks.exchange("" if plan is None else plan.to_json())
    return plan or Plan.model_validate_json(text)

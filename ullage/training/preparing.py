"""``ullage.prepare``: put a model and its optimizer under a plan, which is given or made now."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

import executor.options
from executor.module.guards import AS_THEY_ARE, check_kinds, run_uncompiled
from executor.prepare import OffloadedOptimizer, prepare_session
from planner.models.captured import CapturedModel
from planner.plan.document import Plan
from planner.terms import COMPILED
from ullage.capture.fakes import fake_operators
from ullage.capture.records import DTYPES
from ullage.this_machine.checks import check_options
from ullage.this_machine.planning import PLAN_OPTIONS, Batch, Options, Step, plan_here, share_device
from ullage.this_machine.profile import print_line
from ullage.training.batches import batch_shapes
from ullage.training.processes import is_first_process, rank, ranks_per_node


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | Batch,
    *,
    step: Step | None = None,
    **options: Unpack[Options],
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Prepare a model and its optimizer for your own training loop, in the memory that is free.

    Args:
        model: an unmodified module. It is converted to the planned type. Under a bf16 plan, the values of a float32
            model become its master copy, unless the master copy is bf16 too.
        optimizer: ``torch.optim.AdamW``, ``Adam``, ``SGD``, ``Adagrad``, :class:`ullage.AdamWBf16`,
            :class:`ullage.AdamW8bit`, :class:`ullage.Lion` or :class:`ullage.Muon`; any other that updates each
            value by itself (``torch.optim.RMSprop``, a class of your own); or, slower, any other at all. It may have
            all or some of the model's parameters, in any groups, and others beside them. LR schedulers may be built on
            it or on the result. Parameters that are frozen or not in the optimizer do not change. If a parameter is
            frozen when the model is captured, the plan has no optimizer state for it. ``None`` for a model whose
            parameters are all frozen: a teacher, a reference, a reward. It is evaluated, and gradients flow through it;
            ``session`` of what is returned for it closes it.
        plan: the largest batch of your loop: a dict (``model(**batch)``), a tuple (``model(*batch)``) or a tensor. The
            model is then captured without a copy of its weights, and planned for the memory that is free now. If this
            machine has no profile, it is first measured, once, for half a minute. Or give a plan for a model with these
            parameters, made for this machine.
        step: a function of your loop that takes the model and a batch, and returns the loss. Give it if a step does
            more than to call the model once with the batch: several calls, other methods, losses of your own. It is
            then what is planned, called with the given batch, which may be any object.
        options: see :class:`ullage.Options`. If a plan is given, ``hardware`` to ``storage`` are decided by it.

    Returns:
        The model and the optimizer to use from now on. ``optimizer.plan`` is the plan, and ``optimizer.session``
        executes it. Under a plan of n micro-batches, call ``step()`` after every n forward and backward passes. The
        first n - 1 may run inside ``with model.no_sync():``, as with ``DistributedDataParallel``.

    A plan for several devices needs one process per device, started by ``torchrun``; see
    :func:`executor.prepare.prepare_session`. Without a plan, the number of devices is the number of these processes.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the plan cannot be executed here, the model does not match the plan, or the model or batch cannot be
            planned.
        InfeasibleError: no plan fits in the memory that is free.
        DeviceMemoryError: less memory is free than planned.
        RankError: another rank has failed.

    If the model's weights have another type than the plan's, they are converted, with a warning. The first batch that
    is larger than planned causes a warning too.

    If a block cannot be compiled, it raises :class:`executor.module.compilation.CompileError` when it first runs.
    """
    if optimizer is None:
        with _one_trained(model) as placeholder:
            return prepare(model, placeholder, plan, step=step, **options)
    _check_arguments(model, optimizer)
    if compiled := list(run_uncompiled(model)):
        warnings.warn(AS_THEY_ARE, RuntimeWarning, stacklevel=2)
        with contextlib.ExitStack() as failing:
            for undo in compiled:
                failing.callback(undo)
            prepared = prepare(model, optimizer, plan, step=step, **options)
            prepared[1].session.at_end(failing.pop_all().close)
        return prepared
    check_options("prepare", options, Options.__annotations__)
    if not isinstance(plan, Plan):
        if options.get("storage_dir") is not None:
            options = {"storage": "nvme", **options}
        plan = plan_here(model, optimizer, plan, options, step)
    elif step is not None:
        raise ValueError("step is what a plan is made for, but a plan is given; leave it out, or give a batch instead")
    elif decided := [name for name in PLAN_OPTIONS if name in options]:
        raise ValueError(
            f"{decided[0]} is already decided by the given plan; leave it out, or give a batch instead of the plan"
        )
    plan = plan.of_rank(rank())
    if "precision" not in options:
        warn_about_dtypes(model, plan)
    _warn_of_parameters_left_out(model, optimizer)
    _say_what_is_frozen(model, optimizer)
    return prepare_planned(model, optimizer, plan, options_of(plan, options))


def _check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    check_kinds(model, optimizer)
    if isinstance(optimizer, OffloadedOptimizer) and not optimizer.session.closed:
        raise ValueError(
            "the optimizer steps under the plan of a model already; give each model that you prepare an optimizer of "
            "its own, or prepare one nn.ModuleDict of the models, with step=, and one optimizer for it"
        )


@contextlib.contextmanager
def _one_trained(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Let the smallest parameter of a frozen model count as trained while it is planned; yield an optimizer for it.

    Raises:
        ValueError: the model is not frozen, or has no parameters in floating point.
    """
    check_kinds(model, torch.optim.SGD([torch.empty(0)]))
    if wanted := next((name for name, parameter in model.named_parameters() if parameter.requires_grad), None):
        raise ValueError(
            f"{wanted} requires gradients, but no optimizer is given; give the one that trains it, or freeze the model "
            "(model.requires_grad_(False)) to evaluate it as it is"
        )
    found = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameters in floating point; leave it as it is")
    types = [parameter.dtype for parameter in found]
    most = max(set(types), key=types.count)
    smallest = min((parameter for parameter in found if parameter.dtype is most), key=torch.Tensor.numel)
    smallest.requires_grad_(True)
    try:
        yield torch.optim.SGD([smallest], lr=0.0)
    finally:
        smallest.requires_grad_(False)


def warn_about_dtypes(model: nn.Module, plan: Plan) -> None:
    """Warn if a model's weights do not have the planned type."""
    planned = DTYPES[plan.decisions.precision.weights]
    stay = {spec.name for unit in plan.units() for spec in unit.frozen if spec.frozen != "plain"}
    found = {str(p.dtype.to_real()) for name, p in model.named_parameters() if name not in stay}
    if others := sorted(found - {str(planned)}):
        keeps = not plan.decisions.precision.master_is_weight
        masters = "; the float32 master copies begin with the given values" if keeps else ""
        warnings.warn(
            f"the model's weights are {', '.join(others)} and are converted to {planned}, the planned type{masters}; "
            "convert the model before prepare(), or plan with another --precision",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_parameters_left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn if parameters want gradients, but the optimizer does not have them."""
    has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in has
    ]
    if left:
        warnings.warn(
            f"the optimizer lacks {len(left)} of the parameters that require gradients ({left[0]}, ...): the plan "
            "leaves them as they are; another optimizer may train them, slower, by gradients in host memory that the "
            "plan does not count; else give one optimizer all that you train, in groups, and freeze the rest before "
            "prepare(), which also saves memory",
            RuntimeWarning,
            stacklevel=3,
        )


def _say_what_is_frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Say that frozen parameters which the optimizer has cannot be thawed: the plan has no memory for that."""
    has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [name for name, p in model.named_parameters() if id(p) in has and not p.requires_grad]
    if frozen and is_first_process():
        print_line(
            f"the optimizer has {len(frozen)} frozen parameters ({frozen[0]}, ...), for whose gradients and state the "
            "plan has no memory; if your loop trains them later, let them require gradients in prepare(), and freeze "
            "them after it"
        )


def prepare_planned(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, options: executor.options.Options
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Put a model and its optimizer under a plan; see :func:`executor.prepare.prepare_session`."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    model, offloaded = prepare_session(model, optimizer, plan.units(), plan.decisions, options)
    for parameter, gradient in gradients:
        if offloaded.session.has(parameter):  # to which the first backward adds, if the loop does not drop it
            parameter.grad = gradient.to(parameter)
    offloaded.plan = plan
    share_device(offloaded)
    return model, offloaded


def options_of(plan: Plan, given: Options) -> executor.options.Options:
    """Return the options for a session of a plan: the user's that do not plan, and those of the plan's machine.

    Raises:
        ValueError: blocks are to be compiled that a step runs several times, or that make gradients of gradients; or
            the plan is for kernels that are only priced.
    """
    if plan.decisions.kernels == "liger":
        raise ValueError(
            "the plan is for kernels of Liger, which compute the head's gradients outside of the modules that a plan "
            "follows, so they can only be compared; plan with --kernels compiled, or without it"
        )
    captured = plan.model if isinstance(plan.model, CapturedModel) else None
    calls = (captured and captured.calls) or ()
    compiles = given.get("compile_blocks", plan.decisions.kernels in COMPILED)
    if captured and captured.second_order and compiles:
        raise ValueError(
            "compile_blocks is True, but the plan is for gradients of gradients (create_graph=True), which compiled "
            "blocks do not have; leave it out"
        )
    if calls and compiles:
        raise ValueError(
            "compile_blocks is True, but the planned step calls the model several times, or parts of it, whose blocks "
            "are not compiled; leave it out"
        )
    hardware, per_node = plan.hardware, ranks_per_node(plan)
    is_shared = plan.decisions.pipeline_parallel == 1  # equally; stages take what the plan has added up
    folder = given.get("storage_dir")
    own: dict[str, Any] = {
        "audit": "first",
        "compile_blocks": compiles,
        **{k: v for k, v in given.items() if k not in PLAN_OPTIONS},
    }
    own["storage_dir"] = None if folder is None else Path(folder)
    return executor.options.Options(
        device="cuda" if hardware.device.kind == "gpu" else "cpu",
        num_threads=max(hardware.host.num_optimizer_cores // per_node, 1),
        gpu_capacity_bytes=int(hardware.device.memory_bytes.value),
        host_capacity_bytes=int(hardware.host.memory_bytes.value) // (per_node if is_shared else 1),
        record=True,
        link_bytes_per_s=link_bytes_per_s(plan),
        batch=batch_shapes(plan),
        calls=calls,
        uncompiled=bool(captured and captured.compiled),
        operators=None if captured is None else fake_operators,
        as_buffers=_as_buffers(captured, plan),
        report=print_line if is_first_process() else lambda _line: None,
        **own,
    )


def _as_buffers(captured: CapturedModel | None, plan: Plan) -> frozenset[str]:
    """Return the parameters that forward writes to and that are in no unit."""
    if captured is None or not captured.written:
        return frozenset()
    return frozenset(captured.written) - {name for unit in plan.units() for name in unit.sizes}


def link_bytes_per_s(plan: Plan) -> tuple[float, float]:
    """Return the rates of copies from and to the device on a plan's machine."""
    link = plan.hardware.host_link
    return link.up.best_rate_per_s(), link.down.best_rate_per_s()

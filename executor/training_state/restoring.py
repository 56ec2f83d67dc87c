"""Restores state from checkpoints to where a plan keeps it. Another plan with other ranks may have saved it."""

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.format.manifest import Manifest, TensorRecord
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
from executor.checkpoint.source import MASTER
from executor.distributed.shards import assemble, whole_name
from executor.memory.stream import DTYPES, Source, bytes_of, tensor_name, write_state
from executor.memory.units import ParameterState, UnitState
from executor.optimizer.blocks import SCALES, spread
from executor.optimizer.reference import ROUNDS, rounds
from executor.prepare import OffloadedOptimizer, check_prepared
from executor.session import Session
from executor.training_state.rng_state import set_rng_state
from planner.optimizers import Optimizer


def restore(optimizer: OffloadedOptimizer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore weights, optimizer state, step counts, groups and RNG state; return this rank's ``extra``.

    The checkpoint may be from another plan, with other tiers and another number of ranks. Every rank reads the state
    that it needs, see :mod:`executor.memory.stream`, and checks every byte. Ranks begin together,
    and exchange nothing while they read. So if one rank finds damage, no other rank waits for it.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer; nothing has changed.
        DamagedError: a needed part of it is damaged or missing, and some state has changed. Restore another checkpoint.
    """
    check_prepared(optimizer)
    with Checkpoint(checkpoint.folder, _with_copies(optimizer, checkpoint.manifest)) as named:
        return _restore(optimizer, named)


def _restore(optimizer: OffloadedOptimizer, checkpoint: Checkpoint) -> dict[str, Any]:
    session = optimizer.session
    of_ranks = checkpoint.manifest.extra["ranks"]
    collectives = session.collectives
    extra: dict[str, Any] = of_ranks[collectives.rank if collectives.rank < len(of_ranks) else 0] | _of_all(
        of_ranks, session
    )
    class_name = optimizer.entry.torch_class.__name__
    if extra["optimizer"] not in {class_name, *optimizer.entry.converts}:
        raise CheckpointError(
            f"{checkpoint.folder} has the state of {extra['optimizer']}, but the optimizer is {class_name}; make the "
            "optimizer that was saved"
        )
    groups, saved_groups = optimizer.param_groups, extra["groups"]
    names = [[session.name_of(parameter) for parameter in group["params"]] for group in groups]
    order = groups_in_order(saved_groups, extra["parameters"], names, str(checkpoint.folder))
    held = list(session.runtime.parameter_states().values())
    if missing := {entry.shard.name for _, entry in held} - extra["steps"].keys():
        raise CheckpointError(f"{checkpoint.folder} has no {min(missing)}; the checkpoint is of another model")
    _check_tensors(optimizer, checkpoint, (entry for _, entry in held), extra["shapes"])
    session.runtime.take_remaining()
    units = list({unit.name: unit for unit, _ in held}.values())
    alike = [
        unit
        for unit in units
        if all(_has_exact_shard(checkpoint, entry, _keys(optimizer, entry.kind)) for entry in unit.parameters)
    ]
    before = [dict(group) for group in groups]
    with session.runtime.changing("resume()", DamagedError):
        source = Source(
            {name: DTYPES[record.dtype] for name, record in checkpoint.manifest.tensors.items()}, checkpoint.read
        )
        write_state(session.runtime.state, alike, source, optimizer.buffers_of, reads=False)
        others = [unit for unit in units if unit not in alike]
        _read_whole_parameters(optimizer, checkpoint, source, others, extra["steps"])
        session.runtime.state.absent -= session.runtime.state.by_parameter.keys()
        for _, entry in held:
            entry.step = int(extra["steps"][entry.shard.name])
            entry.numbers = {entry.step: tuple(extra["numbers"].get(entry.shard.name, ()))}
        for group, index in zip(groups, order, strict=True):
            for key, value in saved_groups[index].items():
                if key == ROUNDS:  # the plan says what the master copy is
                    continue
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        if len(of_ranks) == collectives.size:
            set_rng_state(extra["rng"])
            session.sync_rng_state()  # the checkpoint may have had other tensor-parallel ranks
    warn_of_differences(before, saved_groups, order, str(checkpoint.folder))
    return extra


def _of_all(of_ranks: Sequence[Mapping[str, Any]], session: Session) -> dict[str, Any]:
    """Return what ranks have saved of their own parameters, of all: those of another stage have others."""
    joined: dict[str, Any] = {
        key: {name: value for each in of_ranks for name, value in each[key].items()}
        for key in ("steps", "numbers", "shapes")
    }
    for held, (copy, name) in itertools.product([*joined.values()], session.options.copies.items()):
        if name in held:
            held[copy] = held[name]
    groups = zip(*(each["parameters"] for each in of_ranks), strict=True)
    joined["parameters"] = [list(dict.fromkeys(itertools.chain(*names))) for names in groups]
    return joined


def _with_copies(optimizer: OffloadedOptimizer, manifest: Manifest) -> Manifest:
    """Return a manifest that has copied weights (:attr:`executor.options.Options.copies`) under their names here."""
    copies = optimizer.session.options.copies
    if not copies:
        return manifest
    kinds = {parameter.kind for _, parameter in optimizer.session.runtime.state.by_name.values()}
    keys = {MASTER, *SCALES.values()}.union(*(optimizer.buffers_of(kind) for kind in kinds))
    wanted = {tensor_name(name, key): tensor_name(copy, key) for copy, name in copies.items() for key in keys}
    found = {
        wanted[whole] + own.removeprefix(whole): record
        for own, record in manifest.tensors.items()
        if (whole := whole_name(own)) in wanted
    }
    return manifest.model_copy(update={"tensors": manifest.tensors | found})


def files_needed(optimizer: OffloadedOptimizer, manifest: Manifest) -> set[int]:
    """Return the indices of the files that :func:`restore` reads on this rank, or more."""
    manifest = _with_copies(optimizer, manifest)
    session, found = optimizer.session, set[int]()
    by_name: dict[str, list[TensorRecord]] = {}
    for own, record in manifest.tensors.items():
        by_name.setdefault(whole_name(own), []).append(record)
    for unit, entry in session.runtime.parameter_states().values():
        name, size = entry.shard.shard_name, entry.shard.shape.numel()
        for key in dict.fromkeys((*_keys(optimizer, entry.kind), *SCALES.values())):
            saved = manifest.tensors.get(tensor_name(name, key))
            if saved is None or saved.num_values == 0 or size == 0:  # saved with other shards: all of them
                others = by_name.get(tensor_name(entry.shard.name, key), ())
                found |= {fragment.file for other in others for fragment in other.fragments}
                continue
            parts = [(part.start, part.stop) for piece in unit.pieces for part in entry.parts_in(piece)]
            ranges = [(start - entry.start, stop - entry.start) for start, stop in parts]
            if unit.is_resident and len(unit.own_weights) < len(unit.device_weights):
                ranges.append((0, size))
            grain = size / saved.num_values  # more than 1 where values share one of the tensor
            for start, stop in ranges:
                found |= {
                    fragment.file
                    for fragment in saved.fragments
                    if fragment.start * grain < stop and start < fragment.stop * grain
                }
    return found


def _check_tensors(
    optimizer: OffloadedOptimizer,
    checkpoint: Checkpoint,
    parameters: Iterable[ParameterState],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Check, before anything changes, that a checkpoint has all tensors of parameters, in the shapes of the model.

    ``shapes`` has the whole shapes of parameters that were saved in shards. Tensors without elements may be missing.

    Raises:
        CheckpointError: it has not.
    """
    saved: dict[str, list[str]] = {}
    for own in checkpoint.manifest.tensors:
        saved.setdefault(whole_name(own), []).append(own)
    for parameter in parameters:
        name, shape = parameter.shard.name, tuple(parameter.shard.whole_shape)
        keys = _keys(optimizer, parameter.kind)
        for tensor in (tensor_name(name, key) for key in keys if key not in SCALES.values()):
            parts = saved.get(tensor, [])
            found = checkpoint.manifest.tensors[tensor].shape if tensor in parts else tuple(shapes.get(name, shape))
            if found != shape or not (parts or parameter.shard.whole_shape.numel() == 0):
                what = f"has shape {found}, but {shape} in the model" if parts else "is missing"
                raise CheckpointError(f"{checkpoint.folder}: {tensor} {what}; the checkpoint is of another model")


def _keys(optimizer: OffloadedOptimizer, kind: Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors of a parameter that ``kind`` updates."""
    return (MASTER, *optimizer.buffers_of(kind))


def _has_exact_shard(checkpoint: Checkpoint, parameter: ParameterState, keys: Sequence[str]) -> bool:
    """Return whether the checkpoint has exactly this shard of a parameter; of one without elements it has nothing."""
    shard, tensors = parameter.shard, checkpoint.manifest.tensors
    if not shard.shape.numel():
        return True
    values = [key for key in keys if key not in SCALES.values()]
    found = [tensors.get(tensor_name(shard.shard_name, key)) for key in values]
    return all(record is not None and record.shape == tuple(shard.shape) for record in found)


def _read_whole_parameters(
    optimizer: OffloadedOptimizer,
    checkpoint: Checkpoint,
    source: Source,
    units: Sequence[UnitState],
    steps: Mapping[str, int],
) -> None:
    """Read the state of units that were saved with other shards. It reads whole parameters."""
    groups = {
        optimizer.session.name_of(parameter): group for group in optimizer.param_groups for parameter in group["params"]
    }
    done: set[str] = set()
    for unit in units:
        parameters = [parameter for parameter in unit.parameters if parameter.shard.name not in done]
        done.update(parameter.shard.name for parameter in parameters)  # other units may have rows of the same parameter
        entries = {}
        for parameter in parameters:
            shard = parameter.shard
            own = (own for own in checkpoint.manifest.tensors if whole_name(own) == shard.name)
            keys = source.saved(next(own, shard.name), _keys(optimizer, parameter.kind))
            shape = {shard.name: shard.whole_shape}
            try:
                values = {key: read_whole(checkpoint, shape, key)[shard.name] for key in keys}
            except ValueError as error:
                raise CheckpointError(f"{checkpoint.folder}: {error}; the checkpoint is of another model") from error
            step = torch.tensor(float(steps[shard.name]), device="cpu")
            entries[shard.name] = ({"step": step, **values}, groups.get(shard.name, {}))
        optimizer.write_states(entries)


def read_whole(
    checkpoint: Checkpoint, shapes: Mapping[str, Sequence[int]], key: str = MASTER
) -> dict[str, torch.Tensor]:
    """Return whole tensors of parameters by value, float32, assembled from the shards that were saved.

    Args:
        checkpoint: has them.
        shapes: shapes of the parameters, by name.
        key: which of their state it is.

    Raises:
        ValueError: shards are missing, or do not match.
        DamagedError: some of them are damaged.
    """
    names = {tensor_name(name, key): name for name in shapes}
    saved = checkpoint.manifest.tensors
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shapes}
    for own, record in saved.items():
        if (found := names.get(whole_name(own))) is not None:
            parts[found][own] = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="cpu")
    checkpoint.read(ReadRequest(own, 0, bytes_of(values)) for held in parts.values() for own, values in held.items())
    whole = {name: torch.empty(tuple(shape), device="cpu") for name, shape in shapes.items()}
    for tensor, name in names.items():
        held = parts.pop(name)
        if key in SCALES.values():
            own_shapes = {own: saved[own.removeprefix(f"{key}.")].shape for own in held}
            held = {own: spread(held[own], math.prod(shape)).view(shape) for own, shape in own_shapes.items()}
        try:
            assemble(tensor, {own: values.float() for own, values in held.items()}, whole[name])
        except RuntimeError as error:  # torch found shapes that do not match
            raise ValueError(str(error)) from error
    return whole


_UNIMPORTANT: Final = frozenset(
    {"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable", ROUNDS}
)
"""Keys of a group that change no result, or that the plan decides."""

_SHOWN: Final = 3


def groups_in_order(
    saved: Sequence[Mapping[str, Any]], saved_names: Sequence[Sequence[str]], names: Sequence[Sequence[str]], place: str
) -> list[int]:
    """Return, for each group of the optimizer, the index of the saved group of the same parameters.

    Args:
        saved: the saved groups.
        saved_names: the names of their parameters.
        names: the names of the parameters of the optimizer's groups.
        place: where the groups were saved, in words.

    Raises:
        CheckpointError: the numbers of groups differ, or a parameter is in another group than it was.
    """
    if len(saved) != len(names):
        raise CheckpointError(
            f"{place} has {len(saved)} parameter group(s), but the optimizer has {len(names)}; make the optimizer with "
            "the groups that were saved"
        )
    # A parameter that only one side has (frozen now, or then) decides nothing.
    common = {name for group in names for name in group} & {name for group in saved_names for name in group}
    was_in = {name: index for index, group in enumerate(saved_names) for name in group}
    order: list[int] = []
    for group in names:
        own = [was_in[name] for name in group if name in common]
        of_most = max(own, key=own.count, default=-1)
        order.append(of_most)
        together = {name for name in saved_names[of_most] if name in common} if own else set()
        if moved := sorted(together ^ {name for name in group if name in common}):
            name = next((name for name in group if name in moved), moved[0])
            now = next(i for i, other in enumerate(names) if name in other)
            raise CheckpointError(
                f"{name} is in group {now} of the optimizer, but was in group {was_in[name]} in {place}, beside "
                f"{_beside(name, saved_names[was_in[name]])}: it is not clear which numbers (learning rate, weight "
                "decay) it is to have; make the optimizer with the groups that were saved, and change them after "
                "resuming"
            )
    left = iter(sorted(set(range(len(saved))) - set(order)))  # of groups without a common parameter, by position
    return [next(left) if index < 0 else index for index in order]


def _beside(name: str, group: Iterable[str]) -> str:
    return ", ".join([other for other in group if other != name][:_SHOWN]) or "no other"


def warn_of_differences(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], order: Sequence[int], place: str
) -> None:
    """Warn once if saved numbers replace others that the optimizer was made with, or groups had another order.

    Args:
        groups: the optimizer's groups, before they get the saved numbers.
        saved: the saved groups.
        order: from :func:`groups_in_order`.
        place: where they were saved, in words.
    """
    different = [
        f"{key} {_shown(then)} instead of {_shown(now)}{f' in group {index}' if len(groups) > 1 else ''}"
        for index, group in enumerate(groups)
        for key, now, then in _differences(group, saved[order[index]])
    ]
    if different:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        warnings.warn(
            f"training goes on with the numbers of {place}, not with those that the optimizer was made with: "
            f"{', '.join(different[:_SHOWN])}{more}; to train on with others, which is another trajectory, set them in "
            "optimizer.param_groups after resuming",
            RuntimeWarning,
            stacklevel=4,
        )
    if list(order) != list(range(len(groups))):
        rounding = "; stochastic rounding draws other numbers then" if any(map(rounds, groups)) else ""
        warnings.warn(
            f"the optimizer's groups are the groups {', '.join(map(str, order))} of {place}: each got the numbers of "
            "its own parameters, but the saved state of an LR scheduler has the old order"
            f"{rounding}; make the optimizer with the order that was saved",
            RuntimeWarning,
            stacklevel=4,
        )


def _differences(group: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """Yield the numbers that differ: key, the group's and the saved one. Those that schedulers change do not count."""
    ignored = _UNIMPORTANT | {"initial_lr"}
    if {"base_momentum", "max_momentum"} & (group.keys() | saved.keys()):
        ignored |= {"momentum", "betas"}
    if "max_lr" in group.keys() ^ saved.keys():  # OneCycleLR makes its own initial rate
        ignored |= {"lr"}
    for key in group.keys() & saved.keys() - ignored:
        now, then = group[key], saved[key]
        if key == "lr":  # a scheduler keeps what the optimizer was made with
            now, then = group.get("initial_lr", now), saved.get("initial_lr", then)
        if _plain(now) != _plain(then):
            yield key, now, then


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else float(value) if isinstance(value, int | float) else value


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

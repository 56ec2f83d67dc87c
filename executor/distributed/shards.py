"""A rank's shards of a model's parameters under tensor and expert parallelism.

[Note: Tensor-parallel shards] The plan's units list the parameter shapes of one rank. If a dimension is smaller than
the model's, it is cut into one block per tensor-parallel rank. Fused parameters (query, key and value of GPT-2, gate
and up of experts) are cut part by part. A vocabulary may be padded. The padding is zero, gets no gradient, and is never
saved. Each expert-parallel rank has a block of the experts, and a unit may have only some experts of that block. In
this case, each unit's rows are an autograd leaf of their own, and the user's parameter has a shape but no values until
the session is closed.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from executor.distributed.adapters import difference
from executor.distributed.mesh import Mesh
from executor.distributed.ranks import Ranks
from executor.packed import StoredParameter, format_refusal
from planner.graph import Pattern, Unit
from planner.models.parameters import ParameterSpec

_OWN_NAME = re.compile(r"(?P<name>.*?)(\[(?P<first>\d+):(?P<stop>\d+)\])?(@(?P<tensor>\d+)/(?P<ranks>\d+))?")
_FUSED = {"attn.c_attn": 3, "mlp.experts.gate_up_proj": 2}  # number of fused parts, by a part of the parameter's path


class BindingError(ValueError):
    """The model does not match the plan."""


def check_outputs(why: str, degree: str, model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse outputs of layers, of which each rank has its own part; a hook before the model.

    Args:
        why: what ranks share, in words.
        degree: with which they share nothing.
        model: the model.
        kwargs: the keywords that it is called with.

    Raises:
        ValueError: some are wanted.
    """
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        wanted = kwargs.get(name)
        if wanted or (wanted is None and getattr(getattr(model, "config", None), name, False)):
            raise ValueError(
                f"{name} is True, but {why}, so each has its own part of what layers return; leave it out, or plan "
                f"with --parallel {degree}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterShard:
    """A rank's shard of one of the model's parameters; see [Note: Tensor-parallel shards].

    Attributes:
        name: name of the whole parameter, in the model.
        whole: the user's parameter.
        whole_shape: shape of the whole parameter.
        leaf: the autograd leaf that the model computes with: the user's parameter, or a leaf for some of its rows.
        shape: shape of the shard.
        rows: the shard's range of experts in the first dimension; ``None``: it has all rows.
        dim: the dimension that is divided over tensor-parallel ranks; ``None`` if none is.
        num_fused: number of fused parts in that dimension. Each part is divided.
        mesh: position of this rank.
        is_absent: whether the parameter has a shape but no values at first.
        stored: the user's parameter, with the tensors that it consists of.
    """

    name: str
    whole: nn.Parameter
    whole_shape: torch.Size
    leaf: nn.Parameter
    shape: torch.Size
    rows: tuple[int, int] | None
    dim: int | None
    num_fused: int
    mesh: Mesh
    is_absent: bool
    stored: StoredParameter

    @property
    def trains(self) -> bool:
        """Whether it is trained."""
        return self.whole.requires_grad

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return self.rows is None and self.dim is None

    def in_model(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the parameter, real numbers in its shape, as they are in the model."""
        return torch.view_as_complex(values) if self.whole.is_complex() else values

    @property
    def shard_name(self) -> str:
        """The parameter's name, with its range of rows and its tensor-parallel rank, as in ``name[0:4]@1/2``."""
        rows = "[{}:{}]".format(*self._rows_of(self.mesh.expert)) if self.rows is not None else ""
        shard = f"@{self.mesh.tensor}/{self.mesh.degrees.tensor_parallel}" if self.dim is not None else ""
        return f"{self.name}{rows}{shard}"

    @property
    def num_unpadded(self) -> int:
        """Length of the divided dimension without padding. The last ranks may have less."""
        assert self.dim is not None
        first = self.mesh.tensor * self.shape[self.dim]
        return min(max(self.whole_shape[self.dim] - first, 0), self.shape[self.dim])

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this shard of a whole parameter's values, ``[whole_shape]``, as a view if possible."""
        whole = values.view(self.whole_shape)
        return self.divided(whole if self.rows is None else whole[slice(*self.own_rows)])

    @property
    def own_rows(self) -> tuple[int, int]:
        """The range of experts whose rows this shard has, if ``rows`` is set."""
        return self._rows_of(self.mesh.expert)

    def on_all_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows of a whole parameter that the shards of all ranks hold, ``[..., *whole_shape[1:]]``."""
        if self.rows is None:
            return values
        rows = (values[slice(*self._rows_of(expert))] for expert in range(self.mesh.degrees.expert_parallel))
        return torch.cat(tuple(rows))

    def on_this_rank(self, on_all_ranks: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard, ``[shape]``, from the result of :meth:`on_all_ranks`."""
        values = on_all_ranks
        if self.rows is not None:
            values = _unflatten(on_all_ranks, 0, self.mesh.degrees.expert_parallel, -1)[self.mesh.expert]
        return self.divided(values)

    def divided(self, values: torch.Tensor) -> torch.Tensor:
        """Return this tensor-parallel rank's part of the shard's rows, as a view if possible."""
        if (dim := self.dim) is None:
            return values
        if self.num_fused > 1:
            fused = _unflatten(values, dim, self.num_fused, self.mesh.degrees.tensor_parallel, -1)
            return fused.select(dim + 1, self.mesh.tensor).flatten(dim, dim + 1)
        first = min(self.mesh.tensor * self.shape[dim], values.shape[dim])
        own = values.narrow(dim, first, self.num_unpadded)
        if missing := self.shape[dim] - self.num_unpadded:
            pads = values.new_zeros(*values.shape[:dim], missing, *values.shape[dim + 1 :])
            own = torch.cat((own, pads), dim)
        return own

    def join(self, shards: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Write the shards of all ranks to ``into``, ``[whole_shape]``.

        Args:
            shards: each ``[shape]``, ordered by expert-parallel rank, then by tensor-parallel rank.
            into: the whole values. Values of other experts stay unchanged.
        """
        degrees = self.mesh.degrees
        num_experts = degrees.expert_parallel if self.rows is not None else 1
        for expert in range(num_experts):
            rows = into if self.rows is None else into[slice(*self._rows_of(expert))]
            if self.dim is None:
                rows.copy_(shards[expert].view(rows.shape))
            else:
                divided = shards[expert * degrees.tensor_parallel :][: degrees.tensor_parallel]
                _join([shard.view(self.shape) for shard in divided], rows, self.dim, self.num_fused)

    def _rows_of(self, expert: int) -> tuple[int, int]:
        """Return the range of experts that an expert-parallel rank holds in this shard."""
        assert self.rows is not None
        before = expert * (self.whole_shape[0] // self.mesh.degrees.expert_parallel)
        return before + self.rows[0], before + self.rows[1]


def shards_of(
    model: nn.Module,
    units: tuple[Unit, ...],
    mesh: Mesh,
    absent: Collection[int] = (),
    as_buffers: Collection[str] = (),
) -> dict[str, ParameterShard]:
    """Return this rank's shards of the model's parameters, by the names that the units use.

    Args:
        model: the whole model.
        units: in forward order.
        mesh: position of this rank.
        absent: ``id`` of each parameter without values.
        as_buffers: names of parameters that are in no unit.

    Raises:
        BindingError: the model's parameters differ from those of the units in name or shape. If an option of ``peft``
            differs, the error names it.
    """
    try:
        return _shards_of(model, units, mesh, absent, as_buffers)
    except BindingError as error:
        planned = {spec.name: spec.shape for unit in units for spec in (*unit.parameters, *unit.frozen)}
        found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if (words := difference(planned, found)) is not None:
            raise BindingError(words) from error
        raise


def _shards_of(
    model: nn.Module,
    units: tuple[Unit, ...],
    mesh: Mesh,
    absent: Collection[int],
    as_buffers: Collection[str],
) -> dict[str, ParameterShard]:
    named = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    shards: dict[str, ParameterShard] = {}
    owned: dict[int, str] = {}
    for operator, spec in ((o, spec) for unit in units for o in unit.operators for spec in o.parameters):
        cut = _OWN_NAME.fullmatch(spec.name)
        assert cut is not None
        name = cut["name"]
        if name not in named:
            raise BindingError(
                f"the plan has a parameter {name}, but the model has none with that name; plan this model again"
            )
        rows = (int(cut["first"]), int(cut["stop"])) if cut["stop"] else None
        is_vocabulary = operator.kind in {"embedding", "head"} and operator.pattern is not Pattern.REPLICATE
        stored = StoredParameter(named[name], modules[name.rpartition(".")[0]])
        _check_stored(name, stored, spec)
        shard = _shard(name, stored, torch.Size(spec.shape), rows, mesh, is_vocabulary=is_vocabulary)
        shards[spec.name] = dataclasses.replace(shard, is_absent=id(named[name]) in absent)
        if (other := owned.setdefault(id(named[name]), name)) != name:
            raise BindingError(
                f"parameters {other} and {name} are one object in the model, but two in the plan; tie them in the "
                "plan's model too, or not in the model"
            )
    if empty := [name for name in as_buffers if id(named[name]) in absent]:
        raise BindingError(
            f"parameter {min(empty)} has no values, and forward writes to it, so it must have them before prepare(); "
            "make the model with values"
        )
    owned |= {id(named[name]): name for name in as_buffers}
    if strange := [name for name, parameter in named.items() if id(parameter) not in owned]:
        raise BindingError(
            f"the model has a parameter {strange[0]}, but the plan has none with that name; plan this model again"
        )
    return shards


def assemble(name: str, parts: Mapping[str, torch.Tensor], whole: torch.Tensor) -> None:
    """Assemble a parameter in ``whole`` from its shards. Keys of ``parts`` are :attr:`ParameterShard.shard_name`.

    Raises:
        ValueError: a shard is missing.
    """
    if not whole.numel():  # a checkpoint need not have it
        return
    if not whole.dim():
        parts, whole = {own: values.view(1) for own, values in parts.items()}, whole.view(1)
    found: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # by rows, then by tensor-parallel rank
    num_ranks = 1
    for own, values in parts.items():
        cut = _OWN_NAME.fullmatch(own)
        assert cut is not None
        rows = int(cut["first"] or 0), int(cut["stop"] or len(whole))
        found.setdefault(rows, {})[int(cut["tensor"] or 0)] = values
        num_ranks = int(cut["ranks"] or 1)
    missing = any(len(shards) < num_ranks for shards in found.values())
    if missing or sum(stop - first for first, stop in found) != len(whole):
        raise ValueError(f"shards of {name} are missing")
    for (first, stop), shards in found.items():
        rows_of_whole, of_ranks = whole[first:stop], [shards[rank] for rank in range(num_ranks)]
        if num_ranks == 1:
            rows_of_whole.copy_(of_ranks[0])
            continue
        sizes = zip(of_ranks[0].shape, rows_of_whole.shape, strict=True)
        dim = next((i for i, (part, all_of_it) in enumerate(sizes) if part != all_of_it), 0)
        _join(of_ranks, rows_of_whole, dim, _num_fused(name))


@functools.cache
def whole_name(shard_name: str) -> str:
    """Return the parameter's name in a :attr:`ParameterShard.shard_name`."""
    cut = _OWN_NAME.fullmatch(shard_name)
    assert cut is not None
    return cut["name"]


def unshard(parts: Sequence[tuple[ParameterShard, torch.Tensor]], ranks: Ranks | None) -> torch.Tensor:
    """Return a parameter's whole values, ``[whole_shape]``. All ranks call this together.

    Args:
        parts: this rank's shards of it, each with its values, ``[shape]``.
        ranks: all ranks; ``None`` if there is only one.

    Returns:
        The given values if they are whole; otherwise new host memory.
    """
    first, values = parts[0]
    if first.is_whole:
        return values
    whole = torch.empty(first.whole_shape, dtype=values.dtype, device="cpu")
    for shard, values in parts:
        on_all_ranks = values.reshape(-1)
        if ranks is not None and shard.dim is not None:
            on_all_ranks = ranks.tensor.all_gather_on_host(on_all_ranks)
        if ranks is not None and shard.rows is not None:
            on_all_ranks = ranks.experts.all_gather_on_host(on_all_ranks)
        shard.join(on_all_ranks.view(-1, shard.shape.numel()).unbind(), whole)
    return whole


def _shard(
    name: str,
    stored: StoredParameter,
    shape: torch.Size,
    rows: tuple[int, int] | None,
    mesh: Mesh,
    *,
    is_vocabulary: bool,
) -> ParameterShard:
    whole = stored.parameter
    there = stored.shape if rows is None else torch.Size((rows[1] - rows[0], *whole.shape[1:]))
    dims = [i for i, (has, planned) in enumerate(zip(there, shape, strict=False)) if has != planned]
    ranks = mesh.degrees.tensor_parallel
    padded = is_vocabulary and ranks > 1
    dim = dims[0] if dims else 0 if padded else None  # a vocabulary that fits into one padded shard is divided too
    missing = 0 if dim is None else ranks * shape[dim] - there[dim]  # padded rows at the end of a vocabulary
    if len(there) != len(shape) or len(dims) > 1 or missing < 0 or (missing and not (padded and dim == 0)):
        of = f" for one of {ranks} ranks" if ranks > 1 else ""
        raise BindingError(
            f"parameter {name} has shape {tuple(there)}, but {tuple(shape)} in the plan{of}; plan this model again"
        )
    leaf = whole if rows is None else nn.Parameter(whole.new_empty(0))
    shard = ParameterShard(name, whole, stored.shape, leaf, shape, rows, dim, _num_fused(name), mesh, False, stored)
    if stored.is_quantized and not shard.is_whole:
        raise BindingError(
            f"parameter {name} is quantized, and cannot be divided over ranks or units; plan with --parallel tensor=1 "
            "--parallel expert=1 --parallel expert-units=1"
        )
    return shard


def _check_stored(name: str, stored: StoredParameter, spec: ParameterSpec) -> None:
    """Check that a parameter has the planned number of bytes.

    Raises:
        BindingError: its number of bytes differs, or its format is not supported.
    """
    if (refusal := format_refusal(name, stored)) is not None:
        raise BindingError(refusal)
    if isinstance(spec.frozen, int) and spec.frozen != stored.num_bytes:
        raise BindingError(
            f"parameter {name} {'is quantized to' if stored.is_quantized else 'is not quantized, and takes'} "
            f"{stored.num_bytes:,} bytes, but the plan has {spec.frozen:,} bytes; quantize it as planned "
            "(BitsAndBytesConfig), or plan with another --quantize"
        )
    if stored.is_quantized and not isinstance(spec.frozen, int):
        raise BindingError(
            f"parameter {name} is quantized, but not in the plan; plan with --quantize, or plan this model again"
        )


def _num_fused(name: str) -> int:
    return next((count for part, count in _FUSED.items() if part in name), 1)


def _join(shards: Sequence[torch.Tensor], into: torch.Tensor, dim: int, num_fused: int) -> None:
    fused = [_unflatten(shard, dim, num_fused, -1) for shard in shards]
    into.copy_(torch.stack(fused, dim + 1).flatten(dim, dim + 2).narrow(dim, 0, into.shape[dim]))


def _unflatten(values: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    return values.reshape(*values.shape[:dim], *sizes, *values.shape[dim + 1 :])

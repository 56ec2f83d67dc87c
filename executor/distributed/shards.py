"""A rank's shares of a model's parameters under tensor and expert parallelism.

[Note: Shares] The plan's units hold one rank's share of the model, and so say how every parameter is divided. The
dimension in which the share is smaller than the whole is cut into one block per tensor-parallel rank. Joint parameters
(query, key and value of GPT-2, gate and up of experts) are cut part by part. A vocabulary may be padded: the padding is
zero, gets no gradient, and is never saved. Each expert-parallel rank has a block of the experts, and a unit may have
some of these. One parameter cannot lie in several units, so these rows are leaves of their own. The user's own
parameter then has a shape but no values until the session is closed.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from executor.distributed.mesh import Mesh
from executor.distributed.ranks import Ranks
from planner.graph import Pattern, Unit

_OWN_NAME = re.compile(r"(?P<name>.*?)(\[(?P<first>\d+):(?P<stop>\d+)\])?(@(?P<tensor>\d+)/(?P<ranks>\d+))?")
_JOINT = {"attn.c_attn": 3, "mlp.experts.gate_up_proj": 2}  # by the end of a parameter's path: parts in one


class BindingError(ValueError):
    """The model does not match the plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of one of the model's parameters; see [Note: Shares].

    Attributes:
        name: of the whole parameter, in the model.
        whole: the user's own parameter.
        whole_shape: its shape.
        leaf: the autograd leaf that the model computes with: the user's own parameter, or one for some of its rows.
        shape: of the share.
        rows: its range in the first dimension, if it is some experts; ``None`` for all.
        dim, num_joint: dimension that is divided over tensor-parallel ranks, and its number of joint parts; ``dim`` is
            ``None`` if each rank has all.
        mesh: position of this rank.
    """

    name: str
    whole: nn.Parameter
    whole_shape: torch.Size
    leaf: nn.Parameter
    shape: torch.Size
    rows: tuple[int, int] | None
    dim: int | None
    num_joint: int
    mesh: Mesh

    @property
    def trains(self) -> bool:
        """Whether it is trained."""
        return self.whole.requires_grad

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.rows is None and self.dim is None

    @property
    def own_name(self) -> str:
        """The parameter's name, with the range of rows and the tensor-parallel share, if it is not all."""
        rows = "[{}:{}]".format(*self._rows_of(self.mesh.expert)) if self.rows is not None else ""
        share = f"@{self.mesh.tensor}/{self.mesh.degrees.tensor_parallel}" if self.dim is not None else ""
        return f"{self.name}{rows}{share}"

    @property
    def num_divided(self) -> int:
        """Length of the divided dimension without padding; equal on all ranks but the last ones."""
        assert self.dim is not None
        first = self.mesh.tensor * self.shape[self.dim]
        return min(max(self.whole_shape[self.dim] - first, 0), self.shape[self.dim])

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this share of a whole parameter's values, ``[whole_shape]``; a view if possible."""
        return self.own_part(self.of_all(values.view(self.whole_shape)))

    def of_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of this share on all ranks, ``[..., *whole_shape[1:]]``, from the whole parameter's."""
        if self.rows is None:
            return values
        rows = (values[slice(*self._rows_of(expert))] for expert in range(self.mesh.degrees.expert_parallel))
        return torch.cat(tuple(rows))

    def own_part(self, of_all: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, ``[shape]``, of the values that :meth:`of_all` returned."""
        values = of_all
        if self.rows is not None:
            values = _unflatten(of_all, 0, self.mesh.degrees.expert_parallel, -1)[self.mesh.expert]
        if (dim := self.dim) is None:
            return values
        ranks = self.mesh.degrees.tensor_parallel
        if missing := ranks * self.shape[dim] - values.shape[dim]:
            pads = values.new_zeros(*values.shape[:dim], missing, *values.shape[dim + 1 :])
            values = torch.cat((values, pads), dim)
        joint = _unflatten(values, dim, self.num_joint, ranks, -1)
        return joint.select(dim + 1, self.mesh.tensor).flatten(dim, dim + 1)

    def join(self, shares: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Write the shares of all ranks to ``into``, ``[whole_shape]``.

        Args:
            shares: ``[shape]`` of every expert-parallel rank, and within these of every tensor-parallel one.
            into: whole values; those of other experts are left unchanged.
        """
        degrees = self.mesh.degrees
        num_experts = degrees.expert_parallel if self.rows is not None else 1
        for expert in range(num_experts):
            rows = into if self.rows is None else into[slice(*self._rows_of(expert))]
            if self.dim is None:
                rows.copy_(shares[expert].view(rows.shape))
            else:
                divided = shares[expert * degrees.tensor_parallel :][: degrees.tensor_parallel]
                _join([share.view(self.shape) for share in divided], rows, self.dim, self.num_joint)

    def _rows_of(self, expert: int) -> tuple[int, int]:
        """Return the range of experts that an expert-parallel rank has of this share."""
        assert self.rows is not None
        before = expert * (self.whole_shape[0] // self.mesh.degrees.expert_parallel)
        return before + self.rows[0], before + self.rows[1]


def shares_of(model: nn.Module, units: tuple[Unit, ...], mesh: Mesh) -> dict[str, Share]:
    """Return this rank's shares of the model's parameters, by the names that the units use.

    Raises:
        BindingError: the model has other parameters than the units, or of other shapes.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    shares: dict[str, Share] = {}
    owned: dict[int, str] = {}
    for operator, spec in ((o, spec) for unit in units for o in unit.operators for spec in o.parameters):
        cut = _OWN_NAME.fullmatch(spec.name)
        assert cut is not None
        name = cut["name"]
        if name not in named:
            raise BindingError(f"the plan has a parameter {name} that the model has not; plan this model again")
        rows = (int(cut["first"]), int(cut["stop"])) if cut["stop"] else None
        is_vocabulary = operator.kind in {"embedding", "head"} and operator.pattern is not Pattern.REPLICATE
        shares[spec.name] = _share(name, named[name], torch.Size(spec.shape), rows, mesh, is_vocabulary=is_vocabulary)
        if (other := owned.setdefault(id(named[name]), name)) != name:
            raise BindingError(
                f"parameters {other} and {name} are one object in the model, but two in the plan; tie them in the "
                "plan's model too, or not in the model"
            )
    if strange := [name for name, parameter in named.items() if id(parameter) not in owned]:
        raise BindingError(f"the model has a parameter {strange[0]} that the plan has not; plan this model again")
    return shares


def assemble(name: str, parts: Mapping[str, torch.Tensor], whole: torch.Tensor) -> None:
    """Assemble a parameter in ``whole`` from shares, given by their own names.

    Raises:
        ValueError: a share is missing.
    """
    found: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # by rows, then by tensor-parallel rank
    num_ranks = 1
    for own, values in parts.items():
        cut = _OWN_NAME.fullmatch(own)
        assert cut is not None
        rows = int(cut["first"] or 0), int(cut["stop"] or len(whole))
        found.setdefault(rows, {})[int(cut["tensor"] or 0)] = values
        num_ranks = int(cut["ranks"] or 1)
    missing = any(len(shares) < num_ranks for shares in found.values())
    if missing or sum(stop - first for first, stop in found) != len(whole):
        raise ValueError(f"shares of {name} are missing")
    for (first, stop), shares in found.items():
        rows_of_whole, of_ranks = whole[first:stop], [shares[rank] for rank in range(num_ranks)]
        if num_ranks == 1:
            rows_of_whole.copy_(of_ranks[0])
            continue
        sizes = zip(of_ranks[0].shape, rows_of_whole.shape, strict=True)
        dim = next((i for i, (part, all_of_it) in enumerate(sizes) if part != all_of_it), 0)
        _join(of_ranks, rows_of_whole, dim, _num_joint(name))


def whole_name(own_name: str) -> str:
    """Return the parameter's name, from a share's own name."""
    cut = _OWN_NAME.fullmatch(own_name)
    assert cut is not None
    return cut["name"]


def unshard(parts: Sequence[tuple[Share, torch.Tensor]], ranks: Ranks | None) -> torch.Tensor:
    """Return a parameter's whole values, ``[whole_shape]``; all ranks call this together.

    Args:
        parts: this rank's shares of it, each with its values, ``[shape]``.
        ranks: all ranks; ``None`` with one.

    Returns:
        The given values if they are whole, else new host memory.
    """
    first, values = parts[0]
    if first.is_whole:
        return values
    whole = torch.empty(first.whole_shape, dtype=values.dtype)
    for share, values in parts:
        of_all = values.reshape(-1)
        if ranks is not None and share.dim is not None:
            of_all = ranks.tensor.all_gather_on_host(of_all)
        if ranks is not None and share.rows is not None:
            of_all = ranks.experts.all_gather_on_host(of_all)
        share.join(of_all.view(-1, share.shape.numel()).unbind(), whole)
    return whole


def _share(
    name: str, whole: nn.Parameter, shape: torch.Size, rows: tuple[int, int] | None, mesh: Mesh, *, is_vocabulary: bool
) -> Share:
    there = whole.shape if rows is None else torch.Size((rows[1] - rows[0], *whole.shape[1:]))
    dims = [i for i, (has, planned) in enumerate(zip(there, shape, strict=False)) if has != planned]
    ranks = mesh.degrees.tensor_parallel
    padded = is_vocabulary and ranks > 1
    dim = dims[0] if dims else 0 if padded else None  # a vocabulary as long as one padded share is divided too
    missing = 0 if dim is None else ranks * shape[dim] - there[dim]  # only of a vocabulary, the last rows
    if len(there) != len(shape) or len(dims) > 1 or missing < 0 or (missing and not (padded and dim == 0)):
        of = f" for one of {ranks} ranks" if ranks > 1 else ""
        raise BindingError(
            f"parameter {name} has shape {tuple(there)}, but {tuple(shape)} in the plan{of}; plan this model again"
        )
    leaf = whole if rows is None else nn.Parameter(whole.new_empty(0))
    return Share(name, whole, whole.shape, leaf, shape, rows, dim, _num_joint(name), mesh)


def _num_joint(name: str) -> int:
    return next((count for part, count in _JOINT.items() if part in name), 1)


def _join(shares: Sequence[torch.Tensor], into: torch.Tensor, dim: int, num_joint: int) -> None:
    joint = [_unflatten(share, dim, num_joint, -1) for share in shares]
    into.copy_(torch.stack(joint, dim + 1).flatten(dim, dim + 2).narrow(dim, 0, into.shape[dim]))


def _unflatten(values: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    return values.reshape(*values.shape[:dim], *sizes, *values.shape[dim + 1 :])

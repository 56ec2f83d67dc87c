"""Hidden states of sequences whose tokens ranks share."""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor

from executor.distributed.collectives import copy_to_group, gather_rows, reduce_from_group
from executor.distributed.groups import Group
from executor.distributed.lazy_rows import CHOOSING, LazyRows

RowByRow = Callable[[Tensor, Tensor], Tensor]
"""Maps hidden states ``[rows, width]`` and targets ``[rows]`` to a number for each row, or to one."""


@final
class SharedHidden(LazyRows):
    """Hidden states ``[batch, tokens, width]``, of which each rank has those of its own tokens.

    A loss that is computed row by row stays with the ranks. Whoever uses the values gets all ranks' (an all-gather, so
    all ranks must use them).
    """

    _group: Group
    _own: Tensor
    _numbers: Tensor
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, group: Group, own: Tensor, numbers: Tensor) -> "SharedHidden":
        """Make the tensor of the rows of these numbers, ``[..., 1]``, from each rank's ``own``, ``[rows, width]``.

        Rows are numbered rank after rank of the group. The numbers are on the host.
        """
        shape = (*numbers.shape[:-1], own.shape[-1])
        trains = own.requires_grad and torch.is_grad_enabled()
        self: SharedHidden = Tensor._make_wrapper_subclass(
            cls, shape, dtype=own.dtype, device=own.device, requires_grad=trains
        )
        self._group, self._own, self._numbers, self._whole = group, own, numbers, None
        if trains:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse)  # type: ignore[no-untyped-call]
        return self

    def __init__(self, *_: object) -> None:
        """Do nothing: :meth:`__new__` has initialised it."""

    @classmethod
    def at(cls, own: Tensor, group: Group, parts: Iterable[tuple[int, int]]) -> "SharedHidden":
        """Return the hidden states of whole sequences.

        Args:
            own: ``[batch, own tokens, width]``, those of this rank's tokens. Behind the last ones may be padding.
            group: the ranks.
            parts: the first token, and the number, of each rank's parts, rank after rank.
        """
        batch, num_own, _ = own.shape
        numbers = torch.arange(group.size * batch * num_own, device="cpu").view(group.size, batch, num_own)
        numbers = numbers.transpose(0, 1).reshape(batch, -1)
        tokens = torch.cat([torch.arange(first, first + count, device="cpu") for first, count in parts])
        numbers = numbers[:, : len(tokens)][:, tokens.argsort()]
        return cls(group, own.flatten(0, 1), numbers.unsqueeze(-1))

    @property
    def stand_in(self) -> Tensor:
        """The numbers of its rows."""
        return self._numbers

    def of(self, stand_in: Tensor) -> "SharedHidden":
        """Return the rows of other numbers."""
        return SharedHidden(self._group, self._own, stand_in)

    @property
    def is_computed(self) -> bool:
        """Whether all ranks' are kept."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """Gather the rows of all ranks, and keep them, with their gradients: who looks first may want none."""
        if self._whole is None:
            with torch.set_grad_enabled(self._own.requires_grad):
                rows = _taken(gather_rows(self._own, self._group), self._numbers.flatten())
                self._whole = rows.view(self.shape)
        return self._whole

    def row_by_row(self, compute: RowByRow, targets: Tensor) -> Tensor:
        """Return ``compute(hidden states, targets)``, ``[rows]``; each rank computes those of its own tokens."""
        numbers, num_own = self._numbers.flatten(), len(self._own)
        made, at = self._of_own(compute, targets)
        by_rank = numbers[(numbers // max(num_own, 1)).argsort(stable=True)]
        if len(by_rank) == self._group.size * num_own and _is_range(by_rank):  # each rank's rows, in order: as planned
            return _taken(gather_rows(made, self._group), numbers)
        at_all = made.new_zeros(len(numbers)).index_put((at.to(made.device),), made)
        return copy_to_group(reduce_from_group(at_all, self._group), self._group)

    def summed(self, compute: RowByRow, targets: Tensor) -> Tensor:
        """Return the sum over ranks of ``compute(hidden states, targets)``, a number, of each one's own tokens."""
        made, _ = self._of_own(compute, targets)
        return copy_to_group(reduce_from_group(made, self._group), self._group)

    def _of_own(self, compute: RowByRow, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is computed of this rank's own tokens, and their positions among the rows."""
        own = self._numbers.flatten() - self._group.rank * len(self._own)
        at = ((own >= 0) & (own < len(self._own))).nonzero().flatten()
        return compute(_taken(self._own, own[at]), _taken(targets, at)), at

    def with_own(self, change: Callable[[Tensor], Tensor]) -> "SharedHidden":
        """Return the hidden states after a change of each rank's own."""
        return SharedHidden(self._group, change(self._own), self._numbers)


def _refuse(_gradient: Tensor) -> None:
    """Refuse gradients that do not come through the values, as those of a ``torch.autograd.Function`` of the user's."""
    raise RuntimeError(
        "a torch.autograd.Function was given hidden states of sequences that ranks share, and would not pass gradients "
        "on; give it their values (hidden * 1), or plan with --parallel context=1"
    )


def _is_range(numbers: Tensor) -> bool:
    return bool((numbers.diff() == 1).all())


def _taken(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return some rows: a view where their numbers, which are on the host, follow one another."""
    if _is_range(numbers):
        return rows.narrow(0, int(numbers[0]) if len(numbers) else 0, len(numbers))
    return rows[numbers.to(rows.device)]


def _detach(hidden: SharedHidden, *_args: Any) -> SharedHidden:
    return hidden.with_own(Tensor.detach)


def _new_empty(hidden: SharedHidden, _func: object, _self: object, *args: Any, **kwargs: Any) -> Tensor:
    return hidden._own.new_empty(*args, **kwargs)


def _copy_to_group(hidden: SharedHidden, _func: object, _self: object, group: Group) -> SharedHidden:
    return hidden.with_own(lambda own: copy_to_group(own, group))


SharedHidden.handlers = CHOOSING | {"detach": _detach, "new_empty": _new_empty, "copy_to_group": _copy_to_group}

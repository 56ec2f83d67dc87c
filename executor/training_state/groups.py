"""Gives the numbers of saved parameter groups (learning rates, weight decay, ...) to groups of the same parameters."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from executor.checkpoint.files.system_calls import CheckpointError
from executor.optimizer.reference import ROUNDS, rounds

_UNIMPORTANT: Final = frozenset(
    {"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable", ROUNDS}
)
"""Keys of a group that change no result, or that the plan decides."""

_SHOWN: Final = 3


def groups_in_order(
    saved: Sequence[Mapping[str, Any]],
    saved_names: Sequence[Sequence[str]] | None,
    names: Sequence[Sequence[str]],
    place: str,
) -> list[int]:
    """Return, for each group of the optimizer, the index of the saved group of the same parameters.

    Args:
        saved: the saved groups.
        saved_names: the names of their parameters; ``None`` in checkpoints of earlier versions, which do not have them:
            then groups correspond by position.
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
    if saved_names is None:
        return list(range(len(names)))
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

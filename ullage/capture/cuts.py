"""What crosses the cuts of a captured model between any two of its layers, in bytes.

The executor finds what crosses the cuts of a pipeline's stages when they get their first batch
(:mod:`executor.module.cuts`). A plan finds it in the same way, with a cut before each layer: stages send what is
planned. It follows forward once more, which takes about as long as a capture. So only plans with stages ask for it.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from executor.distributed.shards import BindingError
from executor.driver.pipeline import own_loss
from executor.module.cuts import cuts_of, without_values
from executor.module.stages import part_of
from planner.graph import build_graph, segments, units
from planner.lowering.stages import deal
from planner.models.captured import CapturedModel
from ullage.capture.fakes import fake_operators
from ullage.capture.records import DTYPES

_MOST_KERNELS: Final = 100_000
"""In forward: that of a loop over tokens takes minutes to follow."""


def with_cuts(
    captured: CapturedModel, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CapturedModel:
    """Return a captured model with the bytes that cross the cut before each of its layers.

    Where a model cannot be cut, it has the reason. A loop with a loss of its own may need less than all that the model
    returns, and then it may be possible: such a pipeline is refused before its first step, if it must be.

    Args:
        captured: the model without them.
        model: what was captured; it does not change.
        args: positional arguments of a call. Tensors on the meta device have values that nobody knows.
        kwargs: its other arguments.
    """
    captured = captured.model_copy(update={"is_cut": True})
    found = units(build_graph(captured, captured.batch))
    count = sum(part[0].in_layer for part in segments(found))
    num_kernels = sum(len(operator.forward) for operator in captured.operators())
    if count < 2 or captured.calls is not None or num_kernels > _MOST_KERNELS:
        return captured
    chunks, losses = deal(found, count), list[Tensor]()

    def needed(output: Any, batch: Mapping[str, Any]) -> Any:
        try:
            losses.append(own_loss(output, batch))
        except ValueError:
            return output
        return losses[-1]

    try:
        batch = {**_named(model, args), **kwargs}
        parts = [part_of(chunk, model) for chunk in chunks]
        cuts = cuts_of(_planned(model, DTYPES[captured.dtype]), parts, batch, fake_operators, needed)
    except BindingError:
        return captured
    given, uncut = dict[str, int](), dict[str, str]()
    for number, (chunk, crossing) in enumerate(zip(chunks, cuts.crossing, strict=True)):
        num_bytes = sum(each.like.nbytes for each in crossing if each.like is not None)
        if number and number not in cuts.refusals and num_bytes != (first := chunk[0][0]).given_bytes:
            given[first.segment] = num_bytes
        if losses and number in cuts.refusals:
            uncut[chunk[0][0].segment] = cuts.refusals[number]
    cut = (
        each.model_copy(update={"given_bytes": given.get(each.path), "uncut": uncut.get(each.path)})
        for each in captured.segments
    )
    return captured.model_copy(update={"segments": tuple(cut)})


def _named(model: nn.Module, args: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments by their names, as stages are given a batch.

    Raises:
        BindingError: some have no names.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise BindingError(f"forward has names for {len(names)} of {len(args)} inputs; give names to all of them")
    return dict(zip(names, args, strict=False))


def _planned(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy without values, whose weights have the planned type."""
    twin = without_values(model)
    for own, each in zip(model.parameters(), twin.parameters(), strict=True):
        if own.requires_grad and own.is_floating_point():
            each.data = each.data.to(dtype)
    return twin

"""A second pass is given what the first one was given, or is refused."""

import pytest
import torch

from executor.memory.forward_state import SMALL_BYTES, ForwardState
from executor.memory.recompute_cache import ActivationError
from executor.module.kept_inputs import KeptInputs, with_copies


def test_small_inputs_are_given_again_as_they_were_and_large_ones_must_not_change():
    state = ForwardState(torch.nn.Identity(), "it")
    small, large = torch.zeros(2), torch.zeros(SMALL_BYTES)
    args = small, [small, large]
    before = [state.save(args) for _ in range(2)]
    assert before[0].copies[id(small)] is before[1].copies[id(small)], "blocks share a copy"
    args, _ = with_copies(args, {}, (), before[0].copies)
    inputs = KeptInputs(args, {}, before[0].copies.values(), ())
    for _ in range(3):  # with retain_graph, there may be several
        small.add_(1)
        (first, (other, same)), _ = inputs.given_again(args, {}, "it")
        assert first is other
        assert same is large
        assert first.eq(0).all()
        first.add_(1)
    assert state.save([small]).copies[id(small)].eq(3).all()
    large.add_(1)
    with pytest.raises(ActivationError, match="an input of it was changed in place"):
        inputs.given_again(args, {}, "it")

"""A second pass begins with what the first one began with, or is refused."""

import contextvars

import pytest
import torch

from executor.memory.forward_state import SMALL_BYTES, ForwardState
from executor.memory.recompute_cache import ActivationError
from executor.module.kept_inputs import giving_again, with_copies


def test_small_inputs_are_given_again_as_they_were_and_large_ones_must_not_change():
    state = ForwardState(torch.nn.Identity(), "it")
    small, large = torch.zeros(2), torch.zeros(SMALL_BYTES)
    args = small, [small, large]
    before = [state.save(args) for _ in range(2)]
    assert before[0].copies[id(small)] is before[1].copies[id(small)], "blocks share a copy"
    args, _ = with_copies(args, {}, (), before[0].copies)
    given_again = giving_again("it", args, {}, before[0].copies.values(), ())
    for _ in range(3):  # with retain_graph, there may be several
        small.add_(1)
        (first, (other, same)), _ = given_again(args, {})
        assert first is other
        assert same is large
        assert first.eq(0).all()
        first.add_(1)
    assert state.save([small]).copies[id(small)].eq(3).all()
    large.add_(1)
    with pytest.raises(ActivationError, match="an input of it was changed in place"):
        given_again(args, {})


def test_a_large_buffer_that_the_loop_changes_before_the_second_pass_is_refused_there():
    module = torch.nn.Module()
    module.register_buffer("table", torch.zeros(SMALL_BYTES))
    state = ForwardState(module, "it")
    for _ in range(2):  # what the first forward does not change is not copied, then and later
        before = state.save()
        state.check(before)
        with state.restored(before):
            pass
    module.table.add_(1)
    with pytest.raises(ActivationError, match="table of it was changed in place between"), state.restored(before):
        pass


@pytest.mark.parametrize("later", ["reset", "other"])
def test_the_second_pass_finds_context_variables_as_they_were_around_the_first(later):
    scale = contextvars.ContextVar("scale", default=1)
    state = ForwardState(torch.nn.Identity(), "it")
    token = scale.set(2)
    before = state.save()
    if later == "reset":
        scale.reset(token)
    else:
        scale.set(3)
    since = scale.get()
    with state.restored(before):
        assert scale.get() == 2
    assert scale.get() == since

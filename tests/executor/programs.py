"""Programs that leave the order of a plan: what happens in which order in each step of a loop."""

import contextlib

import torch
from hypothesis import strategies as st

from executor.callbacks import replace_attribute

FORWARDS = ["whole", "without a block", "without the head", "evaluating", "no gradients"]


@st.composite
def programs(draw):
    """Any three steps: of each, what happens in which order."""
    event = st.one_of(
        st.tuples(st.just("forward"), st.sampled_from(FORWARDS)),
        st.tuples(st.just("backward"), st.sampled_from(["sum", "one by one", "the latest"])),
        st.tuples(st.sampled_from(["zero_grad", "give up"]), st.just("")),
    )
    return [draw(st.lists(event, max_size=6)) for _ in range(3)]


def blocks(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def forward(model, tokens, how):
    """Return a loss, in one of the ways that a loop may go forward."""
    base = getattr(model, "transformer", None) or model.model
    if how == "without the head":
        return base(input_ids=tokens).last_hidden_state.float().square().mean()
    with contextlib.ExitStack() as stack:
        if how == "without a block":
            skipped = replace_attribute(blocks(model)[1], "forward", lambda hidden, *_args, **_kwargs: hidden)
            stack.callback(skipped)
        if how == "evaluating":
            model.eval()
            stack.callback(model.train)
        if how == "no gradients":
            stack.enter_context(torch.no_grad())
        return model(input_ids=tokens, labels=tokens).loss


def run(program, model, optimizer, tokens, max_norm, average=lambda: None):
    """Run a loop; return what it sees. Before gradients are read, ranks ``average`` them."""
    torch.manual_seed(11)
    seen, tokens = [], iter(tokens.flatten(0, 1).repeat(20, 1, 1))
    for events in program:
        pending = []
        for what, how in [*events, ("forward", "whole"), ("backward", "the latest")]:
            if what == "forward":
                loss = forward(model, next(tokens), how)
                seen.append(loss.item())
                pending += [loss] if loss.requires_grad else []
            elif what == "give up" and max_norm is not None and any(p.grad is not None for p in model.parameters()):
                average()
                seen.append(float(optimizer.clip_grad_norm_(max_norm)))  # as if it were not finite
                optimizer.zero_grad()
            elif what in {"zero_grad", "give up"}:
                optimizer.zero_grad()
            elif pending and how == "sum":
                sum(pending).backward()
                pending.clear()
            else:
                for loss in pending[::-1] if how == "one by one" else pending[-1:]:
                    loss.backward()
                    pending.remove(loss)
        average()
        if max_norm is not None:
            seen.append(float(optimizer.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return seen

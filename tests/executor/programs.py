"""Programs that leave the order of a plan: what happens in which order in each step of a loop."""

import contextlib
import functools

import torch
from hypothesis import strategies as st

from executor.callbacks import in_backward, replace_attribute

FORWARDS = ["whole", "without a block", "without the head", "evaluating", "no gradients", "late"]


@st.composite
def programs(draw):
    """Any three steps: of each, what happens in which order."""
    event = st.one_of(
        st.tuples(st.just("forward"), st.sampled_from(FORWARDS)),
        st.tuples(st.just("backward"), st.sampled_from(["sum", "one by one", "the latest", "twice"])),
        st.tuples(st.sampled_from(["zero_grad", "give up"]), st.just("")),
    )
    return [draw(st.lists(event, max_size=6)) for _ in range(3)]


def blocks(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def forward(model, tokens, how, kept=None):
    """Return a loss, in one of the ways that a loop may go forward.

    A late one has a value that was ``kept``, not detached, at the forward before: a gradient comes last in backward.
    """
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
        late = kept[-1] if kept and how == "late" else 0.0
        if kept is not None:
            layer = next(blocks(model)[-1].mlp.children())
            stack.callback(layer.register_forward_hook(functools.partial(_keep, kept)).remove)
        return model(input_ids=tokens, labels=tokens).loss + late


def _keep(kept, module, _args, _output):
    if torch.is_grad_enabled() and not in_backward():
        kept.append(module.weight.float().sum() * 1e-2)


def run(program, model, optimizer, tokens, max_norm, average=lambda: None):
    """Run a loop; return what it sees. Before gradients are read, ranks ``average`` them."""
    torch.manual_seed(11)
    kept = []
    seen, tokens = [], iter(tokens.flatten(0, 1).repeat(20, 1, 1))
    for events in program:
        pending = []
        for what, how in [*events, ("forward", "whole"), ("backward", "the latest")]:
            if what == "forward":
                loss = forward(model, next(tokens), how, kept)
                seen.append(loss.item())
                pending += [loss] if loss.requires_grad else []
            elif what == "give up" and max_norm is not None and any(p.grad is not None for p in model.parameters()):
                average()
                seen.append(float(optimizer.clip_grad_norm_(max_norm)))  # as if it were not finite
                optimizer.zero_grad()
            elif what in {"zero_grad", "give up"}:
                optimizer.zero_grad()
            elif pending and how == "twice":
                pending[-1].backward(retain_graph=True)
                (0.5 * pending.pop()).backward()
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

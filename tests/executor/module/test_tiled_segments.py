"""Tiles of sequences that pass a layer one after another: the bits of the same in memory, under any plan."""

import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plans
from training import ReferenceOptimizer, assert_same, make_model, make_optimizer, planned, train, weights
from transformers.modeling_layers import GradientCheckpointingLayer

from executor.callbacks import replace_attribute

TILES = {"segment_tile_sequences": 1}  # of a micro-batch of 2


def one_by_one(model):
    """Let each sequence pass a layer by itself."""
    for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
        replace_attribute(layer, "forward", _each(layer.forward))


def _each(run):
    def forward(hidden, *args, **kwargs):
        found = [run(row, *args, **kwargs) for row in hidden.split(1)]
        return torch.cat(found) if torch.is_tensor(found[0]) else (torch.cat([row for row, *_ in found]),)

    return forward


def in_memory(task):
    """Return what training in memory gives, with layers that sequences pass one by one."""
    model = make_model(task)
    one_by_one(model)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    return train(task, model, optimizer), weights(model)


@settings(max_examples=examples(30), deadline=None)
@given(
    plans(families=["gpt2", "llama", "mixtral", "opt"], degrees=TILES, optimizers=["adamw", "adamw-8bit", "lion"]),
    st.integers(0, 99),
)
def test_any_plan_gives_the_bits_of_tiles_in_memory(plan, seed):
    task, decisions = plan
    assert_same(planned(task, decisions, delays=seed), in_memory(task))

"""Batches of other shapes than planned: shorter sequences, fewer samples, padding, or more than planned."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from plans import plans
from rank_programs import measured, trained
from rank_references import reference as reference_of_ranks
from ranks import assert_same_bits
from training import (
    CONFIGS,
    MICRO_BATCH,
    SEQ_LEN,
    ReferenceOptimizer,
    Task,
    assert_same,
    decide,
    make_model,
    make_optimizer,
    planned,
    prepare,
    reference,
    train,
    uniform,
    weights,
)

SHAPES = st.lists(st.tuples(st.integers(1, MICRO_BATCH), st.integers(2, SEQ_LEN)), min_size=1, max_size=5).map(tuple)
FAMILIES = ("gpt2", "llama", "qwen3", "opt", "mixtral")


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(plans(families=FAMILIES), SHAPES, st.integers(0, 99))
def test_smaller_batches_train_as_in_memory_under_any_plan(plan, shapes, seed):
    """Every micro-batch of a step may have a shape of its own."""
    task, decisions = plan
    task = dataclasses.replace(task, shapes=shapes)
    assert_same(planned(task, decisions, delays=seed), reference(task))


WAYS = {
    "kept": uniform("gpu", "gpu"),
    "recomputed, fetched": uniform("host", "stream", "recompute"),
    "offloaded": uniform("host", "cpu", "offload"),
    "on NVMe": uniform("nvme", "nvme", "offload-nvme"),
}


def padded(task, shape, iteration):
    """Return a batch in which each sample has fewer tokens than the one before; padding is on the right."""
    generator = torch.Generator().manual_seed(iteration)
    ids = torch.randint(CONFIGS[task.family]().vocab_size, shape, generator=generator)
    lengths = torch.arange(shape[1], shape[1] - shape[0], -1).clamp(min=2)
    mask = (torch.arange(shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train_on(task, shapes, model, optimizer):
    torch.manual_seed(11)
    seen = []
    for iteration, shape in enumerate(shapes):
        loss = model(**padded(task, shape, iteration)).loss
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(task.max_norm))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.part(2)
@pytest.mark.filterwarnings("ignore:input_ids is:RuntimeWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("choose", WAYS.values(), ids=WAYS)
def test_padded_and_larger_batches_train_as_in_memory(family, choose):
    """Larger ones too, in samples or in length: what the plan has no room for is recomputed."""
    task = Task(family)
    shapes = [(2, 8), (2, 5), (1, 8), (3, 7), (2, 16), (5, 16), (1, 1 + SEQ_LEN)]
    model = make_model(task)
    expected = train_on(task, shapes, model, ReferenceOptimizer(make_optimizer(task, model))), weights(model)
    model, optimizer = prepare(task, decide(task, choose))
    with optimizer.session as session:
        seen = train_on(task, shapes, model, optimizer)
        assert_same((seen, {n: w.clone() for n, w in session.full_parameters().items()}), expected)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_ranks_may_have_batches_of_other_shapes_than_each_other(processes, zero_stage):
    task = Task("gpt2", torch.float32, 2, shapes=((2, 5), (1, 8), (2, 8)))
    decisions = decide(task, uniform("gpu", "cpu", "recompute"), data_parallel=2, zero_stage=zero_stage)
    assert_same_bits(processes.call(2, trained, task, decisions), reference_of_ranks(task, 2, decisions))


def test_times_of_ranks_are_of_iterations_that_all_had_as_planned(processes):
    task = Task("small", torch.float32, iterations=6, shapes=((2, 8), (2, 8), (2, 5)))
    decisions = decide(task, uniform("gpu", "cpu"), data_parallel=2)
    assert processes.call(2, measured, task, decisions) == [(4, 2), (4, 2)]


def test_times_of_other_shapes_are_left_out():
    """Only the second and the last iteration are as planned in all their micro-batches."""
    shapes = [(2, 8), (2, 7), (2, 8), (2, 8), (1, 8), (1, 8), (2, 8), (2, 2), (2, 8), (2, 8)]
    task = Task("small", torch.float32, 2, iterations=5, shapes=tuple(shapes))
    model, optimizer = prepare(
        task, decide(task, uniform("host", "cpu")), record=True, batch=(("input_ids", (MICRO_BATCH, SEQ_LEN)),)
    )
    whole = []
    with optimizer.session as session, warnings.catch_warnings():
        warnings.simplefilter("error")  # none is larger
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 3, dtype=torch.long))  # an evaluation may have any shape
        model.train()
        train(task, model, optimizer, after_step=lambda _: whole.append(session.driver.last_was_whole))
        timeline = session.timeline()
    assert whole == [False, True, False, False, True]
    assert timeline.num_iterations == 2
    assert not np.isnan(timeline.start_s).any()

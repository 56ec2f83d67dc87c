"""A master copy in bf16, which is the weight: rounded without bias, and with the same bits everywhere."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed
from rank_programs import trained
from rank_references import reference as reference_of_ranks
from rank_references import trained_in_memory
from ranks import assert_same_bits
from test_narrow_adamw import Traffic
from training import (
    OPTIMIZERS,
    Task,
    decide,
    make_model,
    make_optimizer,
    planned,
    prepare,
    stock,
    train,
    uniform,
)

from executor.checks import check_decisions
from executor.devices.backend import as_array
from executor.devices.cuda import update_on_device
from executor.devices.meter import MemoryMeter
from executor.memory.pieces import state_buffers
from executor.optimizer.adamw import adamw_step
from executor.optimizer.passes import BLOCK, cut
from executor.optimizer.table import Rule, entry_of
from executor.optimizer.workers import WorkerTeam
from planner.decisions import Precision
from planner.optimizers import OPTIMIZERS as PLANNED
from planner.schedule.tasks import MemoryClass, Tier

ROUNDED = ("adamw-bf16-rounded", "adamw-8bit-rounded")


def rule_of(name: str, number: int = 0, start: int = 0, **changes: float) -> Rule:
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1).bfloat16())], **changes)
    return entry_of(optimizer).rule(optimizer.param_groups[0]).of_parameter(number, torch.Size([1])).at(start)


def random_state(rule: Rule, num_params: int, seed: int) -> list[torch.Tensor]:
    """Return weights and moments after a step, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    weights, *gradients = (torch.randn(num_params, generator=generator).bfloat16() for _ in range(3))
    buffers = state_buffers(rule.entry.planned_as)[1:]
    state = [weights, *(torch.zeros(b.length(num_params), dtype=b.dtype) for b in buffers)]
    return [*stepped(rule, [*state, gradients[0]], 1), gradients[1]]


def stepped(rule: Rule, state: list[torch.Tensor], step: int, team: WorkerTeam | None = None) -> list[torch.Tensor]:
    *held, gradient = (values.clone() for values in state)
    rule.entry.host([as_array(values) for values in held], as_array(gradient), None, rule.params, step, 0.7, team)
    return held


def stepped_on_device(rule: Rule, state: list[torch.Tensor], step: int) -> list[torch.Tensor]:
    *held, gradient = (values.clone() for values in state)
    update_on_device(held, [gradient], replace(rule, scale=0.7), step)
    return held


@pytest.mark.parametrize("name", ROUNDED)
@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 70_000), st.integers(0, 2**32 - 1), st.integers(1, 10**6), st.integers(0, 2**33), st.data())
def test_device_threads_and_cuts_give_the_same_bits(name, num_params, seed, step, start, data):
    rule = rule_of(name, 7, start, seed=seed)
    state = random_state(rule, num_params, seed)
    expected = stepped(rule, state, step)
    with WorkerTeam(3) as team:
        in_threads = stepped(rule, state, step, team)
    on_device = stepped_on_device(rule, state, step)
    at = BLOCK * data.draw(st.integers(0, -(-num_params // BLOCK)))
    ends = [(0, min(at, num_params)), (at, num_params)]
    parts = [stepped(rule.at(first), list(cut(state, first, last)), step) for first, last in ends if first < last]
    joined = [torch.cat(of_parts) for of_parts in zip(*parts, strict=True)]
    for whole, *others in zip(expected, in_threads, on_device, joined, strict=True):
        assert all(torch.equal(whole, other) for other in others)


@pytest.mark.parametrize("name", ROUNDED)
def test_weights_are_those_with_an_fp32_copy_rounded_to_a_neighbour_without_bias(name):
    """The mean of n errors deviates by at most half a unit over n ** 0.5; five times that is allowed."""
    num_params = 1 << 16
    ups = {}
    for step, number, seed, start in ((2, 0, 0, 0), (3, 0, 0, 0), (2, 1, 0, 0), (2, 0, 1, 0), (2, 0, 0, 1)):
        rule = rule_of(name, number, start, seed=seed, lr=1e-4)
        state = random_state(rule, num_params, 0)
        state[0] = (1.2 + 0.1 * state[0].float().abs().clamp_max(3)).bfloat16()  # one exponent: units are 2**-7
        exact, *moments = stepped(rule, [state[0].float(), *state[1:]], step)
        seen, *own_moments = stepped(rule, state, step)
        assert all(torch.equal(one, other) for one, other in zip(moments, own_moments, strict=True))
        error = (seen.double() - exact.double()).numpy()
        assert np.abs(error).max() < 2**-7
        assert abs(error.mean()) < 5 * 0.5 * 2**-7 / num_params**0.5
        ups[step, number, seed, start] = error
    found = list(ups.values())
    for i, one in enumerate(found):
        for other in found[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.5, "seed, step, parameter and position count"


def test_bits_of_weights_are_independent_of_those_of_moments():
    """From one start, all weights and moments are exactly between two neighbours: what goes up is the noise alone."""
    num_params = 1 << 16
    between = 1 + 2**-8  # of two bf16 values
    rule = rule_of("adamw-bf16-rounded", lr=0.0, betas=(0.0, 0.0), weight_decay=0.0)
    gradient = torch.full((num_params,), between).numpy()
    weight, m, v = (torch.zeros(num_params).bfloat16() for _ in range(3))
    weight.fill_(1.0)
    adamw_step([as_array(weight), as_array(m), as_array(v)], gradient, None, rule.params, 1, 1.0)
    assert bool((weight == 1).all()), "a weight that does not move stays as it is"
    decayed = rule_of("adamw-bf16-rounded", lr=1.0, betas=(0.0, 0.0), weight_decay=2**-9, eps=1e30)
    for moment in (m, v):
        moment.zero_()
    adamw_step([as_array(weight), as_array(m), as_array(v)], gradient, None, decayed.params, 1, 1.0)
    rounded = [values == values.max() for values in (weight, m, v)]
    for one in rounded[:2]:
        assert 0.45 < float(one.float().mean()) < 0.55
    for other in rounded[1:]:
        correlation = np.corrcoef(rounded[0].numpy(), other.numpy())[0, 1]
        assert abs(correlation) < 5 / num_params**0.5


@pytest.mark.parametrize("name", ROUNDED)
def test_weights_move_where_rounding_to_the_nearest_stands_still(name):
    weight = torch.nn.Parameter(torch.ones(4096).bfloat16())
    optimizer = OPTIMIZERS[name]([weight], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    nearest = torch.nn.Parameter(torch.ones(4096).bfloat16())
    stands = OPTIMIZERS[name]([nearest], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, bf16_stochastic_round=False)
    for _ in range(100):
        for parameter in (weight, nearest):
            parameter.grad = torch.ones(4096).bfloat16()
        optimizer.step()
        stands.step()
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 100 * 1e-4, rel=1e-3)
    assert bool((nearest == 1).all())


@pytest.mark.parametrize("name", ROUNDED)
def test_the_planner_knows_what_operators_move_and_hold(name, monkeypatch):
    for module in ("planner.optimizers", "executor.optimizer.table"):
        monkeypatch.setattr(f"{module}.UPDATED_AT_ONCE", 512)
    num_params = 1280
    rule = rule_of(name)
    row = PLANNED[rule.entry.planned_as].rounded
    *state, gradient = random_state(rule, num_params, 0)
    expected = stepped(rule, [*state, gradient], 2)
    with MemoryMeter() as meter:
        update_on_device(state, [gradient], replace(rule, scale=0.7), 2)
    assert meter.peak_bytes == row.scratch_bytes(num_params) + 4  # the factor
    assert all(torch.equal(mine, whole) for mine, whole in zip(state, expected, strict=True))
    many = [values.repeat(100) for values in (*state, gradient.float())]  # beside them, tables of codes are nothing
    with Traffic() as traffic:
        rule.entry.device(many[0], tuple(many[1:-1]), many[-1], rule.params, 3)
    assert traffic.num_bytes == pytest.approx(row.gpu_update_bytes * 100 * num_params, rel=2e-3)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_stay_so(name, bad):
    rule = rule_of(name)
    state = random_state(rule, 3 * BLOCK, 0)
    state[0][:7] = bad
    for seen in (stepped(rule, state, 2), stepped_on_device(rule, state, 2)):
        assert not bool(seen[0][:7].isfinite().any())
        assert bool(seen[0][7:].isfinite().all())


# --- under plans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUNDED)
def test_the_stock_optimizer_has_the_bits_of_every_place(name):
    """In memory with torch's operators, and under a plan with the kernel on the host: weights, losses and state."""
    task = Task("gpt2", optimizer=name, max_norm=None)
    losses, weights = stock(task)
    for choose, options in ((mixed, {}), (uniform("nvme", "nvme"), {"spill_gradients": True})):
        seen, final = planned(task, decide(task, choose, **options))
        assert seen == losses
        assert all(torch.equal(final[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize(
    ("params", "place", "host_bytes"),
    [("gpu", "gpu", 0), ("gpu", "cpu", 1), ("host", "cpu", 1), ("host", "stream", 1), ("host", "nvme", 0)],
)
def test_no_weight_is_kept_beside_its_master_copy(name, params, place, host_bytes):
    task = Task("gpt2", optimizer=name)
    decisions = decide(task, uniform(params, place))
    model, ours = prepare(task, decisions)
    grain = PLANNED[decisions.optimizer].block_params or 1
    num_params = sum(-(-p.numel() // grain) * grain for p in model.parameters())
    with ours.session as session:
        held = session.memory()[Tier.HOST].static_bytes
        assert held.get(MemoryClass.OPTIMIZER, 0) >= host_bytes * decisions.state_bytes_per_param * num_params
        weights = held.get(MemoryClass.PARAMETERS, 0)
        assert weights == (2 * num_params if place == "nvme" else 0)


def test_state_has_no_master_and_takes_one_of_an_fp32_copy():
    """Also in groups that say that there is one: what the plan keeps stays."""
    wide, rounded = (Task("gpt2", iterations=2, schedule=False, optimizer=n) for n in ("adamw-bf16", ROUNDED[0]))
    states = {}
    for task in (wide, rounded):
        model, ours = prepare(task, decide(task, mixed))
        with ours.session:
            train(task, model, ours)
            states[task.optimizer] = copy.deepcopy(ours.state_dict())
    own = states[rounded.optimizer]
    assert all("master" not in entry for entry in own["state"].values())
    for places in (mixed, uniform("host", "nvme")):
        model, ours = prepare(rounded, decide(rounded, places))
        with ours.session:
            ours.load_state_dict(states["adamw-bf16"])
            assert all(group["bf16_stochastic_round"] for group in ours.param_groups)
            weights = ours.session.full_parameters()
            names = [ours.session.name_of(p) for group in ours.param_groups for p in group["params"]]
            for number, entry in states["adamw-bf16"]["state"].items():
                assert torch.equal(weights[names[number]], entry["master"].bfloat16())
            train(rounded, model, ours)


def test_a_plan_and_an_optimizer_must_agree_on_the_master_copy():
    model = make_model(Task())
    for planned_as, given_as, remedy in (
        ("adamw-bf16", ROUNDED[0], "the plan's master copy is fp32, .* plan with --precision master=bf16"),
        (ROUNDED[0], "adamw-bf16", "the plan's master copy is bf16, .* plan without --precision master=bf16"),
    ):
        decisions = decide(Task(optimizer=planned_as), mixed)
        optimizer = make_optimizer(Task(optimizer=given_as), model)
        with pytest.raises(ValueError, match=remedy):
            check_decisions(decisions, entry_of(optimizer), optimizer.param_groups)
        optimizer.param_groups[0]["bf16_stochastic_round"] ^= True
        with pytest.raises(ValueError, match=remedy):
            check_decisions(decisions, entry_of(optimizer), optimizer.param_groups)
    adamw = make_optimizer(Task(), model)
    decisions = decide(Task(), mixed).model_copy(update={"precision": Precision(weights="bf16", master="bf16")})
    with pytest.raises(ValueError, match="weights in bf16, master in bf16, which can be simulated but not executed"):
        check_decisions(decisions, entry_of(adamw), adamw.param_groups)


@pytest.mark.parametrize(
    ("name", "num_ranks", "zero_stage"),
    [
        (ROUNDED[0], 2, 1),
        (ROUNDED[1], 2, 3),
        *(pytest.param(name, 4, stage, marks=pytest.mark.torture) for name in ROUNDED for stage in (1, 3)),
    ],
)
def test_ranks_share_the_state_without_a_trace(processes, name, num_ranks, zero_stage):
    task = Task("gpt2", iterations=3, num_micro_batches=2, optimizer=name)
    choose = uniform("gpu", "cpu") if zero_stage == 1 else mixed
    decisions = decide(task, choose, subgroup_params=1000, data_parallel=num_ranks, zero_stage=zero_stage)
    results = processes.call(num_ranks, trained, task, decisions)
    if num_ranks == 2:
        assert_same_bits(results, reference_of_ranks(task, 2, decisions))
        return
    expected = processes.call(num_ranks, trained_in_memory, task, decisions)
    for (seen, final, *_), (losses, theirs) in zip(results, expected, strict=True):
        assert seen == losses
        assert all(final[key].tobytes() == weight.tobytes() for key, weight in theirs.items())

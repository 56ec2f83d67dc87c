"""Muon under plans: the stock optimizers' own bits, on any ranks, from any checkpoint; and its products' arithmetic."""

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_programs import changed, resumed, saved, trained
from rank_references import reference, trained_in_memory
from ranks import assert_same_bits
from training import Task, decide, make_model, model_units, session_options, train, uniform, weights

from executor.devices.cuda import update_on_device
from executor.optimizer.muon import MuonParams, muon_step, newton_schulz
from executor.optimizer.reference import Muon
from executor.optimizer.table import entry_of
from executor.prepare import prepare_session
from planner.optimizers import is_hidden_matrix

PLACES = [("gpu", place) for place in ("gpu", "stream", "cpu", "nvme")]
PLACES += [("host", "stream"), ("host", "cpu"), ("nvme", "nvme")]


class Pair(torch.optim.Optimizer):
    """The stock optimizers side by side, as users of torch have them."""

    def __init__(self, model, muon, adamw):
        named = list(model.named_parameters())
        matrices = [p for n, p in named if is_hidden_matrix(n, p.shape)]
        others = [p for n, p in named if not is_hidden_matrix(n, p.shape)]
        self.both = torch.optim.Muon(matrices, **muon), torch.optim.AdamW(others, **adamw)
        super().__init__([*self.both[0].param_groups, *self.both[1].param_groups], {})

    def step(self):
        for optimizer in self.both:
            optimizer.step()


# --- the stock optimizers' arithmetic -------------------------------------------------------------------------------

MUON = {"lr": 2e-2, "weight_decay": 0.05, "momentum": 0.9}
ADAMW = {"lr": 0.0, "weight_decay": 0.0}  # its kernel rounds in another order; so it does nothing here


@functools.cache
def of_the_pair(**more):
    task = Task("llama", torch.float32, max_norm=None, iterations=5)
    model = make_model(task)
    return train(task, model, Pair(model, MUON | more, ADAMW)), weights(model)


@pytest.mark.parametrize(("params", "place"), PLACES)
def test_training_gives_the_bits_of_torchs_own_muon(params, place):
    task = Task("llama", torch.float32, max_norm=None, iterations=5, optimizer="muon")
    model = make_model(task)
    optimizer = Muon(model.named_parameters(), ADAMW, **MUON)
    decisions = decide(task, uniform(params, place))
    model, optimizer = prepare_session(model, optimizer, model_units("llama"), decisions, session_options())
    with optimizer.session:
        seen = train(task, model, optimizer)
        final = optimizer.session.full_parameters()
    losses, expected = of_the_pair()
    assert seen == losses
    assert all(torch.equal(final[name], weight) for name, weight in expected.items())


def test_out_of_a_plan_it_is_the_stock_pair():
    task = Task("llama", torch.float32, max_norm=0.5, iterations=4)
    found = []
    for make in (
        lambda model: Muon(model.named_parameters(), {"lr": 5e-3}, **MUON),
        lambda model: Pair(model, MUON, {"lr": 5e-3}),
    ):
        model = make_model(task)
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
        found.append((train(task, model, make(model), clip=clip), weights(model)))
    (losses, final), (their_losses, expected) = found
    assert losses == their_losses
    assert all(torch.equal(final[name], weight) for name, weight in expected.items())


SHAPES = [(24, 24), (40, 16), (16, 40), (1, 7), (130, 66)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize(
    "more", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, {"adjust_lr_fn": "original"}]
)
def test_a_step_over_several_matrices_gives_torchs_bits(shape, dtype, more):
    """Into weights of their own and over the gradient, in one flat range, with a factor for the gradient."""
    torch.manual_seed(0)
    count, size = 3, shape[0] * shape[1]
    kind = torch.bfloat16 if dtype is np.uint16 else torch.float32
    theirs = [torch.nn.Parameter(torch.randn(shape)) for _ in range(count)]
    optimizer = torch.optim.Muon(theirs, lr=0.1, **more)
    ours = torch.cat([p.detach().reshape(-1) for p in theirs]).numpy().copy()
    momentum = np.zeros(count * size, np.float32)
    params = MuonParams(lr=0.1, shape=shape, **more)
    for step in (1, 2, 3):
        gradient = torch.randn(count * size).to(kind)
        for p, part in zip(theirs, gradient.split(size), strict=True):
            p.grad = (part.float() * np.float32(0.3)).view(shape)
        optimizer.step()
        held = gradient.view(torch.uint16).numpy() if dtype is np.uint16 else gradient.numpy()
        out = None if dtype is np.float32 else held if step == 2 else np.zeros_like(held)
        muon_step((ours, momentum), held, out, params, step, 0.3)
        expected = torch.cat([p.detach().reshape(-1) for p in theirs])
        assert torch.equal(torch.from_numpy(ours), expected)
        if out is not None:
            assert torch.equal(torch.from_numpy(out).view(torch.bfloat16), expected.bfloat16())


def test_a_device_takes_whole_matrices_at_once_however_many_parameters_it_chunks(monkeypatch):
    monkeypatch.setattr("executor.devices.cuda._CHUNK_PARAMS", 100)
    torch.manual_seed(0)
    optimizer = Muon([("0.weight", torch.nn.Parameter(torch.zeros(16, 40)))], lr=0.1)
    rule = entry_of(optimizer).rule(optimizer.param_groups[0]).of_parameter(0, torch.Size((16, 40)))
    master, momentum, gradient = torch.randn(3, 3 * 640)
    host = [master.numpy().copy(), momentum.numpy().copy()]
    weights_out = torch.empty(3 * 640, dtype=torch.bfloat16)
    muon_step(host, gradient.numpy(), None, rule.params, 1, 0.5)
    update_on_device([master, momentum, weights_out], [gradient[:640], gradient[640:]], replace(rule, scale=0.5), 1)
    assert torch.equal(master, torch.from_numpy(host[0]))
    assert torch.equal(momentum, torch.from_numpy(host[1]))
    assert torch.equal(weights_out, master.bfloat16())


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_products_are_near_those_of_float64(shape):
    """Each of 5 x 3 products rounds to 8 bits, by 2**-9 of its norm, which later iterations amplify at most 5 x.

    So singular values, which come to lie between 0.7 and 1.2, and the matrix differ by about 15 x 5 x 2**-9 at most.
    """
    rng = np.random.default_rng(3)
    left, _ = np.linalg.qr(rng.normal(size=(shape[0], min(shape))))
    right, _ = np.linalg.qr(rng.normal(size=(shape[1], min(shape))))
    matrix = left @ np.diag(rng.uniform(0.5, 1.0, min(shape))) @ right.T
    a, b, c = MuonParams().ns_coefficients
    exact = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = exact @ exact.T
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    found = newton_schulz(torch.from_numpy(matrix), MuonParams(ns_coefficients=(a, b, c))).double().numpy()
    assert np.linalg.norm(found - exact, 2) < 15 * 5 * 2**-9
    assert np.all(np.abs(np.linalg.svd(exact, compute_uv=False) - 0.95) < 0.3)


# --- ranks and checkpoints ------------------------------------------------------------------------------------------


@settings(max_examples=examples(15, 3), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(plans(sizes=[2], optimizers=["muon"]), st.integers(0, 99))
def test_any_plan_for_two_gives_the_same_bits(processes, plan, seed):
    task, decisions = plan
    assert_same_bits(processes.call(2, trained, task, decisions, seed), reference(task, 2, decisions))


@pytest.mark.part(0)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["gpu", "stream", "cpu"])
def test_four_ranks_give_the_bits_of_training_in_memory(processes, zero_stage, place):
    """There are more ranks than matrices of a size, so that some have nothing but padding."""
    task = Task("gpt2", torch.float32, optimizer="muon")
    decisions = decide(task, uniform("gpu", place), data_parallel=4, zero_stage=zero_stage)
    expected = processes.call(4, trained_in_memory, task, decisions)
    for (seen, final, *_), (losses, theirs) in zip(processes.call(4, trained, task, decisions), expected, strict=True):
        assert seen == losses
        assert all(final[name].tobytes() == weight.tobytes() for name, weight in theirs.items())


def test_another_plan_in_the_middle_gives_the_same_bits(processes, tmp_path):
    """Whose matrices are on other ranks, or whole on each, in other subgroups."""
    task = Task("gpt2", torch.bfloat16, iterations=4, optimizer="muon")
    ways = [
        decide(task, choose, data_parallel=2, zero_stage=stage)
        for stage, choose in ((3, mixed), (0, uniform("gpu", "gpu")), (2, uniform("gpu", "cpu")))
    ]
    results = processes.call(2, changed, task, ways, tmp_path)
    assert_same_bits([found[:2] for found in results], reference(task, 2, ways[0]))


def test_a_checkpoint_of_two_ranks_goes_on_under_any_plan(processes, tmp_path):
    task = Task("gpt2", torch.bfloat16, iterations=3, optimizer="muon")
    sharded = decide(task, mixed, data_parallel=2, zero_stage=3)
    digests = {found[-1] for found in processes.call(2, saved, task, sharded, tmp_path)}
    assert len(digests) == 1
    for zero_stage, choose in ((0, uniform("gpu", "stream")), (2, uniform("gpu", "gpu"))):
        other = decide(task, choose, data_parallel=2, zero_stage=zero_stage, subgroup_params=977)
        assert {found[-1] for found in processes.call(2, resumed, task, other, tmp_path)} == digests


# --- what is refused ------------------------------------------------------------------------------------------------


def test_groups_are_those_of_the_plan():
    task = Task("llama", optimizer="muon")
    decisions = decide(task, uniform("gpu", "cpu"))
    model = make_model(task)
    named = dict(model.named_parameters())
    matrix = "model.layers.0.self_attn.q_proj.weight"
    for moved, (its, planned) in ((matrix, ("AdamW", "Muon")), ("lm_head.weight", ("Muon", "AdamW"))):
        is_muon = {name: is_hidden_matrix(name, p.shape) is not (name == moved) for name, p in named.items()}
        groups = [
            {"params": [p for name, p in named.items() if is_muon[name] is mine], "use_muon": mine}
            for mine in (True, False)
        ]
        with pytest.raises(ValueError, match=f"{moved} .* in a group of {its}, but the plan updates it with {planned}"):
            prepare_session(model, Muon(groups), model_units("llama"), decisions, session_options())


def test_what_the_class_refuses():
    vector, matrix = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"pass model.named_parameters\(\)"):
        Muon([matrix])
    with pytest.raises(ValueError, match="a group does not say use_muon"):
        Muon([{"params": [matrix]}])
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is in a group of Muon"):
        Muon([{"params": [vector], "use_muon": True}])
    with pytest.raises(ValueError, match="Invalid beta"):
        Muon([("0.weight", matrix), ("0.bias", vector)], {"betas": (2.0, 0.9)})
    assert "use ullage.Muon, which makes the same updates" in entry_of(torch.optim.Muon([matrix])).whole
    for bad in ({"adjust_lr_fn": "none"}, {"ns_steps": 100}, {"ns_coefficients": (1.0, 2.0)}, {"momentum": -1.0}):
        with pytest.raises(ValueError, match=min(bad)):
            MuonParams(**bad)


def test_its_state_is_saved_and_loaded_like_any_other():
    weight, bias = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(4))
    made = [Muon([("0.weight", p), ("0.bias", q)]) for p, q in (copy.deepcopy((weight, bias)) for _ in range(2))]
    for _ in range(3):
        for optimizer in made:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p)
            optimizer.step()
        made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
    states = [[s for p in o.param_groups for s in map(o.state.get, p["params"])] for o in made]
    assert [sorted(state) for state in states[0]] == [["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*states, strict=True) for key in a)

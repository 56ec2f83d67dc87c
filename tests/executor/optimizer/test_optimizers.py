"""Every optimizer of the table under plans: the same bits as in memory, and the state of the stock one."""

import copy
import random
import re

import bitsandbytes
import pytest
import torch
from amount import ALL, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numerics import PLACEMENTS, mixed, plans
from training import (
    OPTIMIZERS,
    ReferenceOptimizer,
    Task,
    assert_same,
    batches,
    decide,
    groups,
    make_model,
    make_optimizer,
    model_units,
    planned,
    prepare,
    reference,
    session_options,
    stock,
    train,
    uniform,
    units_of,
)

from executor.optimizer.table import ENTRIES, entry_of, torch_class_of
from executor.prepare import prepare_session
from planner.optimizers import ELEMENTWISE, is_hidden_matrix
from planner.optimizers import OPTIMIZERS as PLANNED
from planner.schedule.tasks import MemoryClass, Tier

OTHERS = [name for name in OPTIMIZERS if name != "adamw"]
ATOL = {
    "adamw-bf16": 10 * 5e-3 * 2**-6,
    "adamw-8bit": 10 * 5e-3 * 2**-4,
    "lion": 5e-3,
    "muon": 10 * 0.02 * 3**0.5 * 2**-8,
}  # of weights after 10 steps
ATOL |= {f"{name}-rounded": ATOL[name] for name in ("adamw-bf16", "adamw-8bit")}


@pytest.mark.part(66)
@pytest.mark.parametrize("form", ["bf16", "split", "fp32"])
@pytest.mark.parametrize(("params", "place"), PLACEMENTS)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_every_placement_gives_the_same_bits(optimizer, params, place, form):
    """With a rate that changes at every step, groups of other rates and decay, and clipping."""
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    task = Task("gpt2", dtype, optimizer=optimizer, splits=form == "split")
    assert_same(planned(task, decide(task, uniform(params, place))), reference(task))


@settings(max_examples=examples(40), deadline=None)
@given(plans(optimizers=OTHERS), st.integers(0, 99))
def test_any_plan_gives_the_same_bits_on_lanes_of_any_speed(plan, seed):
    task, decisions = plan
    assert_same(planned(task, decisions, delays=seed), reference(task))


@pytest.mark.part(8)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_schedules_of_every_rate_reach_every_share_of_the_update(optimizer):
    """All that a group says changes at each step, as schedulers of rates, momentum and decay do."""
    task = Task("gpt2", torch.bfloat16, optimizer=optimizer, schedule=False)

    def varying(groups):
        def before_step(iteration):
            for group in groups:
                group["lr"] *= 0.5 + 0.3 * iteration
                group["weight_decay"] = 0.02 * iteration
                if "betas" in group:
                    group["betas"] = (0.9 - 0.1 * iteration, 0.95 - 0.01 * iteration)
                if group.get("momentum"):
                    group["momentum"] = 0.9 - 0.1 * iteration

        return before_step

    plain = make_model(task)
    theirs = ReferenceOptimizer(make_optimizer(task, plain))
    expected = train(task, plain, theirs, before_step=varying(theirs.param_groups)), dict(plain.named_parameters())
    constant = reference(task)
    for place in ("gpu", "stream", "cpu", "nvme"):
        model, ours = prepare(task, decide(task, uniform("gpu", place)))
        with ours.session:
            seen = train(task, model, ours, before_step=varying(ours.param_groups))
            assert_same((seen, ours.session.full_parameters()), expected)
            with pytest.raises(AssertionError):
                assert_same((seen, ours.session.full_parameters()), constant)


@pytest.mark.part(6)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_stock_optimizers_and_clipping_agree_within_rounding(optimizer):
    """Each side rounds by a few units of 2**-24 a step; a step moves a weight by about the rate, up to 0.2 x 0.5.

    Lion's steps are +-rate whatever rounding does, but for averages that are zero but for rounding: those are few.
    Muon rounds to bf16, so that a step may differ by a unit of 2**-8 of the rate, up to 0.02 x 3 ** 0.5. Without such
    differences its bits are those of the stock one: see ``test_muon.py``.
    """
    task = Task("gpt2", torch.float32, iterations=10, optimizer=optimizer)
    losses, weights = stock(task)
    seen, final = planned(task, decide(task, mixed))
    assert seen == pytest.approx(losses, rel=1e-3 if optimizer in ATOL else 1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=ATOL.get(optimizer, 2e-5))


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.part(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_from_saved_states_as_if_it_had_not_stopped(optimizer, dtype):
    task = Task("gpt2", dtype, iterations=3, schedule=False, optimizer=optimizer)
    model, ours = prepare(task, decide(task, mixed))
    with ours.session:
        train(task, model, ours)
        weights = {n: w.clone() for n, w in model.state_dict().items()}
        state = copy.deepcopy(ours.state_dict())
        train(task, model, ours)
        final = {n: w.clone() for n, w in ours.session.full_parameters().items()}
    fresh = make_model(task)
    fresh.load_state_dict(weights)
    other = decide(task, uniform("host", "nvme"), subgroup_params=977)  # another plan, on purpose
    _, resumed = prepare_session(fresh, make_optimizer(task, fresh), model_units("gpt2"), other, session_options())
    with resumed.session:
        resumed.load_state_dict(state)
        train(task, fresh, resumed)
        for name, weight in resumed.session.full_parameters().items():
            assert torch.equal(weight, final[name]), name


@pytest.mark.part(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_has_the_format_of_the_stock_optimizer(optimizer):
    task = Task("gpt2", torch.float32, iterations=2, optimizer=optimizer)
    model, ours = prepare(task, decide(task, mixed))
    plain = make_model(task)
    theirs = make_optimizer(task, plain)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys(), "before the first step"
    with ours.session:
        train(task, model, ours)
        state = ours.state_dict()
    train(task, plain, theirs, clip=lambda n: torch.nn.utils.clip_grad_norm_(list(plain.parameters()), n))
    stocked = theirs.state_dict()
    assert state["param_groups"] == stocked["param_groups"]
    if optimizer == "sgd-plain":  # stock SGD has no state without momentum; ours says that it is zero
        assert not stocked["state"]
        assert not any(entry["momentum_buffer"].any() for entry in state["state"].values())
        return
    assert state["state"].keys() == stocked["state"].keys()
    for number, entry in stocked["state"].items():
        assert state["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            mine = state["state"][number][key]
            assert mine.shape == value.shape
            assert mine.dtype == value.dtype
            # The next code, or the other bf16 neighbour, is a unit away. Small gradients differ by how a CPU adds.
            rtol, atol = {torch.bfloat16: (2**-7, 1e-6), torch.uint8: (0.0, 1.0)}.get(value.dtype, (1e-3, 1e-6))
            torch.testing.assert_close(mine, value, rtol=rtol, atol=atol)
    theirs.load_state_dict(state)


@pytest.mark.part(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loads", [True, False], ids=["load_state_dict", "prepare"])
def test_state_of_the_stock_optimizer_is_taken_over(optimizer, loads):
    """Training in memory first, then under a plan, is training under the plan with that state."""
    task = Task("gpt2", torch.float32, iterations=2, schedule=False, max_norm=None, optimizer=optimizer)

    model = make_model(task)
    users = make_optimizer(task, model)
    train(task, model, users)
    state = copy.deepcopy(users.state_dict())
    continued = copy.deepcopy(model)
    in_memory = make_optimizer(task, continued)
    in_memory.load_state_dict(state)
    if loads:
        users.state.clear()
    _, ours = prepare_session(model, users, model_units("gpt2"), decide(task, mixed), session_options())
    with ours.session:
        if loads:
            ours.load_state_dict(state)
        train(task, model, ours)
        train(task, continued, in_memory)
        for name, weight in continued.named_parameters():
            atol = ATOL.get(optimizer, 2e-5)
            torch.testing.assert_close(ours.session.full_parameters()[name], weight, rtol=0, atol=atol)


@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.parametrize("place", ["gpu", "cpu", "stream"])
def test_only_the_state_that_the_optimizer_keeps_is_held(optimizer, place):
    task = Task("gpt2", torch.bfloat16, optimizer=optimizer)
    decisions = decide(task, uniform("gpu", place))
    model, ours = prepare(task, decisions)
    num_params = sum(p.numel() for p in model.parameters())
    with ours.session as session:
        tier = Tier.GPU if place == "gpu" else Tier.HOST
        held = session.memory()[tier].static_bytes[MemoryClass.OPTIMIZER]
        if optimizer == "muon":  # master and momentum of matrices, and what AdamW keeps of the rest
            num_others = sum(p.numel() for n, p in model.named_parameters() if not is_hidden_matrix(n, p.shape))
            assert held == 8 * num_params + 4 * num_others
        else:
            grain = PLANNED[decisions.optimizer].block_params or 1
            blocks = sum(-(-p.numel() // grain) for p in model.parameters())
            # If it is the weight, and both are on the device, the master copy is no state.
            per_param = decisions.state_bytes_per_param - decisions.resident_weight_bytes_per_param * (place == "gpu")
            assert held == per_param * grain * blocks
        predicted = [b for b in session.schedule.buffers if b.memory_class is MemoryClass.OPTIMIZER and b.tier is tier]
        assert held == sum(b.num_bytes for b in predicted)


# --- the table ------------------------------------------------------------------------------------------------------


def test_every_planned_optimizer_has_an_entry_and_every_entry_is_planned():
    assert {entry.planned_as for entry in ENTRIES} == set(PLANNED) - set(ELEMENTWISE)
    for name, planned_state in PLANNED.items():
        if name in ELEMENTWISE:
            continue
        entry = next(e for e in ENTRIES if e.planned_as == name)
        assert torch_class_of(name) is entry.torch_class
        assert len(entry.buffers) == len(planned_state.buffers)
        assert (entry.others and entry.others.planned_as) == planned_state.others


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_kernels_do_not_know_are_refused(flag):
    parameter = torch.nn.Parameter(torch.zeros(3))
    for entry in ENTRIES:
        if entry.others is not None or flag not in entry.torch_class([parameter], lr=0.1).defaults:
            continue
        optimizer = entry.torch_class([parameter], lr=0.1, **{flag: True})
        with pytest.raises(ValueError, match=f"the optimizer has {flag} set, .* leave it off"):
            entry_of(optimizer).rule(optimizer.param_groups[0])


class SignSgd(torch.optim.Optimizer):
    """A user's own, which counts its steps as an int, under another name, and replaces a tensor of its state."""

    def __init__(self, parameters, lr=1e-3, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] or {"n": 0, "average": torch.ones_like(p)}
                    state["n"] += 1
                    state["average"] = state["average"].lerp(p.grad, 1 - group["beta"])
                    p.sub_(state["average"].div(1 - group["beta"] ** state["n"]).tanh(), alpha=group["lr"])
                    self.state[p] = state


OWN = {
    "sgd without state": lambda groups: type("Own", (torch.optim.SGD,), {})(groups, lr=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3, amsgrad=True, maximize=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-3), amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-3, decoupled_weight_decay=True),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-3),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-3),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.1),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.1, t0=1.0),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-4),
    "a user's": lambda groups: SignSgd(groups, lr=1e-2),
}


@pytest.mark.part(6)
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_an_optimizer_without_a_kernel_takes_its_own_step(make):
    """Its weights and its state are those of itself in memory, bit for bit, before and after both go to a file."""
    entry = entry_of(make([torch.nn.Parameter(torch.zeros(3))]))
    task = Task("gpt2", torch.float32, 2, max_norm=None, optimizer=entry.planned_as, schedule=False)

    def frozen_at_first(model):
        late = model.transformer.h[1].mlp.c_fc.weight  # whose steps are fewer than others'
        return lambda iteration: late.requires_grad_(iteration > 0)

    plain = make_model(task)
    theirs = make(groups(plain))
    losses = train(task, plain, theirs, before_step=frozen_at_first(plain))
    model = make_model(task)
    ours = prepare_session(model, make(groups(model)), units_of(task), decide(task, mixed), session_options())[1]
    with ours.session as session:
        assert train(task, model, ours, before_step=frozen_at_first(model)) == losses
        for name, weight in plain.named_parameters():
            assert torch.equal(session.full_parameters()[name], weight), name
        state, expected = (copy.deepcopy(each.state_dict()["state"]) for each in (ours, theirs))
        for number, entry in expected.items():
            kept = {key: value for key, value in entry.items() if value is not None}
            assert state[number].keys() == kept.keys()
            for key, value in state[number].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(kept[key]).to(value.dtype)), key
        ours.load_state_dict(theirs.state_dict())
        assert train(task, model, ours) == train(task, plain, theirs)


class Lamb(torch.optim.Optimizer):
    """A user's own, whose step depends on norms of whole parameters."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 0.1)
                    p.sub_(average, alpha=group["lr"] * float(p.norm() / average.norm().clamp(1e-6)))


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware, with an optimizer of its own, as its authors publish it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * scale)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in parameters:
            p.data = self.state[p]["before"]
        self.base.step()


WHOLE = {
    "lamb": Lamb,
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "muon": lambda groups: torch.optim.Muon([p for p in groups[0]["params"] if p.dim() == 2], lr=1e-2),
    "amsgrad in a group": lambda groups: torch.optim.AdamW([{**groups[0], "amsgrad": True}, *groups[1:]], lr=1e-3),
    "lbfgs": lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]], lr=0.1, max_iter=3),
    "sharp": Sharp,
}


@pytest.mark.parametrize("kind", WHOLE if ALL else ["lamb", "sharp"])
def test_an_optimizer_that_looks_beyond_a_value_steps_on_whole_parameters(kind):
    """Losses, weights and state are those of itself in memory, bit for bit, before and after both go to a file."""
    task = Task("gpt2", torch.float32, 1, max_norm=None, optimizer="elementwise-0", schedule=False)

    def trained(model, optimizer):
        losses = []
        torch.manual_seed(11)
        for (tokens,) in batches(task):

            def closure(tokens=tokens):
                if type(theirs) is torch.optim.LBFGS:
                    optimizer.zero_grad()
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                losses.append(loss.item())
                return loss

            closure()
            optimizer.step(*[closure] * (type(theirs) in (Sharp, torch.optim.LBFGS)))
            optimizer.zero_grad()
        return losses

    plain, model = make_model(task), make_model(task)
    make = WHOLE[kind]
    theirs, lines = make(groups(plain)), []
    losses = trained(plain, theirs)
    options = session_options(report=lines.append)
    ours = prepare_session(model, make(groups(model)), units_of(task), decide(task, mixed), options)[1]
    assert "steps by itself" in lines[0]
    with ours.session as session:
        assert trained(model, ours) == losses
        for name, weight in plain.named_parameters():
            assert torch.equal(session.full_parameters()[name], weight), name
        state = theirs.state_dict()
        for optimizer in (ours, theirs):
            optimizer.load_state_dict(copy.deepcopy(state))
            optimizer.param_groups[0]["lr"] *= 0.5
        assert trained(model, ours) == trained(plain, theirs)


def test_parameters_of_other_modules_are_trained_beside_those_of_the_model():
    task = Task("gpt2", torch.float32, 1, max_norm=None, optimizer="adamw", schedule=False)

    def trained(model, optimizer, scale):
        torch.manual_seed(11)
        for (tokens,) in batches(task):
            (model(input_ids=tokens, labels=tokens).loss * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [scale.item(), *(weight.norm().item() for weight in model.parameters())]

    plain, model = make_model(task), make_model(task)
    scales = [torch.nn.Parameter(torch.tensor(2.0)) for _ in range(2)]
    theirs, given = (
        torch.optim.AdamW([*groups(m), {"params": [s], "lr": 0.1}], lr=1e-3, eps=1e-2)
        for m, s in zip((plain, model), scales, strict=True)
    )
    ours = prepare_session(model, given, units_of(task), decide(task, mixed), session_options())[1]
    with ours.session:
        assert trained(model, ours, scales[1]) == pytest.approx(trained(plain, theirs, scales[0]), rel=1e-5)
        state = copy.deepcopy(theirs.state_dict())
        assert ours.state_dict()["state"].keys() == state["state"].keys()
        state["state"][max(state["state"])]["exp_avg"].fill_(9.0)
        for optimizer in (ours, theirs):
            optimizer.load_state_dict(copy.deepcopy(state))
        scales[1].data.copy_(scales[0].data)
        assert trained(model, ours, scales[1]) == pytest.approx(trained(plain, theirs, scales[0]), rel=1e-5)


def test_checkpoints_of_state_that_the_plan_does_not_have_are_refused():
    task = Task("gpt2", torch.float32, 1, max_norm=None, optimizer="elementwise-0", schedule=False)
    model = make_model(task)
    options = session_options(checkpoint_buffer_bytes=1 << 20)
    with pytest.raises(
        ValueError, match=r"Lamb steps by itself, but checkpoints .*; leave checkpoint_buffer_bytes out"
    ):
        prepare_session(model, Lamb(model.parameters()), units_of(task), decide(task, mixed), options)


def test_what_is_kept_outside_of_states_is_not_taken_in_parts():
    class Counting(SignSgd):
        def step(self):
            self.calls = getattr(self, "calls", 0) + 1
            super().step()

    class Scheduled(SignSgd):
        def step(self):
            super().step()
            self.param_groups[0]["lr"] *= 0.5

    class Drawing(SignSgd):
        def step(self):
            self.param_groups[0]["lr"] = abs(random.gauss()) + torch.rand(()).item()
            super().step()

    class Calling(torch.optim.SGD):
        def step(self):
            self.calls()

    class Corrected(SignSgd):
        def step(self):
            self.calls[0] += 1
            self.param_groups[0]["lr"] = 0.1 / (1 - 0.9 ** float(self.calls[0]))
            super().step()

    weight = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([weight])

    def given(kind, calls):
        optimizer = kind([weight])
        optimizer.calls = calls
        return optimizer

    counts = [0], {0: 0}, torch.zeros(1)
    calls = (inner.step, lambda: weight.data.sub_(weight.grad), lambda: None)
    weight.grad = torch.ones(3)
    random.seed(0)
    torch.manual_seed(0)
    tried = [Counting([weight]), Scheduled([weight]), Drawing([weight]), *(given(Calling, each) for each in calls)]
    tried.append(torch.optim.Optimizer([weight], {}))  # has no step, and says nothing more
    why = r"it keeps|it steps through|when it steps in parts|must be Tensor|as it is|it raises NotImplementedError"
    for optimizer in tried + [given(Corrected, each) for each in counts]:
        assert re.search(why, entry_of(optimizer).whole)
    assert not weight.any(), "it has been stepped"
    assert all(each[0] == 0 for each in counts), "a trial of a step has been counted"
    assert weight.grad.all(), "its gradient is lost"
    drawn = random.gauss(), torch.rand(()).item()
    random.seed(0)
    torch.manual_seed(0)
    assert drawn == (random.gauss(), torch.rand(()).item())


NEAREST = {
    bitsandbytes.optim.AdamW8bit: "ullage.AdamW8bit",
    bitsandbytes.optim.PagedAdamW8bit: "ullage.AdamW8bit",
    bitsandbytes.optim.PagedAdamW32bit: "torch.optim.AdamW",
    bitsandbytes.optim.Lion: "ullage.Lion",
    bitsandbytes.optim.AdEMAMix8bit: "ullage.AdamW8bit",
    torch.optim.Adafactor: "ullage.AdamW8bit",
    torch.optim.Muon: "ullage.Muon",
    torch.optim.SparseAdam: "torch.optim.AdamW",
    bitsandbytes.optim.LAMB: "one of torch.optim",
}


@pytest.mark.parametrize("kind", NEAREST, ids=lambda kind: kind.__name__)
def test_instead_of_other_optimizers_the_nearest_is_proposed(kind):
    ours = NEAREST[kind]
    optimizer = kind([torch.nn.Parameter(torch.zeros(3, 3))], lr=0.1)
    if "bitsandbytes" in kind.__module__ or kind is torch.optim.SparseAdam:
        with pytest.raises(ValueError, match=r"whose kernels do not see|which takes sparse gradients alone") as refused:
            entry_of(optimizer)
        words = str(refused.value)
    else:
        words = entry_of(optimizer).whole
    assert f"; use {ours}" in words
    assert ("optimizer_cls_and_kwargs=" in words) == ours.startswith("ullage.")


class Wrapping(torch.optim.Optimizer):
    """As accelerate's, whose step waits for the last micro-batch."""

    def __init__(self, optimizer):
        self.optimizer, self.defaults = optimizer, optimizer.defaults

    param_groups = property(
        lambda self: self.optimizer.param_groups, lambda self, groups: setattr(self.optimizer, "param_groups", groups)
    )
    state = property(lambda self: self.optimizer.state, lambda self, state: setattr(self.optimizer, "state", state))

    def step(self):
        self.optimizer.step()


def test_an_optimizer_that_wraps_another_one_is_refused_and_left_as_it_is():
    """A trial of its step would change the groups of the one inside."""
    parameter = torch.nn.Parameter(torch.zeros(3, 3))
    wrapping = Wrapping(torch.optim.RMSprop([parameter]))
    with pytest.raises(
        ValueError, match=r"Wrapping, which wraps another one .*; give ullage.prepare the optimizer tha"
    ):
        entry_of(wrapping)
    assert wrapping.param_groups[0]["params"][0] is parameter

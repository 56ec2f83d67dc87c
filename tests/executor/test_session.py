"""The session around training: evaluation, checkpoints, clipping, odd models, times and memory."""

import dataclasses
import threading
import warnings

import pytest
import torch
from torch import nn
from training import (
    ReferenceOptimizer,
    Task,
    assert_same,
    batches,
    decide,
    groups,
    make_model,
    model_units,
    one_iteration,
    planned,
    prepare,
    reference,
    session_options,
    some_of_each,
    train,
    uniform,
)

from executor.driver import iteration as driving
from executor.gradients import GradientError
from executor.prepare import prepare_session
from planner.decisions import Place
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import Lane, Op, Phase, Tier
from planner.schedule.timeline import memory_use

TASK = Task("llama", torch.bfloat16, iterations=3)


@pytest.mark.parametrize(
    "choose", [some_of_each, uniform("host", "cpu"), uniform("gpu", "cpu"), uniform("gpu", "nvme")]
)
@pytest.mark.parametrize("mode", ["no_grad", "eval"])
def test_evaluation_between_steps_sees_the_latest_weights_and_changes_nothing(choose, mode):
    tokens = batches(TASK)[0, 0]
    model, optimizer = prepare(TASK, decide(TASK, choose, num_param_slots=1))
    plain = make_model(TASK)

    def evaluate(_iteration=None):
        plain.load_state_dict({n: w.clone() for n, w in model.state_dict().items()})
        plain.eval()
        model.eval()
        with torch.set_grad_enabled(mode == "eval"):
            assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
            assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        model.train()

    with optimizer.session:
        evaluate()
        seen = []
        for step_tokens in batches(TASK)[:, 0]:
            loss = model(input_ids=step_tokens, labels=step_tokens).loss
            loss.backward()
            seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
            optimizer.step()
            optimizer.zero_grad()
            evaluate()
        constant = Task("llama", torch.bfloat16, iterations=3, schedule=False)
        assert_same((seen, optimizer.session.full_parameters()), reference(constant))


@pytest.mark.parametrize("room", [None, 0.5, 0.0])
@pytest.mark.parametrize("place", [("host", "cpu"), ("nvme", "nvme")])
def test_an_evaluation_of_many_forwards_brings_once_what_has_room(place, room, monkeypatch):
    tokens, task = batches(TASK)[0, 0], Task("llama-tied", torch.bfloat16, iterations=3)
    said, decisions = [], decide(task, uniform(*place), num_param_slots=1)
    model, optimizer = prepare(task, decisions, report=said.append)
    _, other = prepare(task, decisions)
    plain = make_model(task).eval()
    session, fetched = optimizer.session, []
    actions, units = session.runtime.actions, session.runtime.state.units.values()
    whole = sum(unit.device_weights.nbytes for unit in units)
    if room is not None:
        session.runtime.gpu.capacity_bytes = session.runtime.gpu.used_bytes + int(whole * room / 0.75)
    monkeypatch.setattr(actions, "fetch", lambda unit, fetch=actions.fetch: (fetched.append(unit.name), fetch(unit)))

    def forwards():
        """Return the units that come to the device in each of four forwards."""
        found, model_now = [], model.eval()
        for _ in range(4):
            fetched.clear()
            with torch.no_grad():
                assert torch.equal(model_now(input_ids=tokens).logits, plain(input_ids=tokens).logits)
            found.append(len(set(fetched)))
        model.train()
        return found

    with session, other.session:
        first = forwards()
        kept = sum(values.nbytes for held in session.driver.visibility._kept.values() for _, values in held)
        assert kept <= whole * (2 if room is None else room)
        assert first[0] == len(units)
        assert first[2] == first[3] <= len(units) - len(session.driver.visibility.kept)
        assert (first[3] == 0, first[3] < first[1]) == (room is None, room != 0)
        assert [line[:21] for line in said if "evaluation" in line] == ["an evaluation has roo"] * (room is not None)
        held = [parameter.data for parameter in model.parameters()]
        other.session.driver.on_forward(next(iter(units)).name)  # takes its memory
        assert not session.driver.visibility.kept
        assert forwards()[3] == first[3]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        plain.load_state_dict(model.state_dict())
        assert all(torch.equal(old, new) for old, new in zip(held, plain.parameters(), strict=True))
        assert forwards()[3] == first[3]


@pytest.mark.parametrize("place", [("host", "cpu"), ("nvme", "nvme")])
def test_a_closed_model_keeps_its_weights_while_another_trains(place):
    """What its last evaluation has kept on the device is freed with its session: the next iteration of any frees it."""
    tokens, task = batches(TASK)[0, 0], Task("llama-tied", torch.bfloat16, iterations=3)
    decisions = decide(task, uniform(*place), num_param_slots=1)
    model, optimizer = prepare(task, decisions)
    before = {name: weight.clone() for name, weight in model.eval().state_dict().items()}
    with optimizer.session as session, torch.no_grad():
        for _ in range(3):
            model(input_ids=tokens)
        assert session.driver.visibility.kept
    assert not session.driver.visibility.kept
    other, other_optimizer = prepare(task, decisions)
    with other_optimizer.session:
        train(task, other, other_optimizer)
    assert_same(([], model.state_dict()), ([], before))


@pytest.mark.parametrize("choose", [some_of_each, uniform("host", "stream"), uniform("host", "nvme")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training_goes_on_from_saved_states_as_if_it_had_not_stopped(choose, dtype):
    task = Task("gpt2", dtype, iterations=3, schedule=False)
    model, optimizer = prepare(task, decide(task, choose))
    saved = {}

    def save(iteration):
        if iteration == 1:
            saved["grad"] = True

    with optimizer.session:
        train(task, model, optimizer, before_step=save)
        weights = {n: w.clone() for n, w in model.state_dict().items()}
        state = optimizer.state_dict()
        train(task, model, optimizer)
        final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}

    fresh = make_model(task)
    fresh.load_state_dict(weights)
    stocked = torch.optim.AdamW(groups(fresh), lr=1.0)
    other = decide(task, uniform("host", "cpu"), subgroup_params=977)  # another plan, on purpose
    _, resumed = prepare_session(fresh, stocked, model_units("gpt2"), other, session_options())
    with resumed.session:
        resumed.load_state_dict(state)
        train(task, fresh, resumed)
        for name, weight in resumed.session.full_parameters().items():
            assert torch.equal(weight, final[name]), name


@pytest.mark.parametrize(("params", "place"), [("gpu", "gpu"), ("gpu", "cpu"), ("host", "stream"), ("host", "nvme")])
def test_a_saved_master_copy_brings_the_weights_with_it(params, place):
    model, optimizer = prepare(TASK, decide(TASK, some_of_each))
    with optimizer.session:
        train(TASK, model, optimizer)
        state = optimizer.state_dict()
        weights = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    _, other = prepare(TASK, decide(TASK, uniform(params, place)))
    with other.session:
        other.load_state_dict(state)
        for name, weight in other.session.full_parameters().items():
            assert torch.equal(weight, weights[name]), name


def test_the_state_has_the_format_of_torchs_adamw():
    task = Task("gpt2", torch.float32, iterations=2)
    model, optimizer = prepare(task, decide(task, some_of_each))
    with optimizer.session:
        train(task, model, optimizer)
        state = optimizer.state_dict()
        weights = {n: w.clone() for n, w in model.state_dict().items()}
    plain = make_model(task)
    plain.load_state_dict(weights)
    theirs = torch.optim.AdamW(groups(plain), lr=1.0)
    theirs.load_state_dict(state)
    assert theirs.param_groups[1]["lr"] == state["param_groups"][1]["lr"]
    assert all(float(entry["step"]) == 2 for entry in theirs.state.values())
    assert len(theirs.state) == len(list(plain.parameters()))


def test_state_of_the_given_optimizer_is_taken_over():
    task = Task("gpt2", torch.float32, iterations=3, schedule=False, max_norm=None)
    model = make_model(task)
    optimizer = torch.optim.AdamW(groups(model), lr=5e-3, betas=(0.9, 0.95))
    train(task, model, optimizer)
    moments = {id(p): s["exp_avg"].clone() for p, s in optimizer.state.items()}
    users = optimizer
    decisions = decide(task, some_of_each)
    model, optimizer = prepare_session(model, optimizer, model_units("gpt2"), decisions, session_options())
    with optimizer.session:
        state = optimizer.state_dict()["state"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            assert state[number]["step"] == 3
            assert torch.equal(state[number]["exp_avg"], moments[id(parameter)])
        assert not dict.__len__(users.state), "and not kept twice"


@pytest.mark.parametrize("place", ["gpu", "stream", "cpu", "nvme"])
def test_frozen_and_unused_parameters_stay_as_they_are(place):
    task = Task("gpt2", torch.bfloat16, iterations=3)
    frozen = ("transformer.wte", "transformer.wpe", "transformer.h.0.", "transformer.h.1.mlp.c_fc.bias")

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return model

    plain = freeze(make_model(task))
    optimizer = ReferenceOptimizer(torch.optim.AdamW(groups(plain), lr=5e-3, betas=(0.9, 0.95)))
    expected = train(task, plain, optimizer), dict(plain.named_parameters())
    model = freeze(make_model(task))
    optimizer = torch.optim.AdamW(groups(model), lr=5e-3, betas=(0.9, 0.95))
    for activations in ("keep", "recompute"):
        model = freeze(make_model(task))
        optimizer = torch.optim.AdamW(groups(model), lr=5e-3, betas=(0.9, 0.95))
        decisions = decide(task, uniform("gpu", place, activations))
        _, ours = prepare_session(model, optimizer, model_units("gpt2"), decisions, session_options())
        with ours.session:
            assert_same((train(task, model, ours), ours.session.full_parameters()), expected)


def test_a_dropped_gradient_means_no_update():
    task = Task("gpt2", torch.bfloat16, iterations=2, max_norm=None, schedule=False)

    def drop(model):
        def before_step(iteration):
            if iteration == 0:
                model.transformer.h[0].mlp.c_fc.weight.grad = None

        return before_step

    plain = make_model(task)
    optimizer = ReferenceOptimizer(torch.optim.AdamW(groups(plain), lr=5e-3, betas=(0.9, 0.95)))
    expected = train(task, plain, optimizer, before_step=drop(plain)), dict(plain.named_parameters())
    for choose in (some_of_each, uniform("gpu", "gpu")):
        model, optimizer = prepare(task, decide(task, choose))
        with optimizer.session:
            seen = train(task, model, optimizer, before_step=drop(model))
            assert_same((seen, optimizer.session.full_parameters()), expected)


def test_a_scheduler_built_on_the_users_optimizer_works_too():
    task = Task("gpt2", torch.bfloat16, iterations=3)
    model = make_model(task)
    users = torch.optim.AdamW(groups(model), lr=5e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(users, task.iterations)
    decisions = decide(task, some_of_each)
    _, optimizer = prepare_session(model, users, model_units("gpt2"), decisions, session_options())
    seen = []
    torch.manual_seed(11)
    with optimizer.session, warnings.catch_warnings():
        warnings.simplefilter("error")  # the scheduler would warn if it had not seen the steps
        for tokens in batches(task)[:, 0]:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert_same((seen, optimizer.session.full_parameters()), reference(task))


def test_a_gradient_that_has_left_can_be_used_until_its_step():
    model, optimizer = prepare(TASK, decide(TASK, some_of_each))
    plain, tokens = make_model(TASK), batches(TASK)[0, 0]
    torch.manual_seed(11)
    plain(input_ids=tokens, labels=tokens).loss.backward()
    with optimizer.session:
        torch.manual_seed(11)
        model(input_ids=tokens, labels=tokens).loss.backward()
        weight, expected = next(iter(model.parameters())), next(iter(plain.parameters())).grad
        gradient = weight.grad
        assert gradient.shape == weight.shape
        assert float(gradient.norm()) > 0
        for operation in (torch.sum, torch.zeros_like, lambda g: g.norm(1), lambda g: g + 1, torch.Tensor.zero_):
            assert torch.equal(operation(gradient), operation(expected))
        assert not gradient.any()
        optimizer.step()
        assert weight.grad is gradient
        with pytest.raises(GradientError, match=r"after optimizer\.step\(\), which used it up"):
            gradient.sum()
        gradient.zero_()
        assert weight.grad is gradient, "of zeros, as plain PyTorch has it"
        assert not weight.grad.any()


def test_which_parameters_have_state_is_known_without_copies_of_it():
    model, optimizer = prepare(TASK, decide(TASK, some_of_each))
    tokens = batches(TASK)[0, 0]
    with optimizer.session:
        assert not optimizer.state
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert not optimizer.state
        optimizer.step()
        optimizer.zero_grad()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert len(optimizer.state) == len(parameters)
        assert all(parameter in optimizer.state for parameter in parameters)
        assert tokens not in optimizer.state
        assert {*map(id, optimizer.state)} == {*map(id, parameters)}
        assert not dict.__len__(optimizer.state)  # nothing was copied
        assert {*optimizer.state[parameters[0]]} >= {"exp_avg", "exp_avg_sq", "step"}
        assert dict.__len__(optimizer.state) == len(optimizer.state) == len(parameters)


@pytest.mark.parametrize(("first", "most_bytes"), [(0, 1 << 20), (1, 1 << 20), (0, 100)])
def test_gradients_are_kept_for_loops_that_read_them_after_their_first_step(first, most_bytes, monkeypatch):
    """Those of adapters, beside weights that are frozen."""
    monkeypatch.setattr(driving, "_MOST_KEPT_BYTES", most_bytes)
    task = dataclasses.replace(TASK, frozen=frozenset({"model.layers.0.mlp.up_proj.weight"}))
    model, optimizer = prepare(task, decide(task, some_of_each))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with optimizer.session:
        for step, tokens in enumerate(batches(task)[:3, 0]):
            model(input_ids=tokens, labels=tokens).loss.backward()
            norm = nn.utils.clip_grad_norm_(trained, 1e-3)
            before = float(norm)
            optimizer.step()
            if step >= first and (first or most_bytes < 1000):
                with pytest.raises(GradientError, match=r"used after optimizer\.step\(\), which used it up"):
                    trained[0].grad.sum()
                break
            if step >= first:
                after = sum(float(p.grad.detach().clone().square().sum()) for p in trained) ** 0.5
                assert after == pytest.approx(1e-3 * before / (before + 1e-6), rel=1e-3)
            optimizer.zero_grad()
        assert not optimizer.session.num_left


def test_a_gradient_cannot_be_used_where_updates_begin_in_backward():
    task = dataclasses.replace(TASK, max_norm=None)
    model, optimizer = prepare(task, decide(task, some_of_each, update_start="backward"))
    tokens = batches(task)[0, 0]
    with optimizer.session:
        model(input_ids=tokens, labels=tokens).loss.backward()
        with pytest.raises(OutOfOrderError, match=r"gradients were read or changed.*clip=True"):
            next(iter(model.parameters())).grad.zero_()


def test_step_returns_while_updates_go_on_and_the_next_use_waits_for_them():
    model, optimizer = prepare(TASK, decide(TASK, uniform("gpu", "cpu")))
    tokens = batches(TASK)[0, 0]
    with optimizer.session as session:
        one_iteration(model, optimizer, tokens)
        session.synchronize()
        perform, over, ended = session.runtime.machine._perform, threading.Event(), threading.Event()

        def slow(task, iteration):
            of_head = task.op is Op.UPDATE and task.unit == "head"
            if of_head:
                over.wait(60)
            perform(task, iteration)
            if of_head:
                ended.set()

        session.runtime.machine._perform = slow
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        assert not ended.is_set()
        threading.Timer(0.1, over.set).start()
        with torch.no_grad():
            model(input_ids=tokens)
        assert ended.is_set()


def test_what_was_recorded_is_the_schedule():
    decisions = decide(TASK, some_of_each, num_param_slots=1)
    model, optimizer = prepare(TASK, decisions)
    with optimizer.session as session:
        one_iteration(model, optimizer, batches(TASK)[0, 0])
        session.record = True
        for tokens in batches(TASK)[:, 0]:
            one_iteration(model, optimizer, tokens)
        timeline = session.timeline()
        assert session.iteration == 4
    assert timeline.num_iterations == 3
    schedule = timeline.schedule
    assert {task.lane for task in schedule.tasks} >= {Lane.H2D, Lane.D2H, Lane.CPU, Lane.STATE_IN, Lane.GPU_UPDATE}
    for iteration in range(3):
        spans = {span.task: span for span in timeline.of_iteration(iteration)}
        assert len(spans) == len(schedule.tasks)
        for task in schedule.tasks:
            assert all(spans[i].end_s <= spans[task.index].start_s for i in task.after)
    phases = timeline.phases(1)
    assert phases[Phase.FORWARD] > 0
    assert phases[Phase.BACKWARD] > 0
    assert sum(phases.values()) == pytest.approx(timeline.period_s(1))


def test_a_closed_session_leaves_an_ordinary_model():
    task = Task("gpt2", torch.float32, iterations=2)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "recompute"), num_param_slots=1))
    with optimizer.session:
        seen = train(task, model, optimizer)
    optimizer.session.close()  # again
    assert_same((seen, dict(model.named_parameters())), reference(task))
    tokens = batches(task)[0, 0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    model.load_state_dict({n: torch.zeros_like(w) for n, w in model.state_dict().items()})
    assert not any(w.any() for w in model.state_dict().values())


def test_a_float32_model_trains_in_bf16_with_its_own_values_as_master_copy():
    task = Task("gpt2", torch.bfloat16, iterations=1)
    model = make_model(Task("gpt2", torch.float32))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    decisions = decide(task, some_of_each)
    _, ours = prepare_session(model, optimizer, model_units("gpt2"), decisions, session_options())
    with ours.session as session:
        for name, (unit, entry) in session.runtime.parameter_states().items():
            assert entry.shard.leaf.dtype is torch.bfloat16
            assert torch.equal(unit.weight_of(entry), before[name].bfloat16())
            for part in entry.parts:
                with session.runtime.state.state_of(unit, part.piece) as (master, *_):
                    held = master[part.start - part.piece.start : part.stop - part.piece.start]
                    flat = before[name].reshape(-1)[part.start - entry.start : part.stop - entry.start]
                    assert torch.equal(held, flat)
        one_iteration(model, ours, batches(task)[0, 0])


def test_recomputation_leaves_caches_out():
    task = Task("gpt2", torch.float32, iterations=2)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "recompute")))
    model.config.use_cache = True
    with optimizer.session:
        assert_same((train(task, model, optimizer), optimizer.session.full_parameters()), reference(task))


def test_clipping_is_free_where_the_norm_is_small():
    task = Task("gpt2", torch.bfloat16, iterations=2, max_norm=1e9)
    unclipped = Task("gpt2", torch.bfloat16, iterations=2, max_norm=None)
    got = planned(task, decide(task, some_of_each))
    for name, weight in reference(unclipped)[1].items():
        assert torch.equal(got[1][name], weight)


def test_memory_use_of_a_measured_iteration_can_be_read():
    model, optimizer = prepare(TASK, decide(TASK, some_of_each), record=True)
    with optimizer.session as session:
        for tokens in batches(TASK)[:, 0]:
            one_iteration(model, optimizer, tokens)
        use = memory_use(session.timeline(), 1)
    assert use[Tier.GPU].peak_bytes > 0


def test_modules_without_units_of_their_own_are_left_alone():
    model, optimizer = prepare(TASK, decide(TASK, some_of_each))
    with optimizer.session:
        hooked = [m for m in model.modules() if m._forward_pre_hooks]
        assert all(m is model or any(True for _ in m.parameters(recurse=False)) for m in hooked)
        assert not any(isinstance(m, nn.SiLU) for m in hooked)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_gradient_that_is_flushed_in_part_keeps_only_the_rest_on_the_device():
    split = iter([Place.GPU, Place.CPU] * 100)
    decisions = decide(TASK, lambda _, count: ("gpu", "keep", [next(split) for _ in range(count)]))
    model, optimizer = prepare(TASK, decisions)
    tokens = batches(TASK)[0, 0]
    with optimizer.session as session:
        model(input_ids=tokens, labels=tokens).loss.backward()
        session.runtime.machine.wait()
        held = [g for unit, _ in session.runtime.state.by_name.values() for g in unit.device_gradients.values()]
        mixed = [
            unit.device_gradients[name, part.piece.index]
            for name, (unit, entry) in session.runtime.state.by_name.items()
            for part in entry.parts
            if len(entry.parts) > 1 and part.piece.place is Place.GPU
        ]
        assert held
        assert mixed
        assert all(g.untyped_storage().nbytes() == g.nbytes for g in mixed)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_every_gradient_arrives_during_the_backward_of_its_unit(activations):
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", activations)))
    tokens = batches(TASK)[0, 0]
    with optimizer.session as session:
        seen = {}
        for name, (unit, entry) in session.runtime.parameter_states().items():
            entry.shard.leaf.register_hook(
                lambda _, key=(name, unit.name): seen.update(
                    {key: (session.driver.progress.task.op, session.driver.unit)}
                )
            )
        one_iteration(model, optimizer, tokens)
        assert len(seen) == len(list(model.parameters()))
        assert all(at == (Op.BACKWARD, unit) for (_, unit), at in seen.items()), seen


def test_clipping_twice_sees_the_clipped_norm():
    model, optimizer = prepare(TASK, decide(TASK, some_of_each))
    tokens = batches(TASK)[0, 0]
    with optimizer.session:
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert float(optimizer.clip_grad_norm_(0.5)) > 0.5
        assert float(optimizer.clip_grad_norm_(0.5)) == pytest.approx(0.5, rel=1e-4)
        optimizer.step()

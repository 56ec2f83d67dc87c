"""Checkpoints of training: taken beside it, without a trace in it; and going on from them, under any plan."""

import contextlib
import copy
import dataclasses
import itertools
import json
import shutil
import time

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_failures import FullDrive
from rank_programs import resumed, saved
from safetensors.torch import load_file
from test_numerics import mixed, plans
from training import (
    Task,
    assert_same,
    batches,
    decide,
    delay,
    grouped,
    prepare,
    reference,
    uniform,
    units_of,
)

import executor.tasks.snapshots
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.writer import ShardWriter
from executor.checkpoint.format import reader
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
from executor.checkpoint.levels import Level
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import newest_of
from executor.memory.stream import by_value, converted
from executor.optimizer.adamw_8bit import KEYS
from executor.optimizer.blocks import SCALES
from executor.training_state.restoring import restore
from executor.training_state.saving import Checkpoints
from planner.decisions import Place
from planner.lowering.snapshots import snapshots
from planner.schedule.tasks import MemoryClass, Op, Tier
from ullage.training.exporting import export_hf

ROOM = 4 * 4096
ROUNDED = ("adamw-bf16-rounded", "adamw-8bit-rounded")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(executor.tasks.snapshots, "CHUNK_BYTES", 4096)


def run(task, decisions, folder, *, start=0, stop=None, every=1, delays=None, files=None, options=None):
    """Train from iteration ``start`` on with a checkpoint after every so many; go on from the newest if there is one.

    Returns losses and norms by iteration, the final weights, and how the checkpoints ended.
    """
    outcomes, seen = [], {}
    model, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=ROOM, **(options or {}))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.iterations)
    torch.manual_seed(11)
    with (
        optimizer.session,
        Checkpoints(optimizer, Level(folder, keep=100), on_outcome=outcomes.append, files=files) as saved,
    ):
        if delays is not None:
            delay(optimizer.session, delays)
        if start:
            with Checkpoint(folder / f"step-{start:08d}") as checkpoint:
                extra = restore(optimizer, checkpoint)
            scheduler.load_state_dict(extra["scheduler"])
        for iteration, micro_batches in enumerate(grouped(task, batches(task))):
            if not start <= iteration < (stop or task.iterations):
                continue
            seen[iteration] = []
            for tokens in micro_batches:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                seen[iteration].append(loss.item())
            if task.max_norm is not None:
                seen[iteration].append(float(optimizer.clip_grad_norm_(task.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if (iteration + 1) % every == 0:
                saved.save(iteration + 1, {"scheduler": scheduler.state_dict()})
        saved.finish()
        final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    return seen, final, outcomes


def flat(seen):
    return list(itertools.chain.from_iterable(seen.values()))


@settings(max_examples=examples(15))
@given(plan=plans(), other=plans(), seed=st.integers(0, 99), start=st.integers(1, 3), data=st.data())
def test_a_checkpoint_at_every_iteration_leaves_no_trace_and_any_plan_goes_on_from_each(
    plan, other, seed, start, data, tmp_path_factory
):
    (task, decisions), (_, others) = plan, other
    task = Task(**(vars(task) | {"schedule": True}))
    folder = tmp_path_factory.mktemp("saved")
    seen, final, outcomes = run(task, decisions, folder, delays=seed)
    assert_same((flat(seen), final), reference(task))
    assert [outcome.error for outcome in outcomes] == [None] * task.iterations
    if data.draw(st.booleans()):  # the same plan again, or another one of the same model
        again, last, _ = run(task, decisions, folder, start=start)
    else:
        splits = data.draw(st.booleans()) and decisions.precision.can_be_split
        others = others.model_copy(
            update={
                "units": decide(task, mixed).units,
                "subgroup_params": 3000,
                "split_masters": True if splits else None,
                "num_micro_batches": decisions.num_micro_batches,
                "clip": decisions.clip,
                "update_start": decisions.update_start,
            }
        )
        again, last, _ = run(task, others, folder, start=start)
    assert again == {iteration: seen[iteration] for iteration in range(start, task.iterations)}
    assert all(torch.equal(last[name], final[name]) for name in final)


@pytest.mark.part(6)
@pytest.mark.parametrize(
    ("optimizer", "splits"),
    [
        *((name, False) for name in ["adam", "adamw-bf16", "adamw-8bit", "sgd", "adagrad", "lion", "nadam", *ROUNDED]),
        *((name, True) for name in ["adam", "adamw-8bit", "lion", "muon", "rmsprop"]),
    ],
)
def test_every_optimizer_goes_on_bit_for_bit(optimizer, splits, tmp_path):
    """Split master copies go on as whole ones, which go on as split ones."""
    task = Task("llama", optimizer=optimizer)
    split = dataclasses.replace(task, splits=splits)
    pairs = [(decide(split, mixed), decide(task, uniform("gpu", "gpu")))]
    pairs += [(decide(task, mixed), decide(split, uniform("nvme", "nvme")))] if splits else []
    for number, (before, after) in enumerate(pairs):
        seen, final, _ = run(task, before, tmp_path / str(number), every=2)
        again, last, _ = run(task, after, tmp_path / str(number), start=2)
        assert again == {i: seen[i] for i in (2, 3)}
        assert all(torch.equal(last[name], final[name]) for name in final)


def moments(entry):
    """Return the moments of a parameter's state as float32 values."""
    flat = {key: values.reshape(-1) for key, values in by_value(entry).items() if key in (*SCALES, *SCALES.values())}
    return {key: values.float() for key, values in converted(flat, ()).items()}


NARROW = ("adamw", "adamw-bf16", "adamw-8bit")
MASTERS = [
    ("adamw", ROUNDED[1]),
    ("adamw-bf16", ROUNDED[0]),
    (ROUNDED[0], "adamw"),
    (ROUNDED[1], "adamw-8bit"),
    ROUNDED,
]


@pytest.mark.part(5)
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(NARROW, 2), *MASTERS])
@pytest.mark.parametrize(
    "places", [mixed, uniform("gpu", "gpu"), uniform("host", "nvme")], ids=["mixed", "gpu", "nvme"]
)
def test_moments_are_converted_to_the_form_that_the_plan_keeps(before, after, places, tmp_path):
    """Exactly in fp32, to the nearest in bf16, and in 8 bits by the whole blocks of each parameter."""
    saves, loads = (Task("gpt2", iterations=1, optimizer=name) for name in (before, after))
    run(saves, decide(saves, mixed), tmp_path)
    states, weights = [], []
    for task, choose in ((saves, mixed), (loads, places)):
        decisions = decide(task, choose, subgroup_params=1000)  # cut inside blocks where there are none
        _, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=ROOM)
        with optimizer.session, Checkpoint(tmp_path / "step-00000001") as checkpoint:
            restore(optimizer, checkpoint)
            states.append(optimizer.state_dict()["state"])
            assert optimizer.param_groups[0].get("bf16_stochastic_round", False) is task.optimizer.endswith("-rounded")
            weights.append(copy.deepcopy(optimizer.session.full_parameters()))
    assert all(torch.equal(found, weights[0][name]) for name, found in weights[1].items())
    after = after.removesuffix("-rounded")
    saved_dtype = {"adamw": torch.float32, "adamw-bf16": torch.bfloat16, "adamw-8bit": torch.uint8}[after]
    for number, entry in states[0].items():
        found = states[1][number]
        if "master" in found:  # exactly, also of bf16
            assert torch.equal(found["master"], entry.get("master", found["master"].bfloat16().float()))
        values = moments(entry)
        expected = (
            converted(values, KEYS) if after == "adamw-8bit" else {k: v.to(saved_dtype) for k, v in values.items()}
        )
        if after == before.removesuffix("-rounded") == "adamw-8bit":  # as they were
            expected = {key: entry[key].reshape(-1) for key in KEYS}
        assert all(each.any() for each in values.values())
        assert found[next(iter(values))].dtype is saved_dtype
        assert all(torch.equal(found[key].reshape(-1), each) for key, each in expected.items())


def test_experts_apart_go_on_in_one_unit_and_back(tmp_path):
    task = Task("mixtral-shared")
    separate, whole = decide(task, mixed, expert_units=2), decide(task, mixed)
    expected, final, _ = run(task, separate, tmp_path / "all", every=2)
    for name, there, then in (("apart", separate, whole), ("whole", whole, separate)):
        run(task, there, tmp_path / name, stop=2)
        again, last, _ = run(task, then, tmp_path / name, start=2)
        assert again == {i: expected[i] for i in (2, 3)}
        assert all(torch.equal(last[name], final[name]) for name in final)


RANKS = {
    "layers": {"tensor_parallel": 2},
    "layers and experts": {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2, "zero_stage": 3},
    "all, from shards": {"data_parallel": 3, "zero_stage": 3},
    "weights, not state": {"data_parallel": 2, "zero_stage": 1},
    "master copies that are weights": {"data_parallel": 2, "zero_stage": 1},
}


def resident(unit, count):
    """Return decisions for ranks that have all weights, and state of their own shards."""
    return "gpu", "keep", [Place.GPU if (len(unit.name) + i) % 2 else Place.CPU for i in range(count)]


@pytest.mark.part(5)
@pytest.mark.parametrize("shared", RANKS)
def test_what_ranks_share_goes_on_on_any_ranks(processes, shared, tmp_path):
    """All state is the same, whoever has which part of it; so is training, on ranks of the same degrees."""
    task = Task("mixtral-shared", iterations=2, optimizer=ROUNDED[0] if "master copies" in shared else "adamw")
    degrees = RANKS[shared]
    choose = resident if degrees.get("zero_stage") == 1 else mixed
    there, alone, other = (decide(task, choose, **of) for of in (degrees, {}, {"tensor_parallel": 2}))
    ends = {end for _, _, end in processes.call(there.num_devices, saved, task, there, tmp_path)}
    assert len(ends) == 1
    for plan in (there, alone, other):
        found = processes.call(plan.num_devices, saved, task, plan, tmp_path / "more", 2, tmp_path)
        assert {begin for begin, _, _ in found} == ends
    _, optimizer = prepare(task, alone, checkpoint_buffer_bytes=ROOM)
    with optimizer.session as session, Checkpoint(tmp_path / "step-00000002") as checkpoint:
        restore(optimizer, checkpoint)
        export_hf(checkpoint, tmp_path / "exported", "float32", max_shard_bytes=20_000)
        weights = session.full_parameters()
        exported = {}
        for file in (tmp_path / "exported").glob("*.safetensors"):
            exported |= load_file(file)
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name].to(values.dtype), values) for name, values in weights.items())
    again = processes.call(there.num_devices, saved, task, there, tmp_path / "again", 1, tmp_path)
    assert {end for _, _, end in again} == ends


def test_what_one_rank_finds_damaged_all_pass_over(processes, tmp_path):
    task = Task("gpt2", iterations=2)
    decisions = decide(task, uniform("host", "cpu"), data_parallel=2, zero_stage=3)
    expected = {end for _, _, end in processes.call(2, saved, task, decisions, tmp_path)}
    whole = processes.call(2, resumed, task, decisions, tmp_path)
    assert [(step, refused, digest) for _, step, refused, digest in whole] == [(2, (), *expected)] * 2
    damaged = tmp_path / "step-00000002/optimizer/exp_avg-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    first, second = processes.call(2, resumed, task, decisions, tmp_path)
    assert first[1] == second[1] == 1
    assert first[3] == second[3] not in expected
    assert "another rank cannot read its part" in first[2][0]
    assert "exp_avg-00001.safetensors is damaged between" in second[2][0]


def test_dropout_goes_on_with_the_same_random_numbers(tmp_path):
    task = Task("opt", torch.float32)
    seen, _, _ = run(task, decide(task, mixed), tmp_path / "saved")
    again, _, _ = run(task, decide(task, mixed), tmp_path / "saved", start=1)
    assert flat(again) == flat(seen)[2:]


def test_what_is_taken_is_the_state_of_its_own_step_however_slow_the_drive(tmp_path):
    """Updates wait for the snapshots of their pieces, and for no others."""

    class Slow(Files):
        def write(self, fd, data, offset):
            time.sleep(2e-3)
            return super().write(fd, data, offset)

    task = Task("gpt2", iterations=3)
    seen, final, outcomes = run(task, decide(task, mixed), tmp_path / "slow", files=Slow())
    assert_same((flat(seen), final), reference(task))
    _, _, quick = run(task, decide(task, mixed), tmp_path / "quick")
    for step in range(1, 4):
        slow, fast = (
            {name: tensor.fragments and _values(folder, step, name) for name, tensor in _tensors(folder, step)}
            for folder in (tmp_path / "slow", tmp_path / "quick")
        )
        assert slow == fast
    assert [outcome.error for outcome in (*outcomes, *quick)] == [None] * 6


def _tensors(folder, step):
    return Checkpoint(folder / f"step-{step:08d}").manifest.tensors.items()


def _values(folder, step, name):
    with Checkpoint(folder / f"step-{step:08d}") as checkpoint:
        out = torch.empty(checkpoint.manifest.tensors[name].num_values)
        checkpoint.read([ReadRequest(name, 0, out.numpy().view("uint8"))])
    return out.numpy().tobytes()


def test_a_full_drive_costs_checkpoints_and_not_training(tmp_path):
    task = Task("gpt2")
    seen, final, outcomes = run(task, decide(task, mixed), tmp_path / "full", files=FullDrive())
    assert_same((flat(seen), final), reference(task))
    assert all("make room, or keep fewer" in outcome.error for outcome in outcomes)
    assert len(outcomes) == 4
    assert newest_of([FolderPlace(tmp_path / "full")])[0] is None
    assert not list((tmp_path / "full").iterdir())


def test_another_model_or_optimizer_is_refused(tmp_path):
    task = Task("gpt2")
    run(task, decide(task, mixed), tmp_path / "saved", stop=1)
    with pytest.raises(CheckpointError, match="has the state of AdamW, but the optimizer is SGD"):
        run(Task("gpt2", optimizer="sgd"), decide(Task("gpt2", optimizer="sgd"), mixed), tmp_path / "saved", start=1)
    with pytest.raises(CheckpointError, match=r"the checkpoint is of another model"):
        run(Task("gpt2-untied"), decide(Task("gpt2-untied"), mixed), tmp_path / "saved", start=1)


def resumed_here(task, decisions, folder, monkeypatch):
    """Return what a new session goes on from, its state, and the bytes that were read for that."""
    read = []
    monkeypatch.setattr(reader._File, "load", lambda file, *given, plain=reader._File.load: count(file, plain, *given))

    def count(file, plain, chunk, *given):
        read.append(min(file.record.chunk_bytes, file.record.num_bytes - chunk * file.record.chunk_bytes))
        plain(file, chunk, *given)

    _, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=ROOM)
    with optimizer.session as session, Checkpoints(optimizer, Level(folder)) as saved:
        found = saved.resume()
        state = optimizer.state_dict()["state"]
        weights = {n: w.clone() for n, w in session.full_parameters().items()}
    monkeypatch.undo()
    monkeypatch.setattr(executor.tasks.snapshots, "CHUNK_BYTES", 4096)
    return found, (state, weights), sum(read)


def same_state(one, other):
    (state, weights), (others, other_weights) = one, other
    return all(torch.equal(weights[n], other_weights[n]) for n in weights) and all(
        torch.equal(values, others[number][key]) for number, entry in state.items() for key, values in entry.items()
    )


def test_what_is_damaged_is_passed_over_and_everything_is_read_once(tmp_path, monkeypatch):
    """What was restored of the damaged one is gone when the one before is back."""
    task, folder = Task("llama"), tmp_path / "saved"
    decisions = decide(task, uniform("host", "cpu"))
    run(task, decisions, folder, stop=3)
    newest, state, num_bytes = resumed_here(task, decisions, folder, monkeypatch)
    assert newest.step == 3
    total_bytes = Checkpoint(folder / "step-00000003").num_bytes
    assert num_bytes <= total_bytes
    shutil.rmtree(folder / "step-00000003")
    before, expected, _ = resumed_here(task, decisions, folder, monkeypatch)
    assert before.step == 2
    assert not same_state(state, expected)
    run(task, decisions, folder, start=2, stop=3)
    (folder / "step-00000004").mkdir()
    damaged = folder / "step-00000003/optimizer/exp_avg_sq-00000.safetensors"
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x80")
    for plan in (
        decisions,
        decide(task, mixed),
        decide(task, uniform("nvme", "nvme")),
        decide(task, uniform("gpu", "gpu")),
    ):
        found, state, _ = resumed_here(task, plan, folder, monkeypatch)
        assert (found.step, found.path) == (2, folder / "step-00000002")
        assert same_state(state, expected)
        assert "step-00000004: manifest.json: No such file" in found.refused[0]
        assert "exp_avg_sq-00000.safetensors is damaged between" in found.refused[1]
    shutil.rmtree(folder / "step-00000001")
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is whole: .*step-00000004.*; .*exp_avg_sq.*start training again"
    ):
        resumed_here(task, decisions, folder, monkeypatch)
    monkeypatch.setattr(executor.tasks.snapshots, "CHUNK_BYTES", 4096)
    assert resumed_here(task, decisions, tmp_path / "none", monkeypatch)[0].path is None


def test_buffers_are_in_the_ledger(tmp_path):
    task = Task("gpt2")
    _, optimizer = prepare(task, decide(task, mixed), checkpoint_buffer_bytes=9 * 4096)
    with optimizer.session, Checkpoints(optimizer, Level(tmp_path / "saved")):
        assert optimizer.session.memory()[Tier.HOST].static_bytes[MemoryClass.CHECKPOINT] == 10 * 4096


def test_a_drive_without_room_for_what_is_kept_is_reported_before_training(tmp_path, monkeypatch):
    task = Task("gpt2")
    run(task, decide(task, mixed), tmp_path / "saved", stop=2)
    (num_bytes,) = {Checkpoint(path).num_bytes for path in (tmp_path / "saved").iterdir()}
    usage = shutil.disk_usage(tmp_path)
    _, optimizer = prepare(task, decide(task, mixed), checkpoint_buffer_bytes=ROOM)
    levels = (Level(tmp_path / "saved", keep=3), Level(tmp_path / "more"))
    with optimizer.session:
        for free_bytes, fits in ((3 * num_bytes, False), (4 * num_bytes, True)):  # and two are there
            monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free_bytes: usage._replace(free=free))
            with contextlib.nullcontext() if fits else pytest.raises(CheckpointError, match="6 checkpoints at once"):
                Checkpoints(optimizer, *levels).close()


def test_a_session_without_room_is_reported(tmp_path):
    task = Task("gpt2")
    _, optimizer = prepare(task, decide(task, mixed))
    with optimizer.session, pytest.raises(ValueError, match="no buffers for checkpoints"):
        Checkpoints(optimizer, Level(tmp_path / "saved"))


def test_only_one_is_taken_at_a_time(tmp_path):
    task = Task("gpt2")
    _, optimizer = prepare(task, decide(task, mixed), checkpoint_buffer_bytes=ROOM)
    with optimizer.session, Checkpoints(optimizer, Level(tmp_path / "saved")) as saved:
        saved.save(0)
        with pytest.raises(CheckpointError, match="of step 0 was already begun after this iteration"):
            saved.save(1)
        saved.finish()
        assert json.loads((tmp_path / "saved/step-00000000/manifest.json").read_text())["step"] == 0


def test_state_on_the_host_is_written_from_where_it_is(tmp_path, monkeypatch):
    """Whatever the sizes of units, all whole chunks of a piece are lent (if the file system takes whole sectors)."""
    lent = []
    plain = ShardWriter.lease

    def lend(self, values):
        loans = plain(self, values)
        lent.append((len(values), len(loans), self._alignment_bytes))
        return loans

    monkeypatch.setattr(ShardWriter, "lease", lend)
    task = Task("gpt2")
    sizes = [unit.num_params for unit in units_of(task)]
    assert any(4 * size % 512 for size in sizes)
    run(task, decide(task, uniform("host", "cpu"), subgroup_params=3000), tmp_path / "saved", every=4)
    assert sum(size for size, _, _ in lent) == 12 * sum(sizes)
    assert all(num_loans >= size // 4096 - 1 for size, num_loans, aligned in lent if aligned <= 512)


def test_every_piece_has_one_snapshot_between_two_changes():
    assert snapshots.__doc__
    task = Task("llama")
    _, optimizer = prepare(task, decide(task, mixed), checkpoint_buffer_bytes=ROOM)
    with optimizer.session as session:
        tasks = session.schedule.tasks
        taken = {(t.unit, t.piece): t for t in tasks if t.op is Op.SNAPSHOT}
        updates = {(t.unit, t.piece): t for t in tasks if t.op is Op.UPDATE and t.num_params}
        gates = {(t.unit, t.piece): t for t in tasks if t.op is Op.GATE}
        stores = {(t.unit, t.piece): t for t in tasks if t.op in {Op.STORE, Op.SWAP_OUT}}
        assert taken.keys() == updates.keys()
        for key, snapshot in taken.items():
            change = stores.get(key, updates[key])
            assert snapshot.after_previous == (change.index,)
            gate = gates.get(key)
            place = session.decisions.units[key[0]].update[key[1]]
            assert (gate is not None) == (place in {"cpu", "stream"})
            if gate is None:
                assert snapshot.index in change.after
            else:  # the gate opens at the deadline, and not before
                assert set(gate.after) == {snapshot.index, *change.after} - {gate.index}
                assert gate.index in change.after

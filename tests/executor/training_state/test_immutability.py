"""State is at rest from the moment it is taken until it may change: looked at from outside, under any timing.

The oracle: what is to be saved is copied when a checkpoint begins. A piece's state is hashed when its snapshot is
taken, and again just before whatever changes it, as the last thing before that. Buffers that are free are full of
garbage, and lanes, copies, threads that write and files are slow at random. Then every checkpoint has to have the very
values that were there when it began.
"""

import contextlib
import hashlib
import sys
import time

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numerics import plans
from training import Task, assert_same, batches, decide, delay, grouped, prepare, reference, uniform

import executor.tasks.snapshots
import planner.lowering
from executor.checkpoint.engine import CheckpointEngine
from executor.checkpoint.files.system_calls import DamagedError, Files
from executor.checkpoint.files.writer import Flusher
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
from executor.checkpoint.levels import Level
from executor.tasks.snapshots import Snapshots
from executor.training_state.saving import Checkpoints
from planner.decisions import Place
from planner.schedule.tasks import Op

CHANGES = frozenset({Op.UPDATE, Op.STORE, Op.SWAP_OUT})
MOST_S, LATE_S = 1e-3, 3e-2  # that anything is late, and that some things always are
NUM_LOOKED_AT = {"pieces": 0, "checkpoints": 0}


class SlowFiles(Files):
    """Files that are slow at random."""

    def __init__(self, rng, most_s) -> None:
        super().__init__()
        self._rng, self._most_s = rng, most_s

    def write(self, fd, data, offset):
        time.sleep(self._most_s * self._rng.random())
        return super().write(fd, data, offset)

    def sync(self, fd):
        time.sleep(self._most_s * self._rng.random())
        super().sync(fd)


def state_by_name(optimizer):
    """Return a copy of all that a checkpoint has, by the names of its tensors."""
    session, keys = optimizer.session, ("master", *optimizer.entry.buffers)
    found = {}
    for name, state in optimizer._states():
        held = {"master": session.full_parameters()[name].float(), **state}
        found |= {name if key == "master" else f"{key}.{name}": held[key].clone() for key in keys}
    return found


class Oracle:
    """Hashes each piece's state when it is taken, and just before it changes.

    Args:
        session: whose.

    Attributes:
        torn: what has changed in between.
    """

    def __init__(self, session) -> None:
        self._session = session
        self._taken = {}
        self.torn = []
        perform = session.runtime.machine._perform

        def watched(task, iteration):
            key = task.unit, task.piece
            if task.op is Op.SNAPSHOT:
                self._taken[key] = self._digest(key)
            changes = task.op in CHANGES and task.op is self._change_of(key)
            if changes and key in self._taken and self._digest(key) != self._taken.pop(key):
                self.torn.append(f"{task.op} {key} in {iteration}")
            NUM_LOOKED_AT["pieces"] += changes
            perform(task, iteration)

        session.runtime.machine._perform = watched

    def _place(self, key):
        return self._session.runtime.state.units[key[0]].pieces[key[1]].place

    def _change_of(self, key):
        return {Place.STREAM: Op.STORE, Place.NVME: Op.SWAP_OUT}.get(self._place(key), Op.UPDATE)

    def _digest(self, key):
        """Return a hash of a piece's state where it lives; on NVMe there are two versions, and the files are read."""
        if self._place(key) is Place.NVME:
            values, scratch = self._session.runtime.state.stored.values(key), torch.empty(1 << 20, dtype=torch.uint8)
            held = [torch.empty(len(value), dtype=torch.uint8) for value in values]
            scratch = scratch[-scratch.data_ptr() % 4096 :][: 64 * 4096]
            for value, target in zip(values, held, strict=True):
                value.read(target, scratch)
        else:
            unit = self._session.runtime.state.units[key[0]]
            held = [tensor.detach().view(torch.uint8) for tensor in unit.state(unit.pieces[key[1]])]
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in held)).digest()


@contextlib.contextmanager
def poisoned(rng, most_s):
    """Fill buffers with garbage as soon as they are free, and copy to them at random times."""
    run, free, copy = Flusher._flush, Flusher._free_memory, Snapshots.copy

    def flush(self, chunk):
        time.sleep(most_s * rng.random())
        run(self, chunk)

    def poisoned_free(self, chunk):
        if chunk.buffer is not None:
            chunk.buffer[:] = 0xAA
        free(self, chunk)

    def slow(self, buffer, values):
        time.sleep(most_s * rng.random())
        copy(self, buffer, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flusher, "_flush", flush)
        patch.setattr(Flusher, "_free_memory", poisoned_free)
        patch.setattr(Snapshots, "copy", slow)
        patch.setattr(executor.tasks.snapshots, "CHUNK_BYTES", 4096)
        yield


def iterations(task, model, optimizer, seen):
    """Train, and yield the number of iterations after each."""
    torch.manual_seed(11)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.iterations) if task.schedule else None
    for step, micro_batches in enumerate(grouped(task, batches(task)), 1):
        for tokens in micro_batches:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            seen.append(loss.item())
        if task.max_norm is not None:
            seen.append(float(optimizer.clip_grad_norm_(task.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        yield step


def looked_at(task, decisions, folder, seed, late=frozenset(), most_s=MOST_S):
    """Train with a checkpoint after every iteration; some tasks come late, and writes take up to ``most_s`` longer.

    Returns losses and weights, what has changed between being taken and being allowed to, and what checkpoints have
    otherwise than training without any has it.
    """
    model, optimizer = prepare(task, decisions)
    with optimizer.session:
        expected = {step: state_by_name(optimizer) for step in iterations(task, model, optimizer, [])}
    rng = np.random.default_rng(seed)
    outcomes, seen = [], []
    with poisoned(rng, most_s):
        model, optimizer = prepare(task, decisions, checkpoint_buffer_bytes=4 * 4096)
        level, files = Level(folder, keep=100), SlowFiles(rng, MOST_S)
        with optimizer.session, Checkpoints(optimizer, level, on_outcome=outcomes.append, files=files) as saved:
            oracle = Oracle(optimizer.session)
            delay(optimizer.session, seed)
            come_late(optimizer.session, late)
            for step in iterations(task, model, optimizer, seen):
                saved.save(step)
            saved.finish()
            final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    assert [outcome.error for outcome in outcomes] == [None] * task.iterations
    wrong = [name for step, state in expected.items() for name in differing(folder / f"step-{step:08d}", state)]
    NUM_LOOKED_AT["checkpoints"] += len(expected)
    return (seen, final), oracle.torn, wrong


def come_late(session, ops):
    """Let tasks come so late that only dependencies can keep others from coming before them."""
    perform = session.runtime.machine._perform

    def late(task, iteration):
        time.sleep(LATE_S * (task.op in ops))
        perform(task, iteration)

    session.runtime.machine._perform = late


def differing(folder, state):
    """Return the names of tensors that a checkpoint has otherwise than they were."""
    with Checkpoint(folder) as checkpoint:
        found = {name: torch.empty(record.shape) for name, record in checkpoint.manifest.tensors.items()}
        try:
            checkpoint.read(
                ReadRequest(name, 0, values.reshape(-1).numpy().view(np.uint8)) for name, values in found.items()
            )
        except DamagedError as error:  # it changed between being hashed and being written
            return [str(error)]
    assert found.keys() == state.keys()
    return [name for name, values in found.items() if not torch.equal(values, state[name])]


@settings(max_examples=examples(4, fewest=2))
@given(plan=plans(), seed=st.integers(0, 99))
def test_what_is_taken_is_at_rest_until_it_may_change(plan, seed, tmp_path_factory):
    task, decisions = plan
    trained, torn, wrong = looked_at(task, decisions, tmp_path_factory.mktemp("looked at"), seed)
    assert not torn
    assert not wrong
    assert_same(trained, reference(task))


def without_gates(program):
    """Take state, and let nothing wait for that."""
    plain_snapshots(program)
    gates = {draft.index for draft in program.drafts if draft.op in {Op.SNAPSHOT, Op.GATE}}
    for draft in program.drafts:
        if draft.op not in {Op.SNAPSHOT, Op.GATE}:
            draft.after = tuple(key for key in draft.after if key not in gates)


plain_snapshots = planner.lowering.snapshots


def before_updates(program):
    """Take state, and wait for no update that may still be under way."""
    plain_snapshots(program)
    for draft in program.drafts:
        if draft.op is Op.SNAPSHOT:
            draft.after_previous = ()


NO_GATES = (planner.lowering, "snapshots", without_gates)
GATES_DO_NOT_WAIT = (
    CheckpointEngine,
    "release",
    lambda *_key, **_haste: None,
)  # of what is leased; other state is copied
TOO_EARLY = (planner.lowering, "snapshots", before_updates)
SNAPSHOTS = frozenset({Op.SNAPSHOT})


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("places", "broken", "late"),
    [
        (("gpu", "gpu"), NO_GATES, SNAPSHOTS),
        (("host", "cpu"), NO_GATES, SNAPSHOTS),
        (("host", "cpu"), GATES_DO_NOT_WAIT, SNAPSHOTS),
        (("host", "stream"), GATES_DO_NOT_WAIT, SNAPSHOTS),
        (("nvme", "nvme"), NO_GATES, SNAPSHOTS),
        (("host", "cpu"), TOO_EARLY, CHANGES),
    ],
    ids=["device", "host", "host, written in place", "streamed", "nvme", "too early"],
)
def test_what_is_missing_in_the_schedule_is_seen(places, broken, late, tmp_path, monkeypatch):
    """The oracle is worth something: it sees what gates prevent, for each place of state."""
    few = broken is not GATES_DO_NOT_WAIT  # which must meet what is written in place, and of a small model little is
    task = Task("small" if few else "gpt2", iterations=2)
    decisions = decide(task, uniform(*places), subgroup_params=1000 if few else 3000, overlap_next_forward=True)
    monkeypatch.setattr(*broken)
    slowly = LATE_S if late is SNAPSHOTS else MOST_S  # what is taken too early must be read before it has changed
    _, torn, wrong = looked_at(task, decisions, tmp_path, 1, late, slowly)
    assert torn or wrong


def test_how_much_was_looked_at(capsys):
    with capsys.disabled():
        found = NUM_LOOKED_AT
        sys.stdout.write(f"\n{found['pieces']} pieces at rest in {found['checkpoints']} checkpoints\n")
    assert found["pieces"] > 200

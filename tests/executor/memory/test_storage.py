"""Optimizer state in a file: what is read is what was written, and what goes wrong is told and tears nothing."""

import errno
import fcntl
import mmap
import os
import threading

import pytest
import torch
from amount import ALL
from forked import completed, script
from training import (
    Task,
    assert_memory_is_stated,
    assert_same,
    batches,
    decide,
    delay,
    make_model,
    planned,
    prepare,
    reference,
    train,
    uniform,
)

from executor.devices.lanes import LaneError
from executor.direct_io import BLOCK_BYTES, in_blocks
from executor.memory.nvme_files import RecordFile, StorageError
from planner.schedule.tasks import MemoryClass, Op, Tier

TASK = Task("gpt2", torch.bfloat16, iterations=3)
ON_NVME = uniform("host", "nvme")


@pytest.fixture
def file(tmp_path):
    made = RecordFile(tmp_path / "state", {0: 100, 1: 3 * BLOCK_BYTES + 1})
    yield made
    made.close()


def block_of(values: int, num_bytes: int = 4 * BLOCK_BYTES) -> torch.Tensor:
    """Return whole blocks in memory that begin at one."""
    room = torch.full((num_bytes + BLOCK_BYTES,), values, dtype=torch.uint8)
    return room[-room.data_ptr() % BLOCK_BYTES :][:num_bytes]


def content(file: RecordFile, record: int) -> set[int]:
    found = block_of(255)
    file.read(record, found)
    return set(found[: file._room_bytes[record]].tolist())


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
def test_what_is_read_is_what_was_written_last(file, is_direct):
    if not is_direct:
        fcntl.fcntl(file._fd, fcntl.F_SETFL, fcntl.fcntl(file._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        file.is_direct = False
    for values in range(1, 5):
        for record in (0, 1):
            file.write(record, block_of(10 * values + record))
        for record in (0, 1):
            assert content(file, record) == {10 * values + record}


def test_state_goes_past_the_page_cache_where_that_is_possible(tmp_path):
    block = mmap.mmap(-1, BLOCK_BYTES)
    try:
        probe = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.pwritev(probe, [block], 0)
    except OSError as error:
        pytest.skip(f"{tmp_path} has no direct transfers: {error}")
    os.close(probe)
    _, optimizer = prepare(TASK, decide(TASK, ON_NVME), storage_dir=tmp_path)
    with optimizer.session as session:
        file = session.runtime.state.stored.file
        assert file.is_direct
        assert fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT
        assert session.storage == f"state in {tmp_path}, past the page cache"


def test_where_there_is_no_direct_transfer_files_are_buffered(tmp_path, monkeypatch):
    control = fcntl.fcntl

    def refusing(fd, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(fd, command, flags)

    monkeypatch.setattr("executor.memory.nvme_files.fcntl.fcntl", refusing)
    made = RecordFile(tmp_path / "state", {0: 100})
    assert made.description == f"state in {tmp_path}, through (no O_DIRECT there) the page cache"
    made.write(0, block_of(5))
    assert content(made, 0) == {5}


def test_a_write_that_fails_half_way_leaves_the_version_before(file, monkeypatch):
    file.write(1, block_of(1))
    file.write(1, block_of(2))
    write = os.pwritev
    calls = []

    def failing(fd, buffers, offset):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, [buffers[0][:BLOCK_BYTES]], offset)

    monkeypatch.setattr("executor.memory.nvme_files.os.pwritev", failing)
    with pytest.raises(StorageError, match=r"state: a write of 16,384 B failed after 4,096 B: Input/output error"):
        file.write(1, block_of(3))
    assert content(file, 1) == {2}


def test_transfers_that_come_in_pieces_are_put_together(file, monkeypatch):
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)
        monkeypatch.setattr(
            f"executor.memory.nvme_files.os.{name}",
            lambda fd, buffers, offset, whole=whole: whole(fd, [buffers[0][:BLOCK_BYTES]], offset),
        )
    written, found = block_of(7), block_of(0)
    for number, block in enumerate(written.split(BLOCK_BYTES)):
        block.fill_(number)
    file.write(1, written)
    file.read(1, found)
    assert torch.equal(found, written)
    assert file.path.read_bytes()[-BLOCK_BYTES:] == bytes([3]) * BLOCK_BYTES, "and are where they belong"


def test_a_file_that_was_cut_off_is_noticed(file):
    file.write(1, block_of(1))
    os.truncate(file.path, in_blocks(100) * 2 + BLOCK_BYTES)
    with pytest.raises(StorageError, match=r"state ends after .* of a read of 16,384 B"):
        content(file, 1)


def test_two_runs_cannot_share_a_file_and_what_was_left_behind_can_be_overwritten(file):
    with pytest.raises(StorageError, match=r"in use by another run; .*--storage-dir"):
        RecordFile(file.path, {0: 1})
    path = file.path
    file.close()
    assert not path.exists()
    path.write_bytes(b"left behind by a process that was killed")
    with pytest.raises(AssertionError, match="before it was written"):
        content(RecordFile(path, {0: 1}), 0)


FULL = """
import resource, sys
from pathlib import Path
from executor.memory.nvme_files import RecordFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    RecordFile(Path(sys.argv[1]) / "state", {0: 1 << 20})
except OSError as error:
    print(error)
"""


def test_no_room_is_reported_at_the_start_and_leaves_nothing(tmp_path):
    (program := tmp_path / "program.py").write_text(FULL)
    (folder := tmp_path / "drive").mkdir()
    done = completed(script, str(program), str(folder))
    assert f"{folder}/state needs 2,097,152 B" in done.stdout, done.stderr
    assert "B are free there (File too large); make room, choose another --storage-dir" in done.stdout
    assert not list(folder.iterdir())


def test_a_folder_is_needed():
    with pytest.raises(ValueError, match="no folder for it was given; set storage_dir"):
        prepare(TASK, decide(TASK, ON_NVME), storage_dir=None)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be made: .*; choose another --storage-dir"):
        prepare(TASK, decide(TASK, ON_NVME), storage_dir=tmp_path / "file" / "below")


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rings_of_any_length_give_the_same_bits(num_slots, dtype):
    task = Task("gpt2", dtype)
    choose = uniform(["gpu", "host"][num_slots % 2], "nvme")
    for seed in range(2 if ALL else 1):
        decisions = decide(task, choose, num_nvme_slots=num_slots)
        assert_same(planned(task, decisions, delays=seed), reference(task))


@pytest.mark.parametrize(
    ("num_slots", "dtype", "num_micro_batches"),
    [(1, torch.bfloat16, 2), (2, torch.bfloat16, 1), (3, torch.bfloat16, 1), (1, torch.float32, 1)],
    ids=str,
)
def test_everything_on_nvme_gives_the_same_bits(num_slots, dtype, num_micro_batches):
    """And takes of every tier what the schedule says, class by class."""
    task = Task(["llama", "mixtral", "gpt2"][num_slots - 1], dtype, num_micro_batches, iterations=3)
    names = ("num_param_slots", "num_nvme_slots", "num_activation_slots", "num_gradient_slots")
    decisions = decide(task, EVERYTHING, spill_gradients=True, **dict.fromkeys(names, num_slots))
    model, optimizer = prepare(task, decisions)
    with optimizer.session as session:
        assert_memory_is_stated(session)
        delay(session, num_slots)
        seen = train(task, model, optimizer)
        assert_same((seen, session.full_parameters()), reference(task))


def test_weights_on_nvme_are_those_of_the_last_step(tmp_path):
    """For evaluation, for saving, from what was loaded, and in the model that is given back."""
    for dtype in (torch.bfloat16, torch.float32):
        task = Task("llama", dtype, iterations=2)
        found = []
        for choose in (uniform("gpu", "gpu"), EVERYTHING):
            model, optimizer = prepare(task, decide(task, choose), storage_dir=tmp_path)
            with optimizer.session as session:
                first = evaluate(task, model)
                seen = train(task, model, optimizer)
                saved, state = {n: w.clone() for n, w in model.state_dict().items()}, optimizer.state_dict()
                halved = {n: {k: v / 2 if v.ndim else v for k, v in s.items()} for n, s in state["state"].items()}
                trained = evaluate(task, model)
                if dtype is torch.bfloat16:  # in float32 the model's weights are the master copy, and loaded before
                    optimizer.load_state_dict(state | {"state": halved})
                seen += train(task, model, optimizer)
                last = {n: w.clone() for n, w in session.full_parameters().items()}
            assert all(torch.equal(w, last[n]) for n, w in model.named_parameters())
            found.append(([seen, first.tolist(), trained.tolist()], saved | {f"last {n}": w for n, w in last.items()}))
        assert_same(*found)


def evaluate(task, model):
    with torch.no_grad():
        logits = model.eval()(input_ids=batches(task)[0, 0]).logits.float()
    model.train()
    return logits


def test_frozen_weights_on_nvme_stay_as_they_are():
    """A record holds the weights of parameters that are updated and of others; these are written beside them."""
    task = Task("gpt2", torch.bfloat16, iterations=3, max_norm=None)
    found = []
    for choose in (uniform("gpu", "gpu"), EVERYTHING):
        model = make_model(task)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("c_fc.weight"))
        decisions = decide(task, choose, subgroup_params=5000, spill_gradients=True)
        model, optimizer = prepare(task, decisions, model=model)
        with optimizer.session as session:
            seen = train(task, model, optimizer)
            found.append((seen, {n: w.clone() for n, w in session.full_parameters().items()}))
    assert_same(*found)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_the_host_has_a_ring_of_buffers_and_the_drive_all_state_twice(num_slots, tmp_path):
    decisions = decide(TASK, ON_NVME, num_nvme_slots=num_slots)
    _, optimizer = prepare(TASK, decisions, storage_dir=tmp_path)
    with optimizer.session as session:
        pieces = [piece.num_params for unit in session.runtime.state.units.values() for piece in unit.pieces]
        memory = session.memory()
        assert memory[Tier.HOST].static_bytes[MemoryClass.OPTIMIZER] == num_slots * 12 * max(pieces)
        expected = 2 * sum(in_blocks(12 * count) for count in pieces)
        assert memory[Tier.NVME].static_bytes == {MemoryClass.OPTIMIZER: 2 * 12 * sum(pieces)}
        (path,) = tmp_path.iterdir()
        assert path.stat().st_size == expected
        assert path.stat().st_blocks * 512 >= expected, "its space is taken"
    assert not list(tmp_path.iterdir()), "gone with the session"


EVERYTHING = uniform("nvme", "nvme", "offload-nvme")
"""On NVMe: parameters, state and activations."""


@pytest.mark.parametrize("op", [Op.READ, Op.SWAP_IN, Op.SWAP_OUT, Op.SPILL, Op.EVICT, Op.RECALL])
def test_a_drive_that_fails_while_training_ends_it(op, monkeypatch, tmp_path):
    decisions = decide(TASK, EVERYTHING, spill_gradients=True)
    model, optimizer = prepare(TASK, decisions, storage_dir=tmp_path)
    call = "pwritev" if op in {Op.SWAP_OUT, Op.SPILL, Op.EVICT} else "preadv"
    real, perform, here = getattr(os, call), optimizer.session.runtime.machine._perform, threading.local()
    rest = "training cannot" if op in {Op.SPILL, Op.EVICT, Op.RECALL} else "the optimizer state of the last iteration"

    def recorded(task, iteration):
        here.failing = iteration == 1 and task.op is op
        perform(task, iteration)

    def failing(fd, buffers, offset):
        if getattr(here, "failing", False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers, offset)

    optimizer.session.runtime.machine._perform = recorded

    monkeypatch.setattr(f"executor.memory.nvme_files.os.{call}", failing)
    with optimizer.session, pytest.raises(LaneError, match=rf"in {op}.* No space left on device; {rest}"):
        train(TASK, model, optimizer)
        optimizer.session.synchronize()
    assert not [t for t in threading.enumerate() if t.name.startswith("lane ")]
    assert not list(tmp_path.iterdir())


def test_a_session_that_cannot_be_made_leaves_no_file(tmp_path):
    with pytest.raises(MemoryError, match="host"):
        prepare(TASK, decide(TASK, ON_NVME), storage_dir=tmp_path, host_capacity_bytes=100_000)
    assert not list(tmp_path.iterdir())


def test_a_gradient_that_was_dropped_leaves_weights_and_state_as_they_were():
    for dtype in (torch.bfloat16, torch.float32):
        found = []
        for params, place, spills in (("gpu", "gpu", False), ("gpu", "nvme", False), ("nvme", "nvme", True)):
            task = Task("gpt2", dtype, iterations=3, max_norm=None)
            model, optimizer = prepare(task, decide(task, uniform(params, place), spill_gradients=spills))
            with optimizer.session as session:

                def drop(iteration, model=model):
                    for name, parameter in model.named_parameters():
                        if iteration == 1 and "mlp" in name:
                            parameter.grad = None

                seen = train(task, model, optimizer, before_step=drop)
                found.append((seen, {n: w.clone() for n, w in session.full_parameters().items()}))
        for others in found[1:]:
            assert_same(others, found[0])

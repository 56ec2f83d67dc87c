"""The same small models on a CUDA device, or on the virtual one. ``benchmarks/gpu/run.sh`` runs them on the former."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import OPTIMIZERS, Task, decide, prepare, reference, train, uniform

import executor.devices.cuda
from executor.devices.cuda import Clock, CudaBackend, update_on_device
from executor.optimizer import AdamWParams
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import ENTRIES, Rule
from executor.optimizer.workers import WorkerTeam

pytestmark = pytest.mark.usefixtures("gpu")

# Products of two devices differ in their last bit, and training makes more of that with every step: few are compared.
ITERATIONS = 4
TOLERANCES = [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)]
PLACES = [
    ("gpu", "gpu", "keep"),
    ("gpu", "cpu", "keep"),
    ("gpu", "stream", "recompute"),
    ("host", "cpu", "recompute"),
    ("host", "stream", "keep"),
    ("gpu", "gpu", "offload"),
    ("host", "cpu", "offload"),
    ("nvme", "nvme", "offload-nvme"),
]


@pytest.mark.part(2)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize(("params", "place", "activations"), PLACES)
def test_losses_and_norms_follow_the_reference(params, place, activations, dtype, tolerance):
    task = Task("llama", dtype, iterations=ITERATIONS, splits=True)
    model, optimizer = prepare(task, decide(task, uniform(params, place, activations)), device="cuda", record=True)
    with optimizer.session as session:
        seen = train(task, model, optimizer)
        timeline = session.timeline()
    assert seen == pytest.approx(reference(task)[0], rel=tolerance)
    assert timeline.num_iterations == task.iterations
    assert timeline.makespan_s() > 0


def test_places_agree_with_each_other():
    """The host's kernel and the device's round differently, by far less than training moves."""
    task = Task("llama", iterations=ITERATIONS, splits=True)
    curves = []
    for params, place, activations in PLACES:
        model, optimizer = prepare(task, decide(task, uniform(params, place, activations)), device="cuda")
        with optimizer.session:
            curves.append(train(task, model, optimizer))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0.01)


@pytest.mark.part(4)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer_steps_on_the_device_as_on_the_host(optimizer):
    """A device may round a product and a sum once, and not twice: so bits may differ, and losses hardly."""
    task = Task("llama", iterations=ITERATIONS, optimizer=optimizer)
    curves = []
    for place in ("gpu", "cpu", "stream"):
        model, wrapped = prepare(task, decide(task, uniform("gpu", place)), device="cuda")
        with wrapped.session:
            curves.append(train(task, model, wrapped))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0.01)
    assert curves[0][0] != pytest.approx(curves[0][-1], rel=1e-3)


class Runtime:
    """Registers host memory as the device's own runtime does, and keeps account of it."""

    def __init__(self, code=0):
        self.registered, self._code, self._runtime = {}, code, torch.cuda.cudart()

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802 - its name there
        if self._code:
            return self._code
        self.registered[address] = num_bytes
        return self._runtime.cudaHostRegister(address, num_bytes, flags)

    def cudaHostUnregister(self, address):  # noqa: N802 - its name there
        del self.registered[address]
        return self._runtime.cudaHostUnregister(address)


def test_host_memory_is_registered_as_long_as_it_is_there(monkeypatch):
    runtime, backend = Runtime(), CudaBackend()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    block = backend.empty(10_000, on_device=False)
    assert runtime.registered == {block.data_ptr(): 10_000}
    part = block[5000:]
    del block
    assert runtime.registered, "a part of it is still there"
    del part
    assert not runtime.registered


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no list of this process's memory")
def test_registered_memory_is_there_before_in_large_pages_and_no_child_has_it(monkeypatch):
    """A driver that has to fetch it does so page by page, and a fork would copy what a device holds."""
    backend, there = CudaBackend(), []
    runtime = Runtime()
    monkeypatch.setattr(
        runtime, "cudaHostRegister", lambda address, _bytes, _flags: there.append(mapping(address)) or 0
    )
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda _address: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    block = backend.empty(8 << 20, on_device=False)
    assert len(block) == 8 << 20
    ((resident_bytes, flags),) = there
    assert resident_bytes >= 8 << 20
    assert "dc" in flags, "not copied by a fork"
    assert "hg" in flags
    assert "sh" not in flags, "shared memory has small pages"


def mapping(address):
    """Return the bytes of a mapping that are in memory, and its flags (see proc_pid_smaps(5))."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            start, end = (int(text, 16) for text in name.split("-"))
            found = start <= address < end
        elif found and name == "Rss:":
            resident_bytes = int(rest.split()[0]) << 10
        elif found and name == "VmFlags:":
            return resident_bytes, rest.split()
    raise AssertionError(f"nothing is at {address:#x}")


def test_host_memory_that_cannot_be_registered_is_an_error(monkeypatch):
    backend, runtime = CudaBackend(), Runtime(code=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(MemoryError, match=r"cudaHostRegister of 10,000 B failed with 2; leave more .*\(ulimit -l\)"):
        backend.empty(10_000, on_device=False)


def test_a_device_splits_master_copies_as_the_host_does():
    """A third of them lies exactly between two weights; some are not finite."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
    bits[-2:] = torch.tensor([0x7F800000, 0x7FC00000])
    masters = bits.to(torch.int32).view(torch.float32)
    here = SplitMaster.of_zeros(len(masters))
    there = SplitMaster(*(part.to("cuda") for part in here.of_blocks()), 0, len(masters))
    for split in (here, there):
        split[7:].copy_(masters[7:])
    for mine, theirs in zip((*here.of_blocks(), here.joined()), (*there.of_blocks(), there.joined()), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.cpu().view(torch.uint8))
    assert here.ties.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_params", [1, 1000, 64, 128, 4097])
def test_gradients_are_added_up_by_way_of_registered_memory(num_params, dtype, monkeypatch):
    """In two buffers by turns, of which each has 64 float32; whatever else a copy is made to would be new each time."""
    monkeypatch.setattr(executor.devices.cuda, "_PASSING_BYTES", 256)
    runtime, backend = Runtime(), CudaBackend()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    gradients = torch.randn(3, num_params, generator=torch.Generator().manual_seed(0)).to(dtype)
    held = torch.empty(num_params, dtype=dtype)
    on_device = gradients.to("cuda")
    monkeypatch.setattr(torch.Tensor, "add_", None)  # its threads would spin beside those of updates
    with WorkerTeam(2) as team:
        for number, gradient in enumerate(on_device):
            backend.accumulate(held, gradient, team, first=not number)
    assert list(runtime.registered.values()) == [512]
    assert torch.equal(held, gradients[0] + gradients[1] + gradients[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_team_adds_up_squares_as_one_thread_does(dtype):
    gradient = torch.randn(300_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    with WorkerTeam(3) as team:
        total = CudaBackend().sum_of_squares_on_host(gradient, team)
    assert total == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("record", [False, True])
def test_events_are_used_again(record, monkeypatch):
    """However long it trains: those of an iteration come back when its times are kept no longer."""
    monkeypatch.setattr("executor.devices.lanes.NUM_RECORDED", 2)
    made, event = [], torch.cuda.Event
    monkeypatch.setattr(torch.cuda, "Event", lambda **settings: made.append(1) or event(**settings))
    task = Task("llama", iterations=12)
    model, optimizer = prepare(task, decide(task, uniform("host", "stream")), device="cuda", record=record)
    with optimizer.session as session:
        train(task, model, optimizer)
        assert 0 < len(made) <= 2 * (2 + 3) * len(session.schedule.tasks)


class AtTime:
    """An event as CUDA tells of it."""

    def __init__(self, time_s):
        self.time_s = time_s

    def seconds_to(self, other):
        return float(np.float32((other.time_s - self.time_s) * 1e3)) / 1e3


@given(st.lists(st.floats(0, 60), min_size=1, max_size=300), st.booleans())
def test_times_are_as_exact_after_hours(gaps_s, backwards):
    """A second look, from the end or the beginning, sees the same."""
    times_s = [float(time_s) for time_s in np.cumsum([0.5, *gaps_s])]
    clock = Clock(AtTime(0.0), 5.0)
    found_s = [clock.time_s(AtTime(time_s)) for time_s in times_s]
    error_s = [found - time_s - 5.0 for found, time_s in zip(found_s, times_s, strict=True)]
    assert max(map(abs, np.diff([0, *error_s]))) < 3e-6
    order = range(len(times_s))[:: -1 if backwards else 1]
    assert [clock.time_s(AtTime(times_s[i])) for i in order] == pytest.approx([found_s[i] for i in order], abs=3e-6)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk=st.integers(1, 64),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_gradients_end_to_end_are_one_however_it_is_cut(lengths, chunk, dtype):
    """Several parameters are updated by one call, chunk by chunk."""
    device, total = torch.device("cuda"), sum(lengths)
    generator = torch.Generator().manual_seed(total)
    gradient = torch.randn(total, generator=generator).to(dtype)
    values = torch.randn(total, generator=generator)

    def state():
        fresh = [values.clone(), torch.zeros(total), torch.zeros(total), torch.zeros(total, dtype=torch.bfloat16)]
        return [tensor.to(device) for tensor in fresh]

    rule = Rule(next(entry for entry in ENTRIES if entry.torch_class is torch.optim.AdamW), AdamWParams(lr=0.1))
    whole, cut = state(), state()
    update_on_device(whole, [gradient.to(device)], rule, 1, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.devices.cuda, "_CHUNK_PARAMS", chunk)
        update_on_device(cut, gradient.to(device).split(lengths), rule, 1, 0.5)
    for one, other in zip(whole, cut, strict=True):
        assert torch.allclose(one.cpu().float(), other.cpu().float(), rtol=1e-6, atol=1e-7)
    assert not torch.equal(whole[0].cpu(), values)

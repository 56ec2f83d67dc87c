"""The same small models on a CUDA device, or on the virtual one. ``benchmarks/gpu/run.sh`` runs them on the former."""

import collections
import contextlib
import itertools
import math
import mmap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import OPTIMIZERS, Task, assert_same, decide, prepare, reference, train, uniform

import ullage
from executor.devices import cuda, sums
from executor.devices.cuda import Clock, CudaBackend, update_on_device
from executor.optimizer.adamw import AdamWParams
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import ENTRIES, Rule
from executor.optimizer.workers import WorkerTeam
from planner.models.formulas.work import attention_scratch_bytes
from planner.models.kernels import Attention
from planner.schedule.tasks import Lane, Tier

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

KERNELS = {
    SDPBackend.MATH: (),
    SDPBackend.FLASH_ATTENTION: ("flash",),
    SDPBackend.CUDNN_ATTENTION: ("cudnn",),
}


@pytest.mark.part(6)
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


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("family", "dtype", "attention", "max_norm"),
    [
        ("llama", torch.float32, SDPBackend.MATH, None),
        ("llama", torch.bfloat16, SDPBackend.MATH, 0.5),
        ("llama", torch.bfloat16, SDPBackend.FLASH_ATTENTION, 0.5),
        ("gpt2", torch.bfloat16, SDPBackend.FLASH_ATTENTION, None),  # attention drops values out
        ("gpt2", torch.bfloat16, SDPBackend.CUDNN_ATTENTION, 0.5),
    ],
    ids=str,
)
def test_placements_give_the_bits_of_what_is_resident(family, dtype, attention, max_norm):
    """Whatever the device makes of a product, it makes it again: a copy that comes late is a bit that differs.

    The host's kernel of updates and the device's round differently, by far less than training moves. cuDNN's attention
    sums up in any order.
    """
    task = Task(family, dtype, iterations=3, max_norm=max_norm)
    exact = attention is not SDPBackend.CUDNN_ATTENTION
    resident = {}  # by whether the device updates
    with sdpa_kernel(attention):
        torch.use_deterministic_algorithms(exact)
        for params, place, activations in PLACES:
            lines = []
            decisions = decide(task, uniform(params, place, activations))
            model, optimizer = prepare(task, decisions, device="cuda", report=lines.append)
            with optimizer.session as session:
                seen = train(task, model, optimizer)
                assert session.attention == KERNELS[attention]
                assert [line for line in lines if "attention" in line] == [f"attention: {n}" for n in session.attention]
                final = {name: weight.cpu().clone() for name, weight in session.full_parameters().items()}
            first = resident.setdefault(place in {"gpu", "stream"}, (seen, final))
            if exact:
                assert_same((seen, final), first)
            assert seen == pytest.approx(first[0], rel=0.02)
    assert resident[True][0] == pytest.approx(resident[False][0], rel=0.02)


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


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])  # Adagrad has state from the beginning
def test_a_default_device_of_the_users_own_does_not_matter(optimizer):
    curves = []
    with torch.device("cuda"):
        for is_planned in (False, True):
            torch.manual_seed(0)
            blocks = (torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)) for _ in range(5))
            model = torch.nn.Sequential(*blocks)  # of equal blocks, some are not captured one by one
            wrapped, batch = optimizer(model.parameters(), lr=1e-2), torch.randn(4, 16)
            if is_planned:
                model, wrapped = ullage.prepare(model, wrapped, batch, hardware="h200x1-16c")
            curves.append([])
            for _ in range(3):
                loss = model(batch).square().mean()
                loss.backward()
                wrapped.step()
                wrapped.zero_grad()
                curves[-1].append(loss.item())
            saved = wrapped.state_dict()
        wrapped.load_state_dict(saved)
        wrapped.session.close()
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[1][0] != curves[1][-1]


@pytest.mark.parametrize(("num_shapes", "stays"), [(4, True), (5, False)])
def test_where_shapes_vary_cudnn_makes_no_plan_for_each(num_shapes, stays):
    """While no forward has run that is recomputed; for as long as the session."""
    shapes = tuple((2, length) for length in range(8, 8 - num_shapes, -1))  # the first one is planned
    task = Task("llama", torch.bfloat16, num_micro_batches=2, iterations=5, shapes=shapes)
    planned = (("input_ids", (2, 8)),)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        decisions = decide(task, uniform("gpu", "gpu", "recompute"))
        model, optimizer = prepare(task, decisions, device="cuda", batch=planned)
        with optimizer.session:
            train(task, model, optimizer)
            assert torch.backends.cuda.cudnn_sdp_enabled() == stays
        assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("num_key_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_backward_of_attention_takes_the_scratch_that_is_planned(num_key_heads, head_dim):
    batch, num_heads, seq_len = 2, 8, 300
    query, key, value = (
        torch.randn(batch, seq_len, heads, head_dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for heads in (num_heads, num_key_heads, num_key_heads)
    )
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    torch.use_deterministic_algorithms(mode=False)  # which takes more
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        gradient = torch.ones_like(output)
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(output, inputs, gradient)
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes - sum(made.nbytes for made in gradients)
    core = Attention(batch, num_heads, seq_len, head_dim)
    planned_bytes = attention_scratch_bytes(core, grouped=num_key_heads < num_heads, e=2)
    assert peak_bytes == pytest.approx(planned_bytes, rel=0.01)


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


def test_host_memory_is_registered_until_the_device_is_done_with_it(monkeypatch):
    """Another thread may drop it last, which has not chosen the device."""
    runtime, backend, seen = Runtime(), CudaBackend(), []

    @contextlib.contextmanager
    def on_device(device):
        seen.append((threading.current_thread().name, device.type))
        yield

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: seen.append(len(runtime.registered)))
    blocks = [backend.empty(10_000, on_device=False)]
    other = threading.Thread(target=blocks.clear, name="other")
    other.start()
    other.join()
    assert seen == [("other", "cuda"), 1]
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


@pytest.mark.parametrize("grows", [True, False])
def test_memory_is_touched_no_faster_than_it_grows(grows, monkeypatch):
    """There is room for one part of three, and a quarter of one more at each look, or never more."""
    part_bytes, looks = 1000, itertools.count(1)
    block = torch.ones(3 * part_bytes, dtype=torch.uint8)

    def available_bytes():
        return part_bytes + grows * next(looks) * part_bytes // 4 - int((block == 0).sum())

    monkeypatch.setattr(cuda, "available_memory_bytes", available_bytes)
    monkeypatch.setattr(cuda, "_TOUCHED_BYTES", part_bytes)
    monkeypatch.setattr(cuda, "_GROWING_S", 20.0 if grows else 0.05)
    if grows:
        cuda._touch(block)
        assert not block.any()
        assert next(looks) > 8  # two parts had to be waited for
        return
    with pytest.raises(MemoryError, match=r"of 3,000 B does not fit: 1,000 B more are needed, and 0 B are free; leave"):
        cuda._touch(block)
    assert block[part_bytes:].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_go_through_memory_that_processes_share(dtype, monkeypatch):
    """Both ways at once, and to sums that are rounded once."""
    backend, runtime, count, ranks = CudaBackend(), Runtime(), 1 << 16, 4
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = np.frombuffer(mmap.mmap(-1, 2 * ranks * count * dtype.itemsize), np.uint8)
    halves = backend.pinned(memory).view(dtype).view(2, ranks, count)
    values = torch.randn(2, ranks, count, generator=torch.Generator().manual_seed(1)).to(dtype)
    halves[0].copy_(values[0])
    here, rows = values[1].cuda(), torch.empty(ranks, count, dtype=dtype, device="cuda")
    up, down = (list(zip(*ways, strict=True)) for ways in ((halves[1], here), (rows, halves[0])))
    torch.cuda.synchronize()
    with backend.lane(Lane.COLLECTIVE):
        backend.copy_both_ways(up, down)
        assert torch.equal(halves[1], values[1])
        own = torch.empty(count, dtype=dtype, device="cuda")
        backend.sum_rows(own, rows)
    torch.cuda.synchronize()
    whole = values[0].double().sum(0)
    least = torch.finfo(dtype).eps / 2 + 2**-20
    assert ((own.cpu().double() - whole).abs() <= least * values[0].double().abs().sum(0)).all()
    assert runtime.registered
    del halves, up, down
    assert not runtime.registered


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
    """In buffers by turns, of which each has 64 float32; whatever else a copy is made to would be new each time."""
    monkeypatch.setattr(cuda, "BUFFER_BYTES", 256)
    monkeypatch.setattr(sums, "BUFFER_BYTES", 256)
    runtime, backend = Runtime(), CudaBackend()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    gradients = torch.randn(3, num_params, generator=torch.Generator().manual_seed(0)).to(dtype)
    held = torch.empty(num_params, dtype=dtype)
    on_device = gradients.to("cuda")
    held.copy_(on_device[0])
    cuts = [0, num_params // 3, num_params // 2, num_params]  # of parameters, which pass together
    monkeypatch.setattr(torch.Tensor, "add_", None)  # its threads would spin beside those of updates
    with WorkerTeam(2) as team:
        for gradient in on_device[1:]:
            backend.accumulate([(held[a:b], gradient[a:b]) for a, b in itertools.pairwise(cuts)], team)
    backend.settle()
    assert list(runtime.registered.values()) == [1024]
    assert torch.equal(held, gradients[0] + gradients[1] + gradients[2])


def test_a_copy_waits_for_a_buffer_alone_and_readers_for_the_sum(monkeypatch):
    monkeypatch.setattr(cuda, "BUFFER_BYTES", 256)
    monkeypatch.setattr(sums, "BUFFER_BYTES", 256)
    go_on, add = threading.Event(), sums.add_on_host
    monkeypatch.setattr(sums, "add_on_host", lambda *args: go_on.wait(10) and add(*args))
    backend, held, values = CudaBackend(), torch.zeros(256), torch.ones(256, device="cuda")
    with WorkerTeam(2) as team:
        backend.accumulate([(held, values)], team)  # all four buffers
        assert not held.any()
        threading.Timer(0.1, go_on.set).start()
        backend.accumulate([(held[:64], values[:64])], team)
        assert go_on.is_set(), "a buffer is used again only when it has been added"
        backend.settle()
        assert held.tolist() == [2.0] * 64 + [1.0] * 192
        monkeypatch.setattr(sums, "add_on_host", lambda *_: 1 / 0)
        backend.accumulate([(held, values)], team)
    with pytest.raises(ZeroDivisionError):
        backend.settle()


@pytest.mark.parametrize(("place", "max_norm"), [("cpu", 0.5), ("stream", None)])
def test_who_reads_a_sum_waits_until_it_has_been_added(place, max_norm, monkeypatch):
    task = Task("llama", num_micro_batches=3, iterations=3, max_norm=max_norm)

    def curve():
        model, optimizer = prepare(task, decide(task, uniform("gpu", place)), device="cuda")
        with optimizer.session:
            return train(task, model, optimizer)

    expected, add, delays = curve(), sums.add_on_host, []
    monkeypatch.setattr(sums, "add_on_host", lambda *args: delays.append(time.sleep(0.02)) or add(*args))
    assert curve() == expected
    assert delays


@pytest.mark.parametrize(("lane", "sizes"), [(Lane.H2D, [100]), (Lane.STATE_IN, [64, 36]), (Lane.STATE_OUT, [64, 36])])
def test_copies_of_state_give_way_to_others(lane, sizes, monkeypatch):
    """A copy engine ends what it has begun."""
    monkeypatch.setattr(cuda, "_YIELDING_BYTES", 256)
    backend, copy, seen = CudaBackend(), torch.Tensor.copy_, []
    held, there = backend.empty(400, on_device=False).view(torch.float32), torch.zeros(100, device="cuda")
    held.copy_(torch.arange(100.0))
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *args, **kw: seen.append(len(self)) or copy(self, *args, **kw)
    )
    with backend.lane(lane):
        backend.copy(there, held)
        torch.cuda.current_stream().synchronize()
    assert seen == sizes
    assert torch.equal(there.cpu(), torch.arange(100.0))


@pytest.mark.parametrize(("ends_s", "naps", "blocks"), [(0.0, 0, 0), (2e-5, 0, 0), (1e-3, 9, 0), (math.inf, 49, 1)])
def test_a_thread_polls_then_naps_then_blocks(ends_s, naps, blocks, monkeypatch):
    now_s, slept, blocked = itertools.count(step=1e-5), [], []
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: next(now_s) + sum(slept))
    monkeypatch.setattr(cuda.time, "sleep", slept.append)
    event = SimpleNamespace(
        record=lambda _: None, query=lambda: cuda.time.perf_counter() >= ends_s, synchronize=lambda: blocked.append(1)
    )
    pool = collections.deque([event])
    cuda._Event(pool).wait()
    assert len(blocked) == blocks
    assert naps // 2 <= sum(nap > 0 for nap in slept) <= naps
    assert next(now_s) + sum(slept) <= min(ends_s, 5e-3) + 2e-4
    assert pool


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


def test_what_the_allocator_did_after_memory_was_metered_is_counted(monkeypatch):
    task, stats = Task("llama", iterations=2), torch.cuda.memory_stats
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats() | retried)
    model, optimizer = prepare(task, decide(task, uniform("gpu", "gpu")), device="cuda")
    with optimizer.session as session:
        retried = {"num_alloc_retries": 2, "num_ooms": 0}
        with session.metered():
            train(task, model, optimizer)
        found = session.memory()[Tier.GPU]
        assert found.allocator["num_alloc_retries"] == found.allocator["num_ooms"] == 0
        retried = {"num_alloc_retries": 5, "num_ooms": 1}
        train(task, model, optimizer)
        found = session.memory()[Tier.GPU]
        torch.empty(found.peak_bytes, dtype=torch.uint8, device="cuda")
        assert session.memory()[Tier.GPU].peak_bytes == found.peak_bytes, "metering had ended"
    assert (found.allocator["num_alloc_retries"], found.allocator["num_ooms"]) == (3, 1)
    assert found.allocator["reserved_bytes.all.peak"] >= found.peak_bytes > 0
    assert found.allocator["inactive_split_bytes.all.peak"] >= 0


class AtTime:
    """An event as CUDA tells of it."""

    def __init__(self, time_s):
        self.time_s = time_s

    def seconds_to(self, other):
        return float(np.float32((other.time_s - self.time_s) * 1e3)) / 1e3


@given(st.lists(st.floats(0, 60), min_size=1, max_size=300), st.floats(-5e-5, 5e-5), st.booleans())
def test_times_are_as_exact_after_hours(gaps_s, drift, is_thinned):
    """The GPU's clock is too fast or too slow, and CUDA tells of times in float32."""
    now_s = 5.0

    def event():
        return AtTime(now_s * (1 + drift))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("executor.devices.cuda.time.perf_counter", lambda: now_s)
        if is_thinned:
            patched.setattr("executor.devices.cuda._MOST_ANCHORS", 8)
        clock, times_s, events = Clock(lambda: (now_s, event())), [], []
        for gap_s in gaps_s:
            now_s += gap_s
            clock.keep_up()
            times_s.append(now_s)
            events.append(event())
    error_s = np.abs([clock.time_s(event) - time_s for event, time_s in zip(events, times_s, strict=True)])
    assert error_s[-1] < 1e-4
    assert is_thinned or error_s.max() < 1e-4


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adamw", torch.float32), *((name, torch.bfloat16) for name in ("adamw", "adamw-bf16-rounded", "adamw-8bit"))],
)
@pytest.mark.parametrize(("params", "place"), [("gpu", "gpu"), ("gpu", "stream"), ("host", "stream")])
def test_updates_are_of_forms_that_were_compiled_before(params, place, name, dtype, monkeypatch):
    """Where one kernel updates; the virtual GPU has none, and takes operators instead."""
    forms, update = [], CudaBackend.update

    def note(backend, state, gradients, *others):
        halves = (state[0].weights,) if (splits := isinstance(state[0], SplitMaster)) else state[:1]
        types = [tensor.dtype for tensor in (*halves, *state[1:])]
        forms.extend((splits, *types, gradient.dtype) for gradient in gradients)
        update(backend, state, gradients, *others)

    monkeypatch.setattr(CudaBackend, "update", note)
    monkeypatch.setattr("executor.session.fused", lambda: cuda)
    task = Task("llama", dtype, iterations=2, optimizer=name, splits=place == "stream" and dtype is torch.bfloat16)
    model, optimizer = prepare(task, decide(task, uniform(params, place, "keep")), device="cuda")
    with optimizer.session:
        compiled = len(forms)
        train(task, model, optimizer)
        optimizer.session.synchronize()
    assert set(forms[compiled:]) <= set(forms[:compiled])
    assert len(forms) > compiled > 0


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

    rule = Rule(next(entry for entry in ENTRIES if entry.torch_class is torch.optim.AdamW), AdamWParams(lr=0.1), 0.5)
    whole, cut = state(), state()
    update_on_device(whole, [gradient.to(device)], rule, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_CHUNK_PARAMS", chunk)
        update_on_device(cut, gradient.to(device).split(lengths), rule, 1)
    for one, other in zip(whole, cut, strict=True):
        assert torch.allclose(one.cpu().float(), other.cpu().float(), rtol=1e-6, atol=1e-7)
    assert not torch.equal(whole[0].cpu(), values)

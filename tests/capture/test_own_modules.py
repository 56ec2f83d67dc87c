"""Modules that no preset knows, captured, against what PyTorch does with them in memory."""

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from own_models import NUM_VALUES, OWN, batch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, Unit, build_graph, segments, units
from planner.lowering import lower, slots
from planner.models.captured import CapturedModel
from planner.models.kernels import Attention, flop
from planner.schedule.tasks import Op
from ullage.capture import capture_module
from ullage.capture.recording import find_loss
from ullage.capture.records import CaptureError

aten = torch.ops.aten
FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda *a, **_: sdpa_flop(*a[:3]),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *a, **_: sdpa_backward_flop(*a[:4]),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def captured(name: str, dtype: str = "fp32") -> CapturedModel:
    make, inputs = OWN[name]
    return capture_module(lambda: make().to(DTYPES[dtype]), inputs, dtype, as_on_gpu=False)


def units_of(model: CapturedModel) -> tuple[Unit, ...]:
    return units(build_graph(model, Batch(model.micro_batch, model.seq_len, 2 if model.dtype == "bf16" else 4)))


def real(name: str, dtype: str = "fp32") -> torch.nn.Module:
    torch.manual_seed(0)
    return OWN[name][0]().to(DTYPES[dtype]).train()


def loss_of(name: str, model: torch.nn.Module, dtype: str = "fp32") -> torch.Tensor:
    args, kwargs = batch(name, DTYPES[dtype])
    return find_loss(model(*args, **kwargs))[0]


@pytest.mark.part(2)
@pytest.mark.parametrize("name", OWN)
def test_flop_equal_those_of_the_flop_counter(name: str) -> None:
    model, found = real(name), captured(name)
    forward_flop = 0
    for phase in ("forward", "backward"):
        with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
            loss = loss_of(name, model)
            if phase == "backward":
                before = counter.get_total_flops()
                loss.backward()
        total = counter.get_total_flops() - (before if phase == "backward" else 0)
        kernels = [kernel for unit in units_of(found) for kernel in getattr(unit, phase)]
        if name == "convolutions" and phase == "backward":
            # The counter takes gradients of grouped weights for those of whole ones. Without the gradient of its
            # input, the first convolution has half the backward of the others.
            assert flop(kernels) == 2 * forward_flop - 2 * 2 * 16 * 16 * 16 * 27
            continue
        forward_flop = flop(kernels)
        assert not any(kernel.causal for kernel in kernels if isinstance(kernel, Attention))
        assert flop(kernels) == total > 0


@pytest.mark.part(3)
@pytest.mark.parametrize("name", OWN)
def test_units_hold_every_parameter_once(name: str) -> None:
    model, found = real(name), units_of(captured(name))
    specs = [(spec.name, spec.shape) for unit in found for spec in (*unit.parameters, *unit.frozen)]
    assert sorted(specs) == sorted((path, tuple(p.shape)) for path, p in model.named_parameters())
    assert len({unit.name for unit in found}) == len(found)


@pytest.mark.part(6)
@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(OWN, DTYPES)))
def test_saved_bytes_are_what_autograd_saves(name: str, dtype: str) -> None:
    model = real(name, dtype)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(name, model, dtype)
    saved = sum(storage.nbytes() for address, storage in held.items() if address not in known)
    assert sum(unit.saved_bytes for unit in units_of(captured(name, dtype))) == pytest.approx(saved, rel=0.02)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", [name for name in OWN if name != "adapted"])  # MemTracker fails on frozen parameters
def test_peak_memory_is_saved_bytes_and_workspace(name: str) -> None:
    model, found = real(name), units_of(captured(name))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    args, kwargs = batch(name, torch.float32)
    tracker = MemTracker()
    tracker.track_external(model, *args, *kwargs.values())
    with tracker:
        find_loss(model(*args, **kwargs))[0].backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    counted = {str(kind).rpartition(".")[2]: num_bytes for kind, num_bytes in peak.items()}
    held = itertools.accumulate(unit.saved_bytes for unit in found)
    predicted = max(saved + unit.workspace_bytes for saved, unit in zip(held, found, strict=True))
    measured = sum(counted[kind] for kind in ("ACT", "TEMP"))
    assert predicted == pytest.approx(measured, rel=0.1)


def segment_names(found: tuple[Unit, ...]) -> list[list[str]]:
    return [[unit.name for unit in segment] for segment in segments(found)]


def test_repeated_blocks_are_segments_and_their_halves_units() -> None:
    blocks = [[f"blocks.{i}.tokens", f"blocks.{i}.channels"] for i in range(3)]
    assert segment_names(units_of(captured("mixer"))) == [["patch"], *blocks, ["head"]]
    layers = [[f"layers.{i}.self_attn", f"layers.{i}.linear1"] for i in range(3)]
    assert segment_names(units_of(captured("encoder"))) == layers


def test_blocks_of_stages_are_segments() -> None:
    names = [unit.segment for unit in units_of(captured("stages")) if unit.recompute]
    assert names == [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(2)]


def test_equal_blocks_are_stored_once() -> None:
    mixer = captured("mixer")
    assert [segment.block for segment in mixer.segments] == [0, 1, 1, 1, 2]
    first, second = (unit for unit in units_of(mixer) if unit.name in {"blocks.0.tokens", "blocks.1.tokens"})
    assert all(a.forward is b.forward for a, b in zip(first.operators, second.operators, strict=True))


def test_a_module_that_runs_again_is_one_unit() -> None:
    assert segment_names(units_of(captured("repeated"))) == [["first"], ["block.up"]]


def test_parameters_of_a_block_itself_join_its_units() -> None:
    names = segment_names(units_of(captured("vit")))
    assert [len(segment) for segment in names] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(("name", "bias"), [("tied", 0), ("tied_by_the_head", 60)])
def test_a_tied_weight_is_owned_once_and_shared(name: str, bias: int) -> None:
    first, *between, last = units_of(captured(name))
    assert len(between) == 6
    assert (last.num_params, last.shared_units) == (bias, (first.name,))


@pytest.mark.parametrize("name", ["mixer", "encoder", "tied"])
def test_recomputation_reruns_what_checkpointing_does(name: str) -> None:
    """Non-reentrant checkpoints stop with the last tensor that a block keeps."""
    counts = []
    for again in (False, True):
        model = real(name)
        if again:
            for block in (model.blocks if name == "mixer" else model.layers).children():
                block.forward = checkpointed(block.forward)
        with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
            loss_of(name, model).backward()
        counts.append(counter.get_total_flops())
    rerun = flop(kernel for unit in units_of(captured(name)) for kernel in unit.recompute)
    assert rerun == counts[1] - counts[0] > 0


def test_blocks_that_keep_statistics_are_recomputed_from_copies_of_them() -> None:
    found = units_of(captured("residual"))
    assert [bool(unit.recompute) for unit in found] == [False, True, True, True, False]
    of_input, of_statistics = 4 * 16 * 16 * 16 * 4, 2 * (2 * 16 * 4 + 8)
    assert {unit.activation_output_bytes for unit in found[1:4]} == {of_input + of_statistics}
    with pytest.raises(ValueError, match=r"module 1\.0\.norm1 keeps statistics in torch.float32"):
        capture_module(*OWN["residual"], "bf16")


def checkpointed(forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("name", NUM_VALUES)
def test_inputs_that_are_looked_up_know_their_table(name: str) -> None:
    known = [spec.num_values for spec in captured(name).inputs if spec.dtype == "int64"]
    assert known == [NUM_VALUES[name]]


def test_the_loss_is_said() -> None:
    said = {name: captured(name).loss for name in ("mixer", "vit", "stages", "encoder")}
    assert said == {
        "mixer": "the output",
        "vit": "the output's loss",
        "stages": "the scalar in the output",
        "encoder": "your loop's, planned as the cross-entropy of the first floating output",
    }


class Balanced(nn.Module):
    """Returns what a loop makes a loss of, beside a term that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        h = self.first(x)
        return self.last(self.second(h) * self.scale), h.square().mean()


def test_the_loop_may_make_its_loss_of_all_that_the_model_returns() -> None:
    """Backward reads the scale between two modules, whose units are one, although the scalar does not lead there."""
    found = capture_module(Balanced, ["4x16"], "fp32")
    assert found.loss == "the scalar in the output, with all that does not lead to it"
    assert [(unit.name, bool(unit.backward)) for unit in units_of(found)] == [("first", True), ("second", True)]


def dropouts() -> Iterator[tuple[bool, int]]:
    def make() -> torch.nn.Module:
        return torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)

    for as_on_gpu in (False, True):
        found = units_of(capture_module(make, OWN["encoder"][1], "fp32", as_on_gpu=as_on_gpu))
        kernels = [kernel for unit in found for kernel in unit.forward]
        yield any(isinstance(kernel, Attention) for kernel in kernels), sum(unit.saved_bytes for unit in found)


def test_dropout_on_a_gpu_is_fused_and_keeps_bytes() -> None:
    """PyTorch's CPU attention is not fused where there is dropout, and keeps a mask of numbers."""
    (fused_on_cpu, on_cpu_bytes), (fused_on_gpu, on_gpu_bytes) = dropouts()
    assert (fused_on_cpu, fused_on_gpu) == (False, True)
    assert on_gpu_bytes < on_cpu_bytes


class Towers(nn.Module):
    """Has a tower that its batch does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 8)
        self.unused = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 24))

    def forward(self, x, image=None):
        return self.last(self.first(x) if image is None else self.unused(image)).sum()


def test_a_tower_that_the_batch_does_not_use_needs_no_slot_of_its_own() -> None:
    found = units_of(capture_module(Towers, ["4x8"], "fp32"))
    assert [(unit.name, unit.num_params, unit.is_unused) for unit in found] == [
        ("unused.0", 2 * (8 * 8 + 8), True),
        ("unused.2", 8 * 24 + 24, True),
        ("first", 8 * 24 + 24, False),
        ("last", 24 * 8 + 8, False),
    ]
    sizes = {unit.name: -(-unit.num_params // 1000) for unit in found}
    on_host = {
        name: UnitDecision(params="host", activations="keep", update=(Place.CPU,) * count)
        for name, count in sizes.items()
    }
    decisions = Decisions(policy="test", precision=Precision(weights="fp32"), subgroup_params=1000, units=on_host)
    assert slots(found, decisions).num_params == (8 * 24 + 24, 24 * 8 + 8)
    moved = {task.unit for task in lower(found, decisions, asynchronous=False).tasks if task.op is Op.FETCH}
    assert moved == {"first", "last"}


def test_norms_in_fp32_of_narrower_values_are_captured_as_autocast_runs_them():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 32)
            self.norms = nn.ModuleList([nn.LayerNorm(32), nn.GroupNorm(4, 32), nn.BatchNorm1d(32)])
            self.down = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.up(x)
                for norm in self.norms:
                    x = norm(x)
                return self.down(x).float()

    found = capture_module(Half, ["x=8x16:float"], "fp32", as_on_gpu=False)
    assert units_of(found)


class Ends(nn.Module):
    """One dropout at both ends, and a parameter that nothing uses, as in XLNet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unused = nn.Linear(16, 32), nn.Parameter(torch.zeros(32))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(2))
        self.head, self.dropout = nn.Linear(32, 4), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def test_a_parameter_that_nothing_uses_does_not_tie_a_shared_dropout_to_its_unit():
    found = units_of(capture_module(Ends, ["x=8x16:float"], "fp32", as_on_gpu=False))
    assert "unused" in {spec.name for spec in found[0].parameters}


def test_a_module_that_converts_itself_in_forward_is_captured():
    """To the type that it has, as Switch's router: PyTorch would swap its parameters, which a cache refers to."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(17, 19)  # sizes of no other test: a cache that has them hides the reference

        def forward(self, x):
            self.inner = self.inner.to(torch.float32)
            return self.inner(x)

    found = capture_module(Router, ["4x17"], "fp32", as_on_gpu=False)
    assert sorted(spec.name for unit in units_of(found) for spec in unit.parameters) == ["inner.bias", "inner.weight"]


def test_what_a_model_checks_of_values_that_are_assumed_holds():
    """Unless it contradicts itself: then no values would do, and the line is named."""

    class Checked(nn.Module):
        contradicts = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.layer(x)
            if not (made.abs().sum() > 1e30):
                raise ValueError("values are too small")
            if self.contradicts and made.abs().sum() > 1e30:
                raise ValueError("values are too large")
            return made

    assert capture_module(Checked, ["x=8x16:float"], "fp32", as_on_gpu=False).assumed
    Checked.contradicts = True
    with pytest.raises(CaptureError, match=r"it does not run with those that were assumed; compute the same"):
        capture_module(Checked, ["x=8x16:float"], "fp32", as_on_gpu=False)


def test_what_cannot_be_planned_is_named_where_values_are_assumed_too():
    class Queue(nn.Module):
        """Momentum and a place in a queue, as in MoCo."""

        resizes = False

        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(16, 4), nn.Linear(16, 4).requires_grad_(False)
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.place[0] = (int(self.place) + len(x)) % 64
            self.other.weight.data = self.other.weight.data * 0.9 + self.own.weight.data * 0.1
            made = self.own(x) + self.other(x)
            if self.resizes:
                self.own.bias.data = torch.zeros(3)
            return made

    found = capture_module(Queue, ["x=8x16:float"], "fp32", as_on_gpu=False)
    assert found.written == ("other.weight",)
    assert "other.weight" not in {spec.name for operator in found.operators() for spec in operator.parameters}
    Queue.resizes = True
    with pytest.raises(CaptureError, match=r"gives the parameter own\.bias other data"):
        capture_module(Queue, ["x=8x16:float"], "fp32", as_on_gpu=False)


@pytest.mark.parametrize("number", [1, 2])  # the second function is made after a capture has looked for them
def test_a_function_forgets_what_it_has_kept_of_a_capture(number: int) -> None:
    @functools.lru_cache
    def table(size: int) -> torch.Tensor:
        return number * torch.ones(size)

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * table(len(self.bias))

    before = table(3)
    capture_module(lambda: Scaled(3, 3), ["4x3"], "fp32")
    assert table(3) is before, "only what is kept meanwhile is forgotten"
    capture_module(lambda: Scaled(8, 8), ["4x8"], "fp32")
    assert table.cache_info().currsize == 0

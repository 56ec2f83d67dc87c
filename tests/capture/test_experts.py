"""Mixtures of experts of ``transformers``, in each way they can compute their experts, against what really runs."""

import functools
import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

import ullage
from planner.graph import Batch, Elementwise, Gemm, Kernels, Operator, build_graph
from planner.models.kernels import flop
from ullage.capture import capture_module
from ullage.capture.kernels import kernels_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WAYS = ("eager", "grouped_mm", "batched_mm")
WAYS_AND_TYPES = list(itertools.product(WAYS, DTYPES))
TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 2 * 16, 32, 48, 4, 2
VISITS = TOKENS * CHOSEN
EXPERTS_PATH = "model.layers.0.mlp.experts"


def make(way: str) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=60,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    return MixtralForCausalLM._from_config(config, experts_implementation=way)


@functools.cache
def captured(way: str, dtype: str) -> tuple[Operator, ...]:
    inputs = ["input_ids=2x16:int64", "labels=2x16:int64"]
    model = capture_module(lambda: make(way).to(DTYPES[dtype]), inputs, dtype, as_on_gpu=False)
    return build_graph(model, Batch(2, 16, 2 if dtype == "bf16" else 4))


def experts_of(way: str, dtype: str) -> list[Operator]:
    return [operator for operator in captured(way, dtype) if operator.name.startswith(EXPERTS_PATH)]


def kernels_in(operators: Iterable[Operator], phase: str) -> Kernels:
    return tuple(kernel for operator in operators for kernel in getattr(operator, phase))


def gemms(kernels: Kernels) -> list[Gemm]:
    return [kernel for kernel in kernels if isinstance(kernel, Gemm)]


def moved_bytes(kernels: Kernels) -> int:
    return sum(kernel.num_bytes * kernel.count for kernel in kernels if isinstance(kernel, Elementwise))


@pytest.mark.parametrize(("way", "dtype"), WAYS_AND_TYPES)
def test_products_are_those_of_equal_shares(way: str, dtype: str) -> None:
    """Counted by hand: gate and up in one product, and down; in backward each of them twice."""
    forward, backward = (kernels_in(experts_of(way, dtype), phase) for phase in ("forward", "backward"))
    assert flop(forward) == 2 * VISITS * 3 * HIDDEN * INNER
    assert flop(backward) == 2 * flop(forward)
    share = VISITS // EXPERTS
    up, down = (Gemm(share, *size, EXPERTS, grouped=True) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    found = gemms(forward)
    if way == "grouped_mm":
        assert found == [up, down]
    elif way == "eager":
        one = [Gemm(share, 2 * INNER, HIDDEN), Gemm(share, HIDDEN, INNER)]
        assert found == EXPERTS * one
    else:
        assert found == [
            Gemm(2 * INNER, 1, HIDDEN, VISITS, batched=True),
            Gemm(HIDDEN, 1, INNER, VISITS, batched=True),
        ]


@pytest.mark.parametrize(("way", "dtype"), WAYS_AND_TYPES)
def test_what_autograd_keeps_is_counted(way: str, dtype: str) -> None:
    """By hand, for each visit: what came in; gate and up; the gate activated; their product; what comes out.

    Beside these there are a routing weight and a few indices, and weights that were gathered for each visit.
    """
    element_bytes = DTYPES[dtype].itemsize
    expected = VISITS * (HIDDEN + 2 * INNER + INNER + INNER + HIDDEN) * element_bytes
    if way == "eager":  # what is added to the result
        expected += VISITS * HIDDEN * element_bytes
    elif way == "batched_mm":
        expected += VISITS * 3 * HIDDEN * INNER * element_bytes
    found = sum(operator.saved_bytes for operator in experts_of(way, dtype))
    assert 0 < found - expected <= VISITS * (4 + 4 * 8) + EXPERTS * 16


@pytest.mark.parametrize(("way", "dtype"), WAYS_AND_TYPES)
def test_kernels_are_those_that_really_run(way: str, dtype: str) -> None:
    """In a loop tokens are not in equal shares, and PyTorch makes masks in another way for real tensors."""
    torch.manual_seed(0)
    model = make(way).to(DTYPES[dtype]).train()
    tokens = torch.randint(60, (2, 16))
    for phase in ("forward", "backward"):
        with Kernel() as ran:
            if phase == "forward":
                loss = model(input_ids=tokens, labels=tokens).loss
            else:
                loss.backward()
        recorded = kernels_in(captured(way, dtype), phase)
        assert flop(recorded) == flop(ran.kernels)
        assert moved_bytes(recorded) == pytest.approx(moved_bytes(ran.kernels), rel=0.05 if way == "eager" else 0)


class Kernel(TorchDispatchMode):
    """Lists what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.kernels += kernels_of(func, args, kwargs or {}, output)
        return output


@pytest.mark.parametrize(
    ("function", "passes"),
    [
        (torch.ops.aten.index_put_, [(3 * 4 * 8) * 4 + 4 * 8]),
        (torch.ops.aten.index_put, [(3 * 4 * 8) * 4 + 4 * 8]),
        (torch.ops.aten._index_put_impl_, [(3 * 4 * 8) * 4 + 4 * 8]),
    ],
)
def test_adding_at_rows_touches_these_rows_alone(function, passes) -> None:
    """Values are read, and the rows that they are added to read and written; the rest only if it is copied first.

    Several values of one row are added up before.
    """
    table, rows, values = torch.zeros(64, 8), torch.arange(4), torch.ones(4, 8)
    many = torch.zeros(256, dtype=torch.int64)
    (added,) = kernels_of(torch.ops.aten.index_put_.default, (table, [many], torch.ones(256, 8), True), {}, table)
    assert added.num_bytes == (256 + 2 * 64) * 8 * 4 + 256 * 8
    args = (table, [rows], values, True)
    output = function(*args)
    assert [kernel.num_bytes for kernel in kernels_of(function.default, args, {}, output)] == passes
    args = (table, 0, rows, values)
    copied, added = kernels_of(torch.ops.aten.index_add.default, args, {}, torch.index_add(*args))
    assert [copied.num_bytes, added.num_bytes] == [2 * 64 * 8 * 4, (3 * 4 * 8) * 4 + 4 * 8]


def test_many_tokens_of_one_row_meet() -> None:
    """The gradient of experts' biases: PyTorch adds up the tokens of one expert one after another."""
    biases, tokens = torch.zeros(32, 8), torch.arange(4096) % 32
    args = (biases, [tokens], torch.ones(4096, 8), True)
    (added,) = kernels_of(torch.ops.aten.index_put.default, args, {}, biases)
    assert added.num_meeting == 128
    for few in ((*args[:3], False), (torch.zeros(1024, 8), *args[1:])):
        (written,) = kernels_of(torch.ops.aten.index_put.default, few, {}, few[0])
        assert written.num_meeting == 1


def test_in_a_loop_each_expert_has_a_gradient_as_large_as_the_bank() -> None:
    """PyTorch fills zeros for all experts, copies one's gradient into them, and adds them to those of others."""
    bank_bytes = EXPERTS * 3 * HIDDEN * INNER * 4
    loop, grouped = (moved_bytes(kernels_in(experts_of(way, "fp32"), "backward")) for way in ("eager", "grouped_mm"))
    added = (EXPERTS + 2 + (EXPERTS - 1) * 3) * bank_bytes
    assert loop - grouped == pytest.approx(added, rel=0.05)


def test_a_capture_of_a_loop_is_the_same_each_time() -> None:
    captured.cache_clear()
    first = captured("eager", "fp32")
    captured.cache_clear()
    assert captured("eager", "fp32") == first


class Chosen(torch.nn.Module):
    """Asks integers for their values in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.last = way, torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = {
            "topk": lambda: self.last(x).topk(1).indices,
            "max": lambda: self.last(x).max(-1).indices,
            "argmax": lambda: self.last(x).argmax(-1),
            "argmax of all": lambda: self.last(x).argmax(),
            "arange": lambda: torch.arange(16) // 2,
            "zeros": lambda: torch.zeros(16, 8).scatter(1, self.last(x).topk(1).indices, 1).sum(0).long(),
            "input": x.long,
            "changed": lambda: torch.arange(16).add_(x[:, 0].long()),
            "changed at random": lambda: torch.zeros(16).bernoulli_(),
            "random": lambda: torch.randint(3, (16,)),
            "empty": lambda: torch.empty(16, dtype=torch.int64),
        }[self.way]()
        return self.last(x)[: int((chosen == 3).sum()) + 1].sum()


@pytest.mark.parametrize("way", ["topk", "max", "argmax", "argmax of all", "arange", "zeros"])
def test_values_that_no_input_decides_are_known(way: str) -> None:
    captured = capture_module(lambda: Chosen(way), ["16x8"], "fp32")
    assert (captured.num_params, captured.assumed) == (72, None)


class Written(torch.nn.Module):
    """Writes into known values, a part of them and all, and reads some that were made before that."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        markers = torch.zeros(16, dtype=torch.bool)
        before = markers | False
        markers[2:6] |= ~markers[0]
        markers[3].fill_(False)
        places = torch.arange(16)
        places[8:].add_(places[:8])
        assert (int(markers.sum()), int(before.sum()), int(places.sum())) == (3, 0, 120 + 28)
        assert x[markers].shape == (3, 8)
        return self.last(x[markers]).sum()


def test_values_that_are_written_are_known() -> None:
    assert capture_module(Written, ["16x8"], "fp32").num_params == 72


@pytest.mark.parametrize("way", ["input", "changed", "changed at random", "random", "empty"])
def test_other_values_are_assumed(way: str) -> None:
    (words,) = capture_module(lambda: Chosen(way), ["16x8"], "fp32").assumed or ()
    assert "int((chosen == 3).sum())" in words


def _drawn(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """Scale a layer's output by numbers that are drawn from a table, which no other index fits."""
    table = (2.0, 3.0)
    at = int(torch.empty(1).uniform_(1.0, 2.0).item()), int(torch.randint(0, 2, (1,)))
    assert sorted(torch.randperm(2).tolist()) == [0, 1]
    if float(torch.rand(1, generator=torch.Generator())) >= 1.0:
        raise ValueError("a number out of range")
    scaled: torch.Tensor = layer(x).sum() * table[at[0]] * table[at[1]]
    return scaled


class Drawing(torch.nn.Module):
    """Draws what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _drawn(x, self.last)


def test_random_numbers_have_the_range_of_their_operator_and_take_none_of_the_users() -> None:
    before = torch.get_rng_state()
    (words,) = capture_module(Drawing, ["16x8"], "fp32").assumed or ()
    assert "uniform_(1.0, 2.0)" in words
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_reads_the_numbers_that_it_draws() -> None:
    """But a metric that it logs is no number of the plan's."""
    model = torch.nn.Linear(8, 8)
    model, optimizer = ullage.prepare(
        model,
        torch.optim.SGD(model.parameters()),
        torch.randn(16, 8),
        step=lambda model, x: _drawn(x, model),
        hardware="epyc-turin-2c",
    )
    optimizer.session.close()


class Exchanging(torch.nn.Module):
    """Scales its loss by a number that it has from all ranks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.last, self.way = torch.nn.Linear(8, 8), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, found = torch.tensor([3.0]), torch.zeros(1)
        if self.way == "sum":
            dist.all_reduce(count)
        elif self.way == "gather":
            dist.all_gather([found], count)
        else:
            count = functional_collectives.all_reduce(count, "sum", dist.group.WORLD)
        return self.last(x).sum() / (count + found).item()


@pytest.mark.parametrize("way", ["sum", "gather", "functional"])
def test_collectives_of_a_forward_do_not_run_in_its_capture(way: str) -> None:
    """Of several ranks, one captures alone, and would wait for the others for ever. So their results are not known."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        words = capture_module(lambda: Exchanging(way), ["16x8"], "fp32").assumed or ()
    finally:
        dist.destroy_process_group()
    assert any("(count + found).item()" in line for line in words)

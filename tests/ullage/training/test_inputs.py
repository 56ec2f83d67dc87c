"""``ullage.prepare`` with batches of any form: no common leading dimension, and tensors inside other objects."""

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.utils import ModelOutput

import ullage
from hwprofiles.registry import load_profile
from planner.models.kernels import Gemm
from ullage.this_machine.planning import capture_live

WIDTH = 32


@dataclasses.dataclass
class Condition:
    scale: torch.Tensor
    more: list[torch.Tensor]
    note: str = "none"


@dataclasses.dataclass
class Hidden:
    """What blocks may give to each other."""

    x: torch.Tensor


@dataclasses.dataclass
class Output(ModelOutput):
    scale: torch.Tensor | None = None
    more: tuple[torch.Tensor, ...] | None = None


Pair = collections.namedtuple("Pair", ["scale", "more"])  # noqa: PYI024
FORMS: dict[str, Callable[[torch.Tensor, list[torch.Tensor]], Any]] = {
    "dict": lambda scale, more: {"scale": scale, "more": more},
    "dataclass": Condition,
    "ModelOutput": lambda scale, more: Output(scale=scale, more=tuple(more)),
    "named tuple": Pair,
    "encoding": lambda scale, more: transformers.BatchEncoding({"scale": scale, "more": more}),
}


class Block(nn.Module):
    """Takes what it computes with in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, given: Any, condition: Any) -> Any:
        x = given.x if isinstance(given, Hidden) else given
        get = condition.get if isinstance(condition, dict) else lambda name: getattr(condition, name)
        scale, more = get("scale"), get("more")
        x = x + self.down(torch.relu(self.up(x) * scale)) + more[0] - more[1]
        return Hidden(x) if isinstance(given, Hidden) else x


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor, condition: Any) -> Any:
        x = self.first(x)
        hidden: Any = Hidden(x) if isinstance(condition, Condition) else x
        for block in self.blocks:
            hidden = block(hidden, condition)
        loss = self.last(getattr(hidden, "x", hidden)).square().mean()
        return Hidden(loss) if isinstance(condition, Condition) else loss


class Graph(nn.Module):
    """Sums over edges; the numbers of nodes, edges and graphs have nothing in common, and one input is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in "abcd"
        )

    def forward(
        self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, times: int = 1
    ) -> torch.Tensor:
        x = self.first(nodes)
        for block in self.blocks:
            x = x + torch.zeros_like(x).index_add(0, edges[1], block(x)[edges[0]]) * weight
        graphs = x[: len(labels) * 2].view(len(labels), 2, -1).sum(1) * times
        return nn.functional.cross_entropy(self.last(graphs), labels.long())


def graph(size: int) -> dict[str, Any]:
    labels = torch.randint(4, (size // 3,)).to(torch.uint8)
    edges = torch.randint(size, (2, 3 * size)) if size != 7 else torch.zeros(2, 0, dtype=torch.long)
    return {"nodes": torch.randn(size, 16), "edges": edges, "labels": labels, "weight": torch.tensor(0.5), "times": 2}


def conditioned(form: str, size: int) -> tuple[Any, ...]:
    more = [torch.randn(WIDTH), torch.randn(size, 1)]
    return torch.randn(size, 16), FORMS[form](torch.rand(1, 2 * WIDTH), more)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = output.x if isinstance(output, Hidden) else output
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("form", [*FORMS, "graph"])
def test_batches_of_any_form_and_size_train_as_in_memory(form: str) -> None:
    torch.manual_seed(0)
    model = Graph() if form == "graph" else Conditioned()
    batches: list[Any] = [graph(n) if form == "graph" else conditioned(form, 4 * n) for n in (12, 12, 9, 7, 12)]
    alone = copy.deepcopy(model)
    expected = run(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = copy.deepcopy(batches[0])
    machine = load_profile("epyc-turin-2c")
    model, optimizer = ullage.prepare(
        model, optimizer, batches[0], hardware=machine, device_memory=120_000 if form == "graph" else 150_000
    )
    decided = optimizer.plan.decisions.units.values()
    assert any(unit.params == "host" for unit in decided)
    assert form == "graph" or any(unit.activations != "keep" for unit in decided)
    assert str(before) == str(batches[0])
    whole = []
    with optimizer.session as session:
        losses = []
        for batch in batches:
            losses += run(model, optimizer, [batch])
            whole.append(session.driver.last_was_whole)
        assert losses == pytest.approx(expected, rel=1e-6)
        assert session.num_left == 0
        assert whole == [True, True, False, False, True]
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def test_a_batch_without_a_common_dimension_has_one_size() -> None:
    captured = capture_live(Graph(), graph(12))
    assert [str(spec) for spec in captured.inputs] == [
        "nodes=12x16:float",
        "edges=2x36:int64",
        "labels=4:uint8",
        "weight=:float",
    ]
    assert (captured.micro_batch, captured.seq_len, captured.inputs[2].num_values) == (12, 1, 4)
    specs = ["12x16", "2x36:int64", "4:uint8"]
    free = ullage.capture_module(NoWeight(), specs, "fp32", as_on_gpu=False)
    assert not free.is_free
    with pytest.raises(ValueError, match="was captured for micro-batch 12, not 24; ask for micro_batch=12"):
        ullage.plan(free, hardware="epyc-turin-2c", micro_batch=24)


class NoWeight(Graph):
    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(nodes, edges, labels, nodes.new_ones(()))


class Listed(nn.Module):
    """Reads, as Qwen-VL does, which tokens that a mask leaves are images."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.sight = nn.Embedding(8, WIDTH), nn.Linear(16, WIDTH)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        count = sum(sum(token == 1 for token in row[kept].tolist()) for row, kept in zip(ids, mask.bool(), strict=True))
        return self.tokens(ids).square().mean() + self.sight(patches[:count]).square().mean()


def test_values_behind_a_mask_are_those_of_the_example_batch() -> None:
    ids, mask = torch.tensor([[1, 1, 2, 3], [1, 2, 3, 1]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    captured = capture_live(Listed(), {"ids": ids, "mask": mask, "patches": torch.randn(5, 16)})
    products = [kernel for operator in captured.operators() for kernel in operator.forward if isinstance(kernel, Gemm)]
    assert [product.m for product in products] == [3]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(16, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        return self.last(self.rnn(packed)[1][0][-1]).square().mean()


def test_packed_sequences_train_as_in_memory() -> None:
    losses: dict[bool, list[float]] = {}
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [pack_sequence([torch.randn(n, 16) for n in (7 - step, 3, 1)]) for step in range(3)]
        if is_planned:
            model, optimizer = ullage.prepare(model, optimizer, (batches[0],), hardware="epyc-turin-2c")
        losses[is_planned] = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[is_planned].append(loss.item())
        if is_planned:
            optimizer.session.close()
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)

"""Operators whose cost or shapes a capture does not know: it assumes them, says so, and models train as in memory."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ullage

PROFILE = "epyc-turin-2c"
PRICED, ASSUMED = "priced by the bytes that they move", "the plan assumes some"


@torch.library.custom_op("ullage_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_autograd(lambda _context, gradient: 2 * gradient)


class Of(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(32, 32), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


class Wide(nn.Module):
    """Its weights are too large for a capture to read them, so what is computed from them is not known."""

    def __init__(self, forward: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.wide, self.function = nn.Linear(16, 2048), forward
        self.layers = nn.ModuleDict({**layers, "last": nn.Linear(2048, 8)})

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.wide, *self.layers.values(), *inputs)


class Spread(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)

    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(graph, x))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 32, sparse=True)
        self.last = nn.ModuleList(Spread(32) for _ in range(2))
        self.register_buffer("graph", GRAPH.to_sparse_csr())

    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(self.graph, self.rows(x))
        for layer in self.last:
            x = layer(x, graph)
        return x


class Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.last = kind(16, 128, batch_first=True), nn.Linear(128, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows, _ = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.last(pad_packed_sequence(rows, batch_first=True, total_length=x.shape[1])[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x)[0])


def chosen(self: nn.Module, wide: nn.Linear, last: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = wide(x)
    if y.isnan().any() or not (y.abs() < 1e3).all():
        raise ValueError("training has diverged")
    self.largest = y.abs().max().item()
    kept = y > 0
    y = y.masked_scatter(~kept, y[~kept] / 2) + torch.from_numpy(y.detach().numpy().mean(0))
    return last(y) * len(y.detach().round().unique()) / y.numel()


def classified(
    _self: nn.Module, wide: nn.Linear, last: nn.Linear, x: torch.Tensor, *labels: torch.Tensor
) -> torch.Tensor:
    return functional.ctc_loss(last(wide(x)).log_softmax(-1).transpose(0, 1), *labels)


def blocks(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    inner = lambda: nn.Sequential(Of(function), nn.Linear(32, 32))  # noqa: E731
    return lambda: nn.Sequential(nn.Linear(16, 32), *(inner() for _ in range(4)), nn.Linear(32, 8))


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.polar(torch.ones(5, 32), x[0, :5]), n=8, dim=1)


def inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x[:, :8, :8] @ x[:, :8, :8].mT + torch.eye(8)) @ x


GRAPH = (torch.arange(64).reshape(8, 8) % 3 == 0).float()
ROWS, LENGTHS = torch.rand(8, 8, 16), torch.tensor([8, 3, 8, 1, 5, 5, 7, 2])
LABELS = (torch.randint(1, 8, (8, 3)), LENGTHS.clamp(min=6), torch.tensor([3, 2, 1, 3, 3, 0, 2, 1]))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], str, tuple[str, ...]]] = {
    "fft": (blocks(spectrum), (ROWS,), "120kB", (PRICED, "aten._fft_r2c in module 1.0, ")),
    "linear algebra": (blocks(inverse), (ROWS,), "90kB", (PRICED, "aten.linalg_inv_ex in module 1.0;")),
    "no fake kernel": (blocks(doubled), (ROWS,), "75kB", (PRICED, "ullage_tests.doubled in module 1.0;")),
    "recurrent": (Recurrent, (ROWS,), "450kB", (PRICED, "aten.mkldnn_rnn_layer in module layer;")),
    "packed": (lambda: Packed(nn.LSTM), (ROWS, LENGTHS), "1.7MB", ()),
    "sparse": (Sparse, (torch.arange(8) % 5, GRAPH.to_sparse()), "60kB", (PRICED, "aten._sparse_addmm;")),
    "labels": (lambda: Wide(classified), (ROWS, *LABELS), "3MB", ()),
    "values": (lambda: Wide(chosen), (ROWS[:, 0],), "1.5MB", (ASSUMED, "line 91: if y.isnan().any() ")),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", MODELS)
def test_what_a_capture_does_not_know_is_assumed_and_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a plan with little memory, weights are those of training in memory."""
    make, batch, memory, words = MODELS[name]
    found: list[dict[str, torch.Tensor]] = []
    for prepares in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if prepares:
            model, optimizer = ullage.prepare(model, optimizer, batch, hardware=PROFILE, device_memory=memory)
        for _ in range(3):
            output = model(*batch)
            (output.square().mean() if output.dim() else output).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({key: values.clone() for key, values in model.state_dict().items()})
    optimizer.session.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    told = [line for line in capsys.readouterr().err.splitlines() if "audit" not in line]
    assert len(told) == bool(words)
    assert all(part in "".join(told) for part in words)
    assert optimizer.plan.warnings[-1:] == tuple(line.removeprefix("ullage: ") for line in told)

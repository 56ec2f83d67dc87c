"""Operators that few plans have a price for, and those whose shapes or values depend on data."""

import torch
import torch.nn.functional as F
from program_catalogue import Trained, registry, seeded, train
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PROGRAMS, program = registry()


def x_of(*shape: int):
    return lambda step: (torch.randn(*shape, generator=seeded(step)),)


def ids(step: int) -> tuple[torch.Tensor]:
    return (torch.randint(1, 40, (4, 10), generator=seeded(step)),)


class Residual(nn.Module):
    """Adds what a function makes of a linear layer's output."""

    def __init__(self, function, width: int = 64) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(width, width), function

    def forward(self, x):
        return x + self.function(self.linear(x))


def stack(function, *, blocks: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), *(Residual(function) for _ in range(blocks)), nn.Linear(64, 8))


@program
def lstm(ullage) -> Trained:
    """nn.LSTM, two layers, both directions."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True), nn.Linear(64, 8)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    return train(ullage, Net(), x_of(4, 10, 16))


@program
def gru_on_packed_sequences(ullage) -> Trained:
    """nn.GRU on packed sequences."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(40, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 8)

        def forward(self, tokens, lengths):
            packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
            return self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])

    return train(ullage, Net(), lambda step: (*ids(step), torch.tensor([10, 7, 9, 3], device="cpu")))


@program
def packed_inputs(ullage) -> Trained:
    """nn.LSTM in a model that is given packed sequences, of other lengths in each step."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)

        def forward(self, packed):
            return self.out(self.rnn(packed)[1][0][-1])

    def packed(step: int):
        rows = torch.randn(3, 9, 16, generator=seeded(step))
        return (pack_padded_sequence(rows, torch.tensor([9 - step, 4, 2], device="cpu"), batch_first=True),)

    return train(ullage, Net(), packed)


@program
def lstm_cells(ullage) -> Trained:
    """A loop over nn.LSTMCell."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTMCell(16, 32), nn.Linear(32, 8)

        def forward(self, x):
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return self.out(state[0])

    return train(ullage, Net(), x_of(4, 10, 16))


@program
def fourier_mixing(ullage) -> Trained:
    """FNet: Fourier transforms in place of attention."""
    return train(ullage, stack(lambda x: torch.fft.fft2(x).real), x_of(4, 12, 16))


@program
def spectral_convolution(ullage) -> Trained:
    """A Fourier neural operator: complex weights on the modes of rfft."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.weight, self.out = (
                nn.Linear(16, 64),
                nn.Parameter(torch.randn(7, 64, 2) * 0.1),
                nn.Linear(64, 8),
            )

        def forward(self, x):
            h = self.embed(x)
            modes = torch.fft.rfft(h, dim=1) * torch.view_as_complex(self.weight)
            return self.out(h + torch.fft.irfft(modes, n=h.shape[1], dim=1))

    return train(ullage, Net(), x_of(4, 12, 16))


@program
def complex_parameters(ullage) -> Trained:
    """Weights of a complex type."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(16, 64), nn.Linear(64, 8)
            self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat) / 8)

        def forward(self, x):
            h = self.embed(x)
            return self.out((h.to(torch.cfloat) @ self.weight).abs())

    return train(ullage, Net(), x_of(8, 16))


@program
def connectionist_loss(ullage) -> Trained:
    """F.ctc_loss in forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 12))

        def forward(self, x, targets):
            scores = self.layers(x).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), targets.shape[1])
            return F.ctc_loss(scores, targets, *lengths)

    targets = lambda step: torch.randint(1, 12, (4, 5), generator=seeded(step))
    return train(ullage, Net(), lambda step: (*x_of(4, 20, 16)(step), targets(step)))


@program
def sparse_gradients(ullage) -> Trained:
    """nn.Embedding(sparse=True) with SGD."""
    model = nn.Sequential(nn.Embedding(40, 32, sparse=True), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def loop(ullage) -> Trained:
        planned, optimizer = ullage.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ids(0))
        losses = []
        for step in range(4):
            loss = planned(*ids(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, planned

    return loop(ullage)


@program
def embeddings_of_bounded_norm(ullage) -> Trained:
    """nn.Embedding(max_norm=1), which changes its weight in forward."""
    model = nn.Sequential(nn.Embedding(40, 32, max_norm=1.0), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    return train(ullage, model, ids)


@program
def embedding_bags(ullage) -> Trained:
    """nn.EmbeddingBag."""
    return train(ullage, nn.Sequential(nn.EmbeddingBag(40, 32), nn.ReLU(), nn.Linear(32, 8)), ids)


@program
def residuals_in_place(ullage) -> Trained:
    """x.add_(f(x)) on the residual stream."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x.add_(self.down(F.gelu(self.up(self.norm(x.clone())))))

    model = nn.Sequential(nn.Linear(16, 64), *(InPlace() for _ in range(4)), nn.Linear(64, 8))
    return train(ullage, model, x_of(4, 32, 16))


@program
def sorting(ullage) -> Trained:
    """sort, topk, gather, cumsum."""
    return train(ullage, stack(lambda x: x.sort(-1).values.cumsum(-1) * 0.1 + x.topk(64, -1).values), x_of(8, 16))


@program
def distances(ullage) -> Trained:
    """cdist, einsum, logsumexp."""
    return train(ullage, stack(lambda x: torch.einsum("ab,bc->ac", torch.cdist(x, x).softmax(-1), x)), x_of(32, 16))


@program
def linear_algebra(ullage) -> Trained:
    """solve, inverse and determinant of small matrices."""

    def solved(x):
        matrix = x.T @ x / len(x) + torch.eye(x.shape[-1])
        return torch.linalg.solve(matrix, x.T).T + torch.linalg.slogdet(matrix).logabsdet * 1e-3

    return train(ullage, stack(solved, blocks=2), x_of(32, 16))


@program
def sampling_grids(ullage) -> Trained:
    """A spatial transformer: affine_grid and grid_sample."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.find, self.out = nn.Linear(3 * 64, 6), nn.Conv2d(3, 4, 3)

        def forward(self, x):
            theta = self.find(x.flatten(1)).view(-1, 2, 3)
            return self.out(F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False))

    return train(ullage, Transformer(), x_of(4, 3, 8, 8))


@program
def selected_rows(ullage) -> Trained:
    """Boolean masks: as many rows as the data has."""

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.out = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x):
            h = self.embed(x)
            chosen = h.mean(-1) > 0
            h = h.clone()
            h[chosen] = self.inner(h[chosen])
            return self.out(h)

    return train(ullage, Selects(), x_of(32, 16))


@program
def unique_values(ullage) -> Trained:
    """unique, bincount and index_add on integers."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(40, 32), nn.Linear(32, 8)

        def forward(self, tokens):
            _, where = tokens.flatten().unique(return_inverse=True)
            rows = self.embed(tokens).flatten(0, 1)
            return self.out(torch.zeros(40, 32).index_add(0, where, rows))

    return train(ullage, Counts(), ids)


@program
def graphs(ullage) -> Trained:
    """A graph network: edges have another leading dimension than nodes."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x, edges):
            for layer in (self.first, self.second):
                h = torch.relu(layer(x))
                x = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            return self.out(x)

    edges = lambda step: torch.randint(12, (2, 30), generator=seeded(step))
    return train(ullage, Graph(), lambda step: (*x_of(12, 16)(step), edges(step)))


@program
def nested_inputs(ullage) -> Trained:
    """Inputs in dicts, lists and tuples."""

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.out = (
                nn.Linear(16, 64),
                nn.ModuleList(nn.Linear(64, 64) for _ in range(3)),
                nn.Linear(64, 8),
            )

        def forward(self, x, cond):
            h = self.embed(x) + cond["text"]["pooled"]
            for block, skip in zip(self.blocks, cond["skips"], strict=True):
                h = torch.relu(block(h)) + skip
            return self.out(h)

    def batch(step: int):
        of = seeded(step)
        text = {"pooled": torch.randn(8, 64, generator=of)}
        return {
            "x": torch.randn(8, 16, generator=of),
            "cond": {"text": text, "skips": [torch.randn(8, 64, generator=of) for _ in range(3)]},
        }

    return train(ullage, Conditioned(), batch)


@program
def numpy_inside(ullage) -> Trained:
    """Forward that computes a constant with NumPy."""
    import numpy as np

    return train(
        ullage,
        stack(lambda x: x * torch.from_numpy(np.hanning(x.shape[-1]).astype("float32")).to(x.device)),
        x_of(8, 16),
    )


class TwoWays(torch.autograd.Function):
    """Two outputs of one node, whose backward does not ask for the gradient of the one that is not used."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return 2 * x, x.sum(-1)

    @staticmethod
    def backward(_ctx, of_values, _of_sum):
        return 2 * of_values


@program
def outputs_that_nothing_uses(ullage) -> Trained:
    """A module that returns two outputs of one node, of which one is not used, as cuDNN's LSTM does."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return TwoWays.apply(self.linear(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.out = nn.ModuleList(Both() for _ in range(3)), nn.Linear(16, 8)

        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x)
            return self.out(x)

    return train(ullage, Net(), x_of(8, 16))


@program
def own_operator(ullage) -> Trained:
    """An operator of torch.library.custom_op."""
    name = "own_operators::scaled"
    if not hasattr(torch.ops.own_operators, "scaled"):

        @torch.library.custom_op(name, mutates_args=())
        def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
            return x * by

        scaled.register_fake(lambda x, by: torch.empty_like(x))
        scaled.register_autograd(
            lambda ctx, gradient: (gradient * ctx.by, None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
        )
    return train(ullage, stack(lambda x: torch.ops.own_operators.scaled(x, 0.5)), x_of(8, 16))


@program
def vmapped(ullage) -> Trained:
    """torch.func.vmap inside forward."""
    return train(ullage, stack(torch.func.vmap(lambda row: row.softmax(-1) * row.norm())), x_of(8, 16))


@program
def autocast_inside(ullage) -> Trained:
    """autocast for a part of forward."""

    def half(x):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.T @ x).float() * 1e-2

    return train(ullage, stack(half), x_of(8, 16))


@program
def tangents(ullage) -> Trained:
    """torch.func.jvp of a layer inside forward."""

    class Tangents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)

        def forward(self, x):
            x = torch.tanh(self.first(x))
            out, tangent = torch.func.jvp(self.last, (x,), (torch.ones_like(x),))
            return out + 0.1 * tangent

    return train(ullage, Tangents(), x_of(32, 16))


class Scaled(nn.Module):
    """Runs its blocks and its head with weights that are made of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(torch.tanh) for _ in range(5))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        weight = 2 * self.head.weight
        for block in self.blocks:
            made = {name: 1.1 * value for name, value in block.named_parameters()}
            x = torch.func.functional_call(block, made, (x,))
        return torch.func.functional_call(self.head, {"weight": weight}, (x,))


@program
def weights_that_forward_makes(ullage) -> Trained:
    """torch.func.functional_call of blocks inside forward, whose head's weight is read before all of them."""
    return train(ullage, Scaled(), x_of(8, 64))


class SparseLinear(nn.Module):
    """Trains the values of a sparse weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rows, columns = torch.arange(width), torch.arange(width)
        self.register_buffer("places", torch.stack([rows, (columns * 7 + 3) % width]))
        self.values = nn.Parameter(torch.randn(width))

    def forward(self, x):
        weight = torch.sparse_coo_tensor(self.places, self.values, (len(self.values),) * 2).coalesce()
        return torch.sparse.mm(weight, x.t()).t() if weight._nnz() else x


@program
def sparse_weights(ullage) -> Trained:
    """RigL and FRoD: sparse weights are made of their values, coalesced and multiplied."""
    return train(
        ullage, nn.Sequential(nn.Linear(16, 64), *(SparseLinear(64) for _ in range(3)), nn.Linear(64, 8)), x_of(8, 16)
    )


@program
def texts_alone(ullage) -> Trained:
    """A batch of texts and trees without a tensor: the model makes numbers of them."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters, self.join = nn.Embedding(32, 64), nn.Linear(128, 64)
            self.rest = nn.Sequential(*(Residual(F.gelu) for _ in range(3)), nn.Linear(64, 8))

        def node(self, tree):
            if isinstance(tree, str):
                return self.letters(torch.tensor([ord(letter) % 32 for letter in tree])).mean(0)
            return self.join(torch.cat([self.node(part) for part in tree]))

        def forward(self, trees):
            return self.rest(torch.stack([self.node(tree) for tree in trees]))

    batches = [[("ab", "c"), ("abc", ("d", "ef")), "gh"], [("a", "bc"), "d", "efg"], ["h", ("ij", "k"), ("l", "m")]]
    return train(ullage, Reads(), lambda step: {"trees": batches[step % 3]})


@program
def indices_in_a_list(ullage) -> Trained:
    """UDOP: rows and columns of a table are tuples of numbers, each a tensor; patches with text are left out."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = stack(F.gelu)

        def forward(self, x, places):
            rows, columns = zip(*places.long(), strict=True)
            keep = torch.ones_like(x, dtype=torch.bool)
            keep[rows, columns] = False
            return self.rest(x * keep + x[rows, columns].mean())

    def batch(step: int):
        return torch.randn(8, 16, generator=seeded(step)), torch.randint(8, (5, 2), generator=seeded(step)).float()

    return train(ullage, Places(), batch)


@program
def sizes_drawn_in_a_planned_step(ullage) -> Trained:
    """Detectors of torchvision draw the size of each image from a tuple, by ``uniform_`` and ``item``."""

    def step(model, batch):
        images, labels = batch
        sizes = (6,)  # of which each may have its turn
        size = sizes[int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())]
        return F.cross_entropy(model(F.adaptive_avg_pool2d(images, size)), labels)

    def batch(step: int):
        return torch.randn(8, 3, 16, 16, generator=seeded(step)), torch.arange(8)

    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0), step=step)
    losses = []
    for number in range(4):
        loss = step(model, batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model

"""What cannot be trained is refused while it is captured, and what can be is not: capture against PyTorch itself.

Fake tensors are laxer than real ones, so each module is trained for one step on real tensors, and captured.
"""

import collections
import contextlib
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from own_models import Frozen
from torch import Tensor, nn
from torch.nn import functional

import ullage
from planner.models.captured import CapturedInput
from ullage.capture import capture_module, operator_checks
from ullage.capture.recording import find_loss
from ullage.capture.records import CaptureError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TYPES = ("float", "int64", "int32", "bool")


class Of(nn.Module):
    """A module of some layers and a function of them and the inputs."""

    def __init__(self, forward: Callable[..., object], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers or {"last": nn.Linear(8, 8)})
        self.function = forward

    def forward(self, *args: Tensor) -> object:
        return self.function(*self.layers.values(), *args)


# Modules with one input of 4 x 8, which has each of the types in turn.
OF_ONE_INPUT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "linear without bias": lambda: nn.Linear(8, 8, bias=False),
    "embedding": lambda: nn.Embedding(8, 8),
    "bag": lambda: nn.EmbeddingBag(8, 8),
    "layer norm": lambda: nn.LayerNorm(8),
    "rms norm": lambda: nn.RMSNorm(8),
    "plain norm": lambda: Of(lambda last, x: last(functional.layer_norm(x, (8,)).to(last.weight.dtype))),
    "softmax": lambda: Of(lambda last, x: last(x.softmax(-1).to(last.weight.dtype))),
    "gelu": lambda: Of(lambda last, x: last(functional.gelu(x).to(last.weight.dtype))),
    "silu": lambda: Of(lambda last, x: last(functional.silu(x).to(last.weight.dtype))),
    "sigmoid": lambda: Of(lambda last, x: last(x.sigmoid().to(last.weight.dtype))),
    "dropout": lambda: Of(lambda last, x: last(functional.dropout(x, 0.5).to(last.weight.dtype))),
    "mean": lambda: Of(lambda last, x: last(x.to(last.weight.dtype)) * x.mean()),
    "negative": lambda: Of(lambda last, x: last((-x).to(last.weight.dtype))),
    "difference": lambda: Of(lambda last, x: last((x - x).to(last.weight.dtype))),
    "cumulated": lambda: Of(lambda last, x: last(x.cumsum(-1).to(last.weight.dtype))),
    "product of inputs": lambda: Of(lambda last, x: last((x @ x.T @ x).to(last.weight.dtype))),
    "batched product": lambda: Of(lambda last, x: torch.bmm(x[None], last.weight[None])),
    "einsum": lambda: Of(lambda last, x: torch.einsum("ij,kj->ik", x, last.weight)),
    "product of elements": lambda: Of(lambda last, x: last.weight[:4] * x),
    "in place": lambda: Of(lambda last, x: last(x.to(last.weight.dtype)).mul_(x)),
    "integers in place": lambda: Of(lambda last, x: last((x.add_(0.5)).to(last.weight.dtype))),
    "mask": lambda: Of(lambda last, x: last.weight[:4].masked_fill(x, 0.0)),
    "choice": lambda: Of(lambda last, x: torch.where(x, last.weight[:4], 0.0)),
    "index": lambda: Of(lambda last, x: last.weight[x]),
    "gather": lambda: Of(lambda last, x: last.weight.gather(0, x)),
    "add at": lambda: Of(lambda last, x: last.weight.index_add(0, x[:, 0], last.weight[:4])),
    "one hot": lambda: Of(lambda last, x: last(functional.one_hot(x, 8).to(last.weight.dtype))),
    "convolution": lambda: Of(lambda conv, x: conv(x[None]), conv=nn.Conv1d(4, 4, 3)),
    "pool": lambda: Of(lambda last, x: last(functional.avg_pool1d(x, 3, 1, 1).to(last.weight.dtype))),
    "maximal pool": lambda: Of(lambda last, x: last(functional.max_pool2d(x[None], 3, 1, 1)[0].to(last.weight.dtype))),
    "interpolated": lambda: Of(
        lambda last, x: last(functional.interpolate(x[None], 8, mode="linear")[0].to(last.weight.dtype))
    ),
    "attention": lambda: Of(lambda last, x: functional.scaled_dot_product_attention(x, last.weight[:4], x)),
    "bias of attention": lambda: Of(
        lambda last, x: functional.scaled_dot_product_attention(
            *3 * [last.weight.expand(4, 1, 8, 8)], x[:, None, None, :].expand(4, 1, 8, 8)
        )
    ),
    "multi-head": lambda: Of(lambda mha, x: mha(x[None], x[None], x[None])[0], mha=nn.MultiheadAttention(8, 2)),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "classes": lambda: Of(lambda last, x: functional.cross_entropy(last.weight[:4], x[:, 0])),
    "shares of classes": lambda: Of(lambda last, x: functional.cross_entropy(last.weight[:4], x)),
    "squares": lambda: Of(lambda last, x: functional.mse_loss(last.weight[:4], x)),
    "entropy of two": lambda: Of(lambda last, x: functional.binary_cross_entropy_with_logits(last.weight[:4], x)),
    "divergence": lambda: Of(lambda last, x: functional.kl_div(last.weight[:4], x)),
    "joined": lambda: Of(lambda last, x: torch.cat([last.weight, x])),
    "top": lambda: Of(lambda last, x: last(x.topk(8).values.to(last.weight.dtype))),
    "sorted": lambda: Of(lambda last, x: last(x.sort().values.to(last.weight.dtype))),
    "power": lambda: Of(lambda last, x: last((x**2).to(last.weight.dtype))),
    "remainder": lambda: Of(lambda last, x: last(x.fmod(3).to(last.weight.dtype))),
    "bits": lambda: Of(lambda last, x: last((x & 1).to(last.weight.dtype))),
    "clipped": lambda: Of(lambda last, x: last(x.clamp(0, 3).to(last.weight.dtype))),
    "scattered": lambda: Of(lambda last, x: torch.zeros(4, 8).scatter(1, x, last.weight[:4])),
    "grouped product": lambda: Of(
        lambda last, x: torch._grouped_mm(x, last.weight[None], offs=torch.tensor([4], dtype=torch.int32))
    ),
}

# Modules of one floating input of 4 x 8.
OF_NUMBERS: dict[str, Callable[[], nn.Module]] = {
    "normalized": lambda: Of(lambda last, x: functional.normalize(last(x), dim=-1)),
    "cosines": lambda: Of(lambda last, x: functional.cosine_similarity(last(x), x)),
    "half": lambda: Of(lambda last, x: last(x.half())),
    "double": lambda: Of(lambda last, x: last(x.double())),
    "all in half": lambda: Of(lambda last, x: functional.linear(x.half(), last.weight.half())),
    "all in double": lambda: Of(lambda last, x: functional.linear(x.double(), last.weight.double())),
    "fp32 beside the weights": lambda: Of(lambda last, x: functional.linear(x.float(), last.weight)),
    "bf16 beside the weights": lambda: Of(lambda last, x: last(x.bfloat16())),
    "fp32 keys": lambda: Of(
        lambda last, x: functional.scaled_dot_product_attention(x, last.weight[:4].float(), x.float())
    ),
    "complex": lambda: Of(
        lambda last, x: torch.view_as_real(torch.view_as_complex(last(x).float().view(4, 4, 2)) * 1j)
    ),
    "complex weights": lambda: Of(lambda last, x: last(x.to(torch.complex64))),
    "a complex output": lambda: Of(lambda last, x: torch.view_as_complex(last(x).float().view(4, 4, 2))),
    "a complex loss": lambda: Of(lambda last, x: torch.view_as_complex(last(x).float().view(4, 4, 2)).sum()),
    "too few channels": lambda: Of(lambda conv, x: conv(x[None]), conv=nn.Conv1d(3, 4, 3)),
    "a kernel larger than its input": lambda: Of(lambda conv, x: conv(x[None]), conv=nn.Conv1d(4, 4, 9)),
    "other sizes": lambda: nn.Linear(9, 8),
    "another width": lambda: nn.LayerNorm(7),
    "too many of the top": lambda: Of(lambda last, x: last(x).topk(9).values),
    "written where it is expanded": lambda: Of(
        lambda last, x: last.weight + torch.zeros(1, 8).expand(8, 8).add_(x.sum())
    ),
    "a parameter in place": lambda: Of(lambda last, x: last.weight.add_(x.sum())),
    "needed and overwritten": lambda: Of(lambda last, x: (last(x).exp_() * last(x).exp().zero_()).exp_().add_(1)),
    "kept and overwritten": lambda: Of(lambda last, x: overwritten(last(x))),
    "rows that begin at 16 bytes": lambda: Of(
        lambda last, x: torch._grouped_mm(x[:, :3], last.weight[None, :3, :], offs=torch.tensor([4], dtype=torch.int32))
    ),
    "rows that do not": lambda: Of(
        lambda last, x: torch._grouped_mm(
            x[:, :3].contiguous(), last.weight[None, :3, :], offs=torch.tensor([4], dtype=torch.int32)
        )
    ),
    "detached": lambda: Of(lambda last, x: last(x).detach()),
    "integers": lambda: Of(lambda last, x: last(x).long()),
    "nothing of the parameters": lambda: Of(lambda _last, x: x.sum()),
    "nothing but a new leaf": lambda: Of(lambda _last, x: x.sum() + torch.zeros((), requires_grad=True)),
    "nothing": lambda: Of(lambda _last, _x: None),
    "text": lambda: Of(lambda _last, _x: "a loss"),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "several numbers": lambda: Of(lambda last, x: {"loss": last(x).mean(-1)}),
    "another device": lambda: Of(lambda last, x: last(x) + torch.zeros(8, device="meta")),
    "steps": lambda: Of(lambda last, x: last(x).round()),
    "rounded on the way": lambda: Of(lambda last, x: torch.special.bessel_j0(last(x))),
    "no derivative": lambda: Of(lambda last, x: torch.special.airy_ai(last(x).float())),
    "next number": lambda: Of(lambda last, x: torch.nextafter(last(x), last(x) + 1)),
}

# Operators that are tried on small tensors show what is wrong with their types, and not with their shapes.
WRONG_IN_SHAPE_ALONE = {"written where it is expanded", "rows that do not"}


def overwritten(y: Tensor) -> Tensor:
    z = y.exp()
    z.mul_(2)
    return z.sum()


def trained(make: Callable[[], nn.Module], spec: CapturedInput, dtype: torch.dtype) -> str:
    """Train one step in memory; return what is wrong with that, if anything."""
    torch.manual_seed(0)
    model = make().to(dtype).train()
    if spec.dtype == "float":
        x = torch.randn(spec.shape).to(dtype)
    else:
        x = torch.randint(2, spec.shape).to(getattr(torch, spec.dtype))
    try:
        find_loss(model(x))[0].backward()
    except Exception as error:  # noqa: BLE001 - whatever PyTorch raises
        return str(error) or type(error).__name__
    return "" if any(p.grad is not None for p in model.parameters()) else "no parameter has a gradient"


def captured(make: Callable[[], nn.Module], spec: CapturedInput, dtype: str) -> str:
    """Capture it; return the refusal, if it is one."""
    try:
        capture_module(make, [spec], dtype, name="own:make", as_on_gpu=False)
    except CaptureError as error:
        return str(error)
    return ""


@pytest.fixture
def _tried_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator is as large as those that are tried at other sizes than their own."""
    monkeypatch.setattr(operator_checks, "_MOST_VALUES", 0)
    monkeypatch.setattr(operator_checks, "_GRAIN", 2)


@pytest.mark.part(3)
@pytest.mark.parametrize("input_type", TYPES)
@pytest.mark.parametrize("name", OF_ONE_INPUT)
def test_types_that_cannot_be_trained_with_are_refused(name: str, input_type: str) -> None:
    check(OF_ONE_INPUT[name], CapturedInput(shape=(4, 8), dtype=input_type), "fp32")


@pytest.mark.part(3)
@pytest.mark.usefixtures("_tried_small")
@pytest.mark.parametrize("input_type", TYPES)
@pytest.mark.parametrize("name", OF_ONE_INPUT)
def test_types_are_refused_at_any_size(name: str, input_type: str) -> None:
    check(OF_ONE_INPUT[name], CapturedInput(shape=(4, 8), dtype=input_type), "bf16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_modules_that_cannot_be_trained_are_refused(name: str, dtype: str) -> None:
    check(OF_NUMBERS[name], CapturedInput(shape=(4, 8)), dtype)


@pytest.mark.usefixtures("_tried_small")
@pytest.mark.parametrize("name", sorted(OF_NUMBERS.keys() - WRONG_IN_SHAPE_ALONE))
def test_modules_are_refused_at_any_size(name: str) -> None:
    check(OF_NUMBERS[name], CapturedInput(shape=(4, 8)), "fp32")


def check(make: Callable[[], nn.Module], spec: CapturedInput, dtype: str) -> None:
    wrong, refusal = trained(make, spec, DTYPES[dtype]), captured(make, spec, dtype)
    assert bool(refusal) == bool(wrong), f"in memory: {wrong or 'trains'}; captured: {refusal or 'captured'}"
    assert refusal.count("\n") == 0
    assert not refusal or refusal.startswith("own:make")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_a_gpu_has_kernels_for_narrow_types_that_a_cpu_lacks(as_on_gpu: bool, dtype: torch.dtype) -> None:
    loss = torch.ops.aten.multi_margin_loss.default
    scores, classes = torch.zeros(4, 8, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    if dtype is not torch.float32:
        with pytest.raises(NotImplementedError):
            loss(scores, classes)
    refused = dtype is torch.int64 or (dtype is torch.bfloat16 and not as_on_gpu)
    with pytest.raises(CaptureError, match="multi_margin_loss") if refused else contextlib.nullcontext():
        operator_checks.check_operator(loss, (scores, classes), {}, torch.zeros(()), as_on_gpu=as_on_gpu, tried=set())


def test_a_refusal_says_where_and_why() -> None:
    """In backward too, where no module's forward runs."""
    integers = "in module layers.last: aten.addmm(bfloat16[8], int64[4, 8], bfloat16[8, 8]) does not run: mat1 and mat2"
    model = OF_ONE_INPUT["linear"]
    assert integers in captured(lambda: Of(lambda last, x: last(x)), CapturedInput(shape=(4, 8), dtype="int64"), "bf16")
    assert captured(model, CapturedInput(shape=(4, 8), dtype="int64"), "bf16").startswith("own:make: aten.addmm(")
    overwrites = captured(OF_NUMBERS["kept and overwritten"], CapturedInput(shape=(4, 8)), "fp32")
    assert "backward of the model: a tensor of shape [4, 8] was changed in place" in overwrites


def test_trying_operators_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    capture_module(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout()), ["4x8"], "fp32", as_on_gpu=False)
    assert torch.equal(torch.get_rng_state(), before)


class Keeping(nn.Module):
    """Its forward changes all that it can reach, and stops where it is told to."""

    def __init__(self, stop: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.stop, self.error = stop, error
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.config = Frozen(sizes=[8, 8])
        self.seen, self.named, self.once, self.late = [], {"in": {"out": []}}, set(), collections.deque()
        self.cache = types.SimpleNamespace(values={}, count=0)
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = [np.random.default_rng(3), random.Random(3)]  # noqa: S311
        self.copy = torch.ones(8)

    def reached(self, step: int) -> None:
        if step == self.stop:
            raise self.error("stopped")

    def forward(self, x):
        self.calls = x
        self.seen.append(x)
        self.named["in"]["out"].append(x)
        self.reached(0)
        self.once.add(x)
        self.late.append(x)
        self.cache.values["x"] = self.cache.x = x
        self.cache.count += 1
        self.reached(1)
        y = self.first(x) + self.copy + random.random() + float(np.random.rand())  # noqa: NPY002, S311
        y = y + sum(generator.random() for generator in self.numbers)
        self.mean.add_(y.detach().mean(0))
        self.first.scores = torch.rand(8, generator=self.generator)
        self.reached(2)
        self.copy = y
        del self.named["in"]
        return self.last(y).sum() + self.first.scores.sum()


def traces(model: nn.Module) -> Any:
    """Return what a module and what it holds are made of, by identity."""
    held = [model.config, model.config["sizes"], model.seen, model.named, model.named["in"]["out"], model.once]
    held += [model.late, model.cache.values, vars(model.cache), *(vars(module) for module in model.modules())]
    held += [own for module in model.modules() for own in (module._parameters, module._buffers, module._forward_hooks)]
    contents = [
        [(name, id(value)) for name, value in h.items()] if isinstance(h, dict) else list(map(id, h)) for h in held
    ]
    values = [tensor.clone() for tensor in (*model.state_dict().values(), model.generator.get_state())]
    of_numpy, of_python = model.numbers
    return contents, [value.tolist() for value in values], str(of_numpy.bit_generator.state), of_python.getstate()


@pytest.mark.parametrize("stop", range(4))
def test_a_capture_that_ends_anyhow_leaves_the_module_as_it_was(stop: int) -> None:
    """Also after Ctrl-C (at 3 it succeeds), and with the random numbers of Python and NumPy."""
    for error in (KeyboardInterrupt, RuntimeError):
        model = Keeping(stop, error)
        optimizer = torch.optim.SGD(model.parameters())
        before = traces(model)
        drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        with pytest.raises((KeyboardInterrupt, ValueError)):
            ullage.prepare(model, optimizer, torch.ones(4, 8), hardware="epyc-turin-2c", device_memory=1)
        assert traces(model) == before
        assert drawn == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002


@pytest.mark.parametrize("how", ["view", "list", "data"])
def test_the_memory_of_a_parameter_is_not_read_through_another_tensor(how: str) -> None:
    """It would be trained with the values of before; a tensor that nothing reads is none of the plan's business."""
    weight = nn.Parameter(torch.ones(8, 8))
    held = weight.data if how == "data" else weight.t()
    for forward in (lambda last, x: functional.linear(last(x), held), lambda last, x: last(x)):
        model = Of(forward)
        model.layers["last"].weight = weight
        if how == "view":
            model.held = held
        reads = "held" in forward.__code__.co_freevars
        with pytest.raises(CaptureError, match="memory of parameter layers") if reads else contextlib.nullcontext():
            capture_module(model, ["4x8"], "fp32")


def resetting() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_forward_pre_hook(lambda *_: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 8))))
    return model


def averaged(last: nn.Linear, average: nn.Linear, x: Tensor) -> Tensor:
    average.weight.data = last.weight.data.mean(0, keepdim=True)
    return last(x)


def with_frozen(model: nn.Module, name: str) -> nn.Module:
    model.get_parameter(name).requires_grad_(False)
    return model


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(8, 8, dtype=torch.complex64)), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(self.weight.dtype) @ self.weight).abs())


CAUSES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "renormed in bf16": (
        lambda: nn.Embedding(8, 8, max_norm=1).bfloat16(),
        "4x8:int64",
        "forward writes to the parameter weight .*max_norm.* only in fp32 and on one device .*, not in bf16 on 1",
    ),
    "given other data": (
        lambda: Of(averaged, last=nn.Linear(8, 8), average=nn.Linear(8, 8)),
        "4x8",
        r"forward gives the parameter layers\.average\.weight other data, .* between steps",
    ),
    "set": (resetting, "4x8", "forward sets weight of a Linear"),
    "lazy": (lambda: nn.LazyLinear(8), "4x8", r"run the model once"),
    "complex and frozen": (
        lambda: with_frozen(Complex(), "weight"),
        "4x8",
        r"parameter weight has type torch\.complex64.*torch\.view_as_real\(parameter\)",
    ),
    **{
        f"nested, {layout}": (
            lambda layout=layout: Of(
                lambda last, x: torch.nested.as_nested_tensor([last(x[:1]), last(x[:3])], layout=layout).sum(),
                last=nn.Linear(8, 8),
            ),
            "4x8",
            "compute on padded tensors with lengths or a mask",
        )
        for layout in (torch.jagged, torch.strided)
    },
    "values": (
        lambda: Of(
            lambda wide, last, x: last(x) + torch.zeros(8 - 16 * int(wide(x).mean() > 0.4)),
            wide=nn.Linear(8, 4096),
            last=nn.Linear(8, 8),
        ),
        "4x8",
        r"needs the values .*mean\(\)",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_refusal_names_cause_and_remedy_in_the_words_of_the_user(name: str) -> None:
    make, shape, words = CAUSES[name]
    model = make()
    batch = torch.zeros(4, 8, dtype=torch.int64 if shape.endswith("int64") else torch.float32)
    with pytest.raises(ValueError, match=words) as refused:
        ullage.prepare(model, torch.optim.SGD(model.parameters()), batch, hardware="epyc-turin-2c")
    assert str(refused.value).count("\n") == 0
    assert "--" not in str(refused.value)

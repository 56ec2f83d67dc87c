"""Programs that train a small model as the documentation of some library, or a paper's code, shows it.

A program is a function that gets the module ``ullage``, or something in its place that changes nothing, and trains. So
one text trains in memory and under a plan. It returns the losses that it has seen, and the model.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

PLACE: Final = SimpleNamespace(device="cpu")
"""Where trainers, which move models and batches by themselves, train."""

Trained = tuple[list[float], nn.Module | dict[str, Tensor]]
"""What a program returns: losses, and the trained model, or some models' weights by name."""

KINDS: Final = (
    "loops",
    "edits",
    "state",
    "modules",
    "operators",
    "models",
    "diffusion",
    "adapters",
    "trainers",
    "optimizers",
)
_CHANGED: Final = re.compile(r"\bullage\.")

IN_MEMORY: Final = SimpleNamespace(
    prepare=lambda model, optimizer, *_batch, **_options: (model, optimizer), offloaded=lambda trainer, **_: trainer
)
"""Takes the place of the module ``ullage`` where a program trains in memory."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        kind: the module of this folder that has it.
        name: its name there.
        train: trains.
    """

    kind: str
    name: str
    train: Callable[[Any], Trained]

    @property
    def id(self) -> str:
        """Its kind and name."""
        return f"{self.kind}/{self.name}"

    @property
    def title(self) -> str:
        """What it is, in one line."""
        return (inspect.getdoc(self.train) or self.name.replace("_", " ")).partition("\n")[0].rstrip(".")

    @property
    def lines_changed(self) -> int:
        """How many lines call Ullage."""
        function = inspect.unwrap(self.train)
        return max(1, sum(bool(_CHANGED.search(line)) for line in inspect.getsource(function).splitlines()))


def programs(*kinds: str) -> Iterator[Program]:
    """Yield the programs of some kinds, or of all."""
    for kind in kinds or KINDS:
        module = importlib.import_module(f"program_kinds.{kind}")
        yield from (Program(kind, name, train) for name, train in module.PROGRAMS.items())


def registry() -> tuple[dict[str, Callable[[Any], Trained]], Callable[[Any], Any]]:
    """Return a module's programs, and the decorator that adds a function to them under its name."""
    found: dict[str, Callable[[Any], Trained]] = {}

    def program(function: Callable[[Any], Trained]) -> Callable[[Any], Trained]:
        found[function.__name__] = function
        return function

    return found, program


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the device that tensors are made on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def train(
    ullage: Any,
    model: nn.Module,
    batch: Callable[[int], tuple[Any, ...] | dict[str, Any]],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int = 4,
) -> Trained:
    """Train a model with a plain loop of forward, backward, clipping and step.

    Args:
        ullage: see above.
        model: the model, as it was made.
        batch: returns the positional or named inputs of a step.
        loss: returns the loss of what the model returns. Default: its ``loss``, itself, or the mean of its squares.
        optimizer: of its parameters. Default: AdamW, with an epsilon that keeps gradients of nearly zero from deciding.
        num_steps: steps to take.
    """
    optimizer = optimizer or torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-4)
    example = batch(0)
    model, optimizer = ullage.prepare(model.train(), optimizer, example)
    losses = []
    for step in range(num_steps):
        given = batch(step)
        out = model(**given) if isinstance(given, dict) else model(*given)
        value = (loss or _loss)(out)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, model


def _loss(out: Any) -> Tensor:
    if getattr(out, "loss", None) is not None:
        out = out.loss
    while not isinstance(out, Tensor):
        out = next(iter(out.values() if isinstance(out, dict) else out))
    return out if not out.dim() else out.float().square().mean()

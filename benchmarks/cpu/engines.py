"""Checkpoint engines, each durable when it says so."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

import ullage
from benchmarks.cpu.saving import Training, torch_save
from executor.checkpoint.format.reader import Checkpoint, ReadRequest

Tensors = Mapping[str, torch.Tensor]


class Engine(Protocol):
    """Saves checkpoints of one training run."""

    def save(self, folder: Path, step: int) -> None:
        """Begin to save; return when training may go on."""
        ...

    def finish(self) -> None:
        """Wait until all that has begun is durable."""
        ...

    def load(self, folder: Path, step: int) -> tuple[Tensors, Tensors]:
        """Return what a checkpoint has, and what it should have."""
        ...


class Blocking:
    """``torch.save``."""

    def __init__(self, state: Tensors) -> None:
        self._state = state

    def save(self, folder: Path, step: int) -> None:
        """Save."""
        torch_save(dict(self._state), folder / f"{step}.pt")

    def finish(self) -> None:
        """Do nothing: training has waited."""

    def load(self, folder: Path, step: int) -> tuple[Tensors, Tensors]:
        """Load one."""
        return torch.load(folder / f"{step}.pt"), self._state


class _OneInFlight(Blocking):
    """Saves the rest of a checkpoint in a thread, and begins none before the last one has been written."""

    def __init__(self, state: Tensors) -> None:
        super().__init__(state)
        self._thread = threading.Thread()

    def save(self, folder: Path, step: int) -> None:
        """Do what training waits for, when the last one has been written."""
        self.finish()
        self._thread = threading.Thread(target=self._begin(folder, step))
        self._thread.start()

    def finish(self) -> None:
        """Wait for the thread, and until files are durable."""
        if self._thread.ident is not None:
            self._thread.join()

    def _begin(self, folder: Path, step: int) -> Callable[[], None]:
        """Do what training waits for; return the rest."""
        raise NotImplementedError


class CheckFreq(_OneInFlight):
    """Snapshot, then persist, as CheckFreq does."""

    def _begin(self, folder: Path, step: int) -> Callable[[], None]:
        clones = {name: tensor.clone() for name, tensor in self._state.items()}
        return lambda: torch_save(clones, folder / f"{step}.pt")


class TorchSnapshot(_OneInFlight):
    """``Snapshot.async_take`` of torchsnapshot."""

    def __init__(self, state: Tensors) -> None:
        import torchsnapshot  # type: ignore[import-not-found]  # noqa: PLC0415 - a peer

        super().__init__(state)
        self._library = torchsnapshot

    def _begin(self, folder: Path, step: int) -> Callable[[], None]:
        path = folder / f"{step}"
        state = {"state": self._library.StateDict(**self._state)}
        pending = self._library.Snapshot.async_take(str(path), state)

        def write() -> None:
            pending.wait()
            sync_all(path)

        return write

    def load(self, folder: Path, step: int) -> tuple[Tensors, Tensors]:
        """Load one."""
        into = self._library.StateDict(**{name: torch.empty_like(tensor) for name, tensor in self._state.items()})
        self._library.Snapshot(str(folder / f"{step}")).restore({"state": into})
        return dict(into), self._state


class DcpAsync(_OneInFlight):
    """``torch.distributed.checkpoint.async_save``."""

    def _begin(self, folder: Path, step: int) -> Callable[[], None]:
        from torch.distributed.checkpoint.state_dict_saver import async_save  # noqa: PLC0415 - not in every build

        path = folder / f"{step}"
        written: Any = async_save(dict(self._state), checkpoint_id=path)

        def write() -> None:
            written.result()
            sync_all(path)

        return write

    def load(self, folder: Path, step: int) -> tuple[Tensors, Tensors]:
        """Load one."""
        from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415 - not in every build

        into = {name: torch.empty_like(tensor) for name, tensor in self._state.items()}
        load(into, checkpoint_id=folder / f"{step}")
        return into, self._state


class Ours:
    """Ours, of the training that goes on."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._step = 0
        self._outcomes: list[Any] = []
        self._checkpoints = ullage.Checkpoints(
            training.optimizer, ullage.Level(folder / "ours"), on_outcome=self._outcomes.append
        )

    def save(self, folder: Path, step: int) -> None:
        """Begin."""
        del folder, step
        self._step = self._training.step  # names are of one run each
        self._checkpoints.save(self._step)

    def finish(self) -> None:
        """Wait until it is durable."""
        self._checkpoints.finish()
        assert all(outcome.error is None for outcome in self._outcomes), self._outcomes

    def settle(self) -> None:
        """Wait until it has been read again, and older ones have been removed."""
        self._checkpoints.settle()

    def load(self, folder: Path, step: int) -> tuple[Tensors, Tensors]:
        """Load one, of the state that training is in."""
        del step
        state = self._training.state()
        numbers = [p for group in self._training.optimizer.param_groups for p in group["params"]]
        names = {f"{i}": self._training.optimizer.session.name_of(parameter) for i, parameter in enumerate(numbers)}
        found: dict[str, torch.Tensor] = {}
        wanted = []
        for key, values in state.items():
            number, _, kind = key.partition(".")
            if values.dim():
                found[key] = torch.empty_like(values)
                name = names[number] if kind == "master" else f"{kind}.{names[number]}"
                wanted.append(ReadRequest(name, 0, found[key].view(-1).view(torch.uint8).numpy()))
        with Checkpoint(folder / "ours" / f"step-{self._step:08d}") as checkpoint:
            checkpoint.read(wanted)
        return found, {key: state[key] for key in found}

    def close(self) -> None:
        """End its threads."""
        self._checkpoints.close()


def sync_all(folder: Path) -> None:
    """Make a folder durable, with all that is below it."""
    for path in (folder.parent, folder, *folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

"""Measure dynamic device memory: most bytes held at one time, and during each task of the caller's lanes."""

import threading
import weakref
from typing import Any, Self, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.callbacks import in_backward
from executor.gradients import OffloadedGradient


@final
class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the peak memory of tensors that are made inside the context: activations, gradients and temporaries.

    It is for the host as the device. It sees forward and backward of the thread that enters it. Memory that existed
    before, such as arenas, does not count, nor do tensors without values. Sizes are exact, without the rounding of an
    allocator.

    Autograd accumulates gradients in place. Only while a dispatch mode is active, it makes a new tensor for the sum. So
    in backward a sum counts only when the next operation begins: by then, the old tensor is freed. Autograd never
    accumulates into a view, because views share memory: for example, it adds the transposed gradient of a linear
    layer's weight to a tied embedding's gradient in a third tensor. Such a sum counts at once.

    Attributes:
        held_bytes: bytes held now.
        peak_bytes: most bytes held so far.
        peak_bytes_of: most bytes held during each task, by the task's index.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held_bytes = 0
        self.peak_bytes = 0
        self.peak_bytes_of: dict[int, int] = {}
        self._task: int | None = None
        self._known: set[int] = set()
        self._late_bytes: dict[int, int] = {}  # bytes of sums that do not count yet, by storage
        self._lock = threading.RLock()  # lanes allocate and free memory too, and a free may interrupt an allocation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count new storages."""
        self._count_late()
        self._count_storages((args, kwargs), counts=False)
        result = func(*args, **(kwargs or {}))
        meeting = (
            func is torch.ops.aten.add.Tensor
            and in_backward()
            and not torch.is_grad_enabled()
            and not args[0]._is_view()
        )
        self._count_storages(result, counts=True, late=meeting)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that another thread has made."""
        self._count_storages(tensor, counts=True)

    def set_task(self, task: int | None) -> None:
        """Set the caller's task that runs from now on; ``None`` for none."""
        self._count_late()
        with self._lock:
            self._task = task
            self._record_peak()

    def _count_late(self) -> None:
        """Count sums of gradients."""
        with self._lock:
            if self._late_bytes:
                self.held_bytes += sum(self._late_bytes.values())
                self._late_bytes.clear()
                self._record_peak()

    def _record_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self._task is not None:
            self.peak_bytes_of[self._task] = max(self.peak_bytes_of.get(self._task, 0), self.held_bytes)

    def _count_storages(self, tree: Any, *, counts: bool, late: bool = False) -> None:
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, OffloadedGradient) or leaf.is_meta:
                continue
            storage = leaf.untyped_storage()
            with self._lock:
                if storage._cdata in self._known:
                    continue
                num_bytes = storage.nbytes() if counts else 0
                self._known.add(storage._cdata)
                if late:
                    self._late_bytes[storage._cdata] = num_bytes
                else:
                    self.held_bytes += num_bytes
                    self._record_peak()
            # The Python object of a storage lives as long as the storage does.
            weakref.finalize(storage, self._release, storage._cdata, num_bytes).atexit = False

    def _release(self, key: int, num_bytes: int) -> None:
        with self._lock:
            self._known.discard(key)
            if self._late_bytes.pop(key, None) is None:
                self.held_bytes -= num_bytes


@final
class CudaMeter:
    """Measures device memory above that in use when the context was entered. See :class:`MemoryMeter` for attributes.

    It counts torch's "active" bytes. They include memory of freed tensors that another stream still uses, which torch
    does not count as allocated.
    """

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats()
        self._base_bytes = torch.cuda.memory_stats()["active_bytes.all.current"]
        self._peak_bytes = 0
        self._is_open = True
        self._task: int | None = None
        self.peak_bytes_of: dict[int, int] = {}
        return self

    def __exit__(self, *_exc_info: object) -> None:
        torch.cuda.synchronize()
        self._peak_bytes, self._is_open = self.peak_bytes, False

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at one time inside the context."""
        return max(self._peak_bytes, self._now_bytes()) if self._is_open else self._peak_bytes

    def set_task(self, task: int | None) -> None:
        """Set the task that runs from now on. It waits for no stream, because memory is taken when work is issued."""
        if self._task is not None:
            self.peak_bytes_of[self._task] = self._now_bytes()
        self._peak_bytes = self.peak_bytes
        torch.cuda.reset_peak_memory_stats()
        self._task = task

    def _now_bytes(self) -> int:
        """Return the peak since the last reset."""
        peak_bytes: int = torch.cuda.memory_stats()["active_bytes.all.peak"] - self._base_bytes
        return peak_bytes

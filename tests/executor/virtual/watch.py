"""Sessions on the virtual device, with everything that they do to memory told to :class:`virtual.races.Races`."""

import contextlib
import functools
import queue
import types

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import executor.devices.backend
import executor.devices.sums
import executor.distributed.groups
import executor.memory.fp8_weights
import executor.session
import executor.tasks.updates
from executor.devices.backend import as_array
from executor.devices.cuda import CudaBackend
from executor.devices.lanes import LaneMachine
from executor.memory.nvme_files import RecordFile
from virtual import present
from virtual.races import Races, this_thread


class _Seconds(float):
    """A moment on the host's clock that can be given more."""


class _Backend(CudaBackend):
    """Hands the clocks of threads on with the moments that lanes wait for."""

    def __init__(self, races, blind):
        super().__init__()
        self._races, self._blind = races, blind

    def record_event(self, lane):
        moment = super().record_event(lane)
        moment = _Seconds(moment) if isinstance(moment, float) else moment
        moment.host = self._races.moment()
        return moment

    def settle(self):
        super().settle()
        self._races.met_caller()

    def wait_event(self, lane, moment):
        self._races.met(moment.host)
        if lane is not self._blind:
            super().wait_event(lane, moment)


class _HostKernels(TorchDispatchMode):
    """Tells what torch's own kernels do to host memory."""

    def __init__(self, races):
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.is_view or any(not tensor.is_cpu for tensor in tensors):
            return result
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)):
                self._races.touched(tensor.data_ptr(), tensor.nbytes, func.__name__, writes=writes)
        return result


@contextlib.contextmanager
def _collectives(extension, races):
    """Let gloo do what NCCL would, on the current stream; it works on the memory that both sides share."""

    def on_device(collective):
        @functools.wraps(collective)
        def run(*args, **kwargs):
            ours = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda]
            if not ours:
                return collective(*args, **kwargs)
            # Whatever it is given it may write, as gradients that are scattered; but an all-to-all only what comes.
            reads = args[1:2] if collective.__name__ == "all_to_all_single" else ()
            ranges = [(tensor.data_ptr(), tensor.nbytes, all(tensor is not its for its in reads)) for tensor in ours]
            races.launched(collective.__name__, torch.cuda.current_stream().stream_id, ranges)
            lent = (extension.on_host(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
            with _disable_current_modes():
                collective(*lent, **kwargs).wait()
            return types.SimpleNamespace(wait=lambda: None)

        return run

    new_group = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "gloo"}))
        patch.setattr(
            executor.distributed.groups, "all_gather_single", on_device(executor.distributed.groups.all_gather_single)
        )
        patch.setattr(
            executor.distributed.groups,
            "reduce_scatter_single",
            on_device(executor.distributed.groups.reduce_scatter_single),
        )
        for name in ("all_reduce", "all_to_all_single"):
            patch.setattr(dist, name, on_device(getattr(dist, name)))
        yield


@contextlib.contextmanager
def watched(blind=None):
    """Yield what judges all that happens inside; a session must begin and end there, on ``device="cuda"``.

    A lane that is ``blind`` waits for nothing, which is to be found.
    """
    races = Races()
    make_ticket, begin, wait = LaneMachine._ticket, LaneMachine._begin, LaneMachine.wait
    read, write = RecordFile.read, RecordFile.write
    issued = {}

    def watched_ticket(self, task, iteration):
        issued[iteration, task.index] = races.moment()
        return make_ticket(self, task, iteration)

    def watched_begin(self, ticket):
        began = begin(self, ticket)
        races.met(issued.pop((ticket.iteration, ticket.task.index)))
        races.task[this_thread()] = ticket.name
        return began

    def watched_wait(self):
        wait(self)
        races.met_all()

    def touched(buffer, what, *, writes):
        races.touched(buffer.data_ptr(), len(buffer), what, writes=writes)

    def watched_read(self, record, buffer, start=0):
        touched(buffer, "read from NVMe", writes=True)
        read(self, record, buffer, start)

    def watched_write(self, record, buffer):
        touched(buffer, "write to NVMe", writes=False)
        write(self, record, buffer)

    def watched_array(tensor):
        # What the host's kernels are given they write, or nobody else may write at the time.
        races.touched(tensor.data_ptr(), tensor.nbytes, "kernel of the host", writes=True)
        return as_array(tensor)

    class Free(queue.SimpleQueue):
        """Buffers, of which a lane takes one when what came in it before has been added."""

        def get(self, *args, **kwargs):
            buffer = super().get(*args, **kwargs)
            races.met_caller()
            return buffer

    def run_lane(self, lane):
        with _HostKernels(races):
            plain_run_lane(self, lane)

    plain_run_lane = LaneMachine._run_lane
    with present() as extension, _collectives(extension, races), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneMachine, "_ticket", watched_ticket)
        patch.setattr(LaneMachine, "_begin", watched_begin)
        patch.setattr(LaneMachine, "wait", watched_wait)
        patch.setattr(LaneMachine, "_run_lane", run_lane)
        patch.setattr(RecordFile, "read", watched_read)
        patch.setattr(RecordFile, "write", watched_write)
        patch.setattr(executor.devices.backend, "as_array", watched_array)
        patch.setattr(executor.tasks.updates, "as_array", watched_array)
        patch.setattr(executor.memory.fp8_weights, "as_array", watched_array)
        patch.setattr(executor.devices.sums, "queue", types.SimpleNamespace(SimpleQueue=Free, Queue=queue.Queue))
        patch.setattr(executor.session, "backend_of", lambda _options: _Backend(races, blind))
        extension.observe(races)
        try:
            yield races
        finally:
            extension.observe(None)

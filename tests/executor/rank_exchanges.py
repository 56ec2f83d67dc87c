"""What ranks run that exchange values through host memory."""

import mmap
import time

import numpy as np
import torch

from executor.devices import host_exchange
from executor.devices.backend import HostBackend
from executor.devices.host_exchange import HostExchange
from executor.distributed.ranks import Ranks
from planner.decisions import Decisions


def values_of(rank: int, number: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank brings to a collective."""
    drawn = np.random.default_rng([rank, number]).standard_normal(length)
    return torch.from_numpy(drawn).to(dtype)


def exchanged(rank: int, size: int, num_bytes: int, dtype: torch.dtype, lengths, delay_s: float):
    """Return the results of collectives of these lengths: a gather, a sum in parts and a whole sum of each."""
    ranks = Ranks(Decisions(policy="none", units={}, data_parallel=size), torch.device("cpu"))
    exchange = HostExchange(ranks.all, num_bytes, HostBackend(), ranks)
    found = []
    try:
        for number, length in enumerate(lengths):
            time.sleep(delay_s * ((rank + number) % size))
            own = values_of(rank, number, length, dtype)
            whole = torch.empty(size * length, dtype=dtype)
            exchange.all_gather(whole, own)
            part = torch.empty(length, dtype=dtype)
            exchange.reduce_scatter(part, values_of(rank, number, size * length, dtype))
            total = own.clone()
            exchange.all_reduce(total)
            found.append([each.float().numpy() for each in (whole, part, total)])
    finally:
        ranks.all.barrier()
        exchange.close()
        ranks.close(on_all_ranks=True)
    return found


def unshared(rank: int, size: int, step: str) -> str:
    """Have the last rank fail to reach the others, or to map or pin their memory; return the error of each."""
    ranks = Ranks(Decisions(policy="none", units={}, data_parallel=size), torch.device("cpu"))
    host_exchange._CONNECT_S = 0.5
    maps = mmap.mmap
    if rank == size - 1 and step == "connect":
        host_exchange.socket.socket = _Unreachable
    elif rank == size - 1 and step == "map":
        mmap.mmap = _cannot_map
    backend = HostBackend()
    if rank == size - 1 and step == "pin":
        backend.pinned = _cannot_pin
    try:
        HostExchange(ranks.all, 64, backend, ranks)
    except ValueError as error:
        return str(error)
    finally:
        host_exchange.socket.socket, mmap.mmap = _Unreachable.__base__, maps
        ranks.close(on_all_ranks=True)
    return ""


def _cannot_map(*_arguments: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def _cannot_pin(*_arguments: object) -> None:
    raise MemoryError("cudaHostRegister failed with 2")


class _Unreachable(host_exchange.socket.socket):
    """A socket as on another machine."""

    def connect(self, _address):
        raise ConnectionRefusedError(111, "Connection refused")

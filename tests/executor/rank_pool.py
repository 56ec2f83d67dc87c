"""Processes that stay from test to test, and call what they are given as ranks."""

import contextlib
import socket
import time
import warnings
from multiprocessing import connection

import torch
import torch.distributed as dist
from forked import FORKS, start_server
from training import (
    FOLDER,
)
from virtual import install

import executor.distributed.ranks
from executor.distributed.meeting import begin

FAILED_S = 60.0  # longest wait for ranks whose neighbour has failed; the product's own bounds are half of it


class Processes:
    """Processes that stay from case to case, as starting one takes seconds.

    Each call forms ranks of the first ones, with a store that none of them serves.
    """

    def __init__(self, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        self._num_calls = 0
        start_server()
        self.workers, self._pipes = [None] * size, [None] * size
        for rank in range(size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = FORKS.Pipe()
        worker = FORKS.Process(target=_serve, args=(rank, self._port, theirs), daemon=True)
        worker.start()
        theirs.close()  # or the end of one process would not be seen here
        self.workers[rank], self._pipes[rank] = worker, ours

    def begin(self, size: int, function, *arguments) -> None:
        """Have ``function(rank, size, *arguments)`` called by each of the first processes."""
        self._num_calls += 1
        for rank in range(size):
            if not self.workers[rank].is_alive():  # a test has killed it
                self._start(rank)
        for pipe in self._pipes[:size]:
            pipe.send((size, f"call {self._num_calls}", function, arguments))

    def results(self, size: int, timeout_s: float = 600.0) -> list:
        """Return what the first processes returned or raised, and what remains of one that is gone.

        If one has raised, the others have a minute left: then they wait for it, and nobody would end that.
        """
        found: dict[int, object] = {}
        end_s = time.monotonic() + timeout_s
        while missing := {self._pipes[rank]: rank for rank in range(size) if rank not in found}:
            ready_pipes = connection.wait(missing, max(end_s - time.monotonic(), 0))
            if not ready_pipes:
                for rank in range(size):  # or what they answer later would be taken for the next call's
                    self.workers[rank].kill()
                    self.workers[rank].join()
                    self._start(rank)
                raise AssertionError(f"ranks {sorted(missing.values())} do not answer; the others: {found}")
            for pipe in ready_pipes:
                rank = missing[pipe]
                try:
                    found[rank] = pipe.recv()
                except EOFError as error:
                    self.workers[rank].join()  # its pipe closes before it has ended
                    found[rank] = error
                if isinstance(found[rank], BaseException):
                    end_s = min(end_s, time.monotonic() + FAILED_S)
        return [found[rank] for rank in range(size)]

    def call(self, size: int, function, *arguments, timeout_s: float = 600.0) -> list:
        """Return what every rank returned; raise what one raised."""
        self.begin(size, function, *arguments)
        found = self.results(size, timeout_s)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def wait_until_ready(self) -> None:
        """Have all processes import what they need, and meet once."""
        self.call(len(self.workers), ready)

    def close(self) -> None:
        for pipe, worker in zip(self._pipes, self.workers, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            worker.join(10)
            worker.kill()


def _serve(rank: int, port: int, pipe) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(Exception):  # tests that need it say why there is none
        install()  # before it goes backward
    warnings.simplefilter("error")  # what torch deprecates is not used
    warnings.filterwarnings("ignore", "the first two steps")  # of short groups, which tests draw
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while (call := pipe.recv()) is not None:
        size, name, function, arguments = call
        try:
            begin(dist.PrefixStore(name, store), rank, size)
            result = function(rank, size, *arguments)
        except BaseException as error:  # noqa: BLE001 - what went wrong is the result
            result = error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(result)
    FOLDER.cleanup()  # processes of multiprocessing end without doing so


def ready(_rank: int, _size: int) -> None:
    """Wait less for others than a program would: ranks of tests that fail have nothing under way that takes long."""
    executor.distributed.ranks._GRACE_S = 1.0

"""Processes that stay from test to test, and call what they are given as ranks."""

import contextlib
import socket
import warnings

import torch
import torch.distributed as dist
from forked import FORKS, start_server
from training import (
    FOLDER,
)
from virtual import install

import executor.distributed.ranks


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
        """Return what the first processes returned or raised, and what remains of one that is gone."""
        found = []
        for worker, pipe in zip(self.workers, self._pipes[:size], strict=False):
            if not pipe.poll(timeout_s):
                for rank in range(size):  # or what they answer later would be taken for the next call's
                    self.workers[rank].kill()
                    self.workers[rank].join()
                    self._start(rank)
                raise AssertionError("a rank does not answer")
            try:
                found.append(pipe.recv())
            except EOFError as error:
                worker.join()  # its pipe closes before it has ended
                found.append(error)
        return found

    def call(self, size: int, function, *arguments, timeout_s: float = 600.0) -> list:
        """Return what every rank returned; raise what one raised."""
        self.begin(size, function, *arguments)
        found = self.results(size, timeout_s)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def wait_until_ready(self) -> None:
        """Have all processes import what they need, and meet once.

        On a busy machine gloo may lose the first connection of a group ("connectFullMesh failed"), and a pool that all
        tests share must not end with that.
        """
        for attempts_left in (2, 1, 0):
            try:
                self.call(len(self.workers), ready)
            except RuntimeError as error:
                if "connectFullMesh" not in str(error) or not attempts_left:
                    raise
            else:
                return

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
            dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
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

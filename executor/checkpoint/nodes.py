"""The ranks of a run as checkpoints reach them, over the store in which they met and a process group between nodes."""

import contextlib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

import numpy as np
import torch

from executor.checkpoint.divided import Transfer
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.files.timeouts import waiting
from executor.checkpoint.files.writer import Buffer
from executor.checkpoint.format.manifest import FileRecord
from executor.direct_io import pages
from executor.distributed.meeting import session_store
from executor.distributed.ranks import Ranks
from executor.distributed.watchdog import this_machine

_SLAB_BYTES: Final = 4 << 20  # of one value in the store, which takes at most 8 MiB


@final
class Nodes:
    """All ranks of a run, and their nodes; of one rank (``None``), there is one node, and nobody to reach.

    All ranks construct it at the same time. ``torchrun`` says which ranks share a node, by ``LOCAL_RANK``. Without it,
    those on one machine do.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        nodes: the ranks of each node, its leader first.
        node: number of this rank's node.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self.rank, self.size, self.node = 0, 1, 0
        self.nodes: Sequence[Sequence[int]] = ((0,),)
        if ranks is None:
            return
        self._ranks = ranks
        self.rank, self.size = ranks.process, ranks.everybody.size
        local = os.environ.get("LOCAL_RANK")
        name = this_machine() if local is None else f"node of rank {self.rank - int(local)}"
        leader = min(ranks.everybody.ranks_with_same(name.encode()))
        leaders = ranks.everybody.all_gather_on_host(torch.tensor([leader], device="cpu")).tolist()
        by_leader = {
            first: [rank for rank in range(self.size) if leaders[rank] == first] for first in sorted(set(leaders))
        }
        self.nodes = tuple(by_leader.values())
        self.node = list(by_leader).index(leader)
        self._store = session_store()

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.nodes[self.node][0] == self.rank

    def has_failed(self) -> bool:
        """Return whether another rank is known to have failed, for whose part nobody needs to wait."""
        return self.size > 1 and self._ranks.watchdog.has_failed

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """See :meth:`executor.distributed.ranks.Ranks.waiting`."""
        return self._ranks.waiting()

    def share(self) -> None:
        """Be one node: all share the folders of checkpoints. All ranks call this together."""
        self.nodes, self.node = (range(self.size),), 0

    def connect(self) -> None:
        """Make the process group between nodes, for :meth:`exchange`. All ranks call this together."""
        leaders = tuple(ranks[0] for ranks in self.nodes)
        alone = ((rank,) for ranks in self.nodes for rank in ranks[1:])
        self._group = self._ranks.host_group((leaders, *alone))

    def send(self, key: str, text: str) -> None:
        """Send a text, in ASCII, to whoever receives it.

        Raises:
            CheckpointError: the ranks can no longer reach each other. The other methods raise it too.
        """
        with _reaching():
            count = -(-len(text) // _SLAB_BYTES)
            for number in range(count):
                self._store.set(f"{key} {number}", text[number * _SLAB_BYTES : (number + 1) * _SLAB_BYTES])
            self._store.set(key, str(count))

    def receive(self, key: str, patience_s: float = math.inf, check: Callable[[], None] = lambda: None) -> str:
        """Wait for a text and return it. It is gone then.

        Args:
            key: of the text.
            patience_s: longest wait. If a rank is lost, the wait ends soon.
            check: called again and again. If it raises, the wait ends.

        Raises:
            CheckpointError: it did not come in time, or a rank is lost.
        """
        waits = waiting(patience_s, self.has_failed)
        with _reaching():
            while not self._store.check([key]):
                check()
                if not next(waits, False):
                    why = "a rank is lost" if self._ranks.watchdog.has_failed else f"not in {patience_s:g} s"
                    raise CheckpointError(f"{key} has not come ({why})")
            slabs = [f"{key} {number}" for number in range(int(self._store.get(key)))]
            data = b"".join(self._store.get(slab) for slab in slabs)
            for each in (*slabs, key):
                self._store.delete_key(each)
        return data.decode()

    def exchange(
        self,
        transfers: Sequence[Transfer],
        read: Callable[[FileRecord], Iterator[Buffer]],
        write: Callable[[FileRecord, Iterator[Buffer]], None],
    ) -> None:
        """Copy files between nodes. A node sends one file at a time, while it receives one.

        All leaders call it together, with the same transfers.

        Args:
            transfers: the files.
            read: yields the chunks of a file that this node has.
            write: writes a file that this node gets, and checks it.

        Raises:
            CheckpointError: a file cannot be read or written here, or is damaged. All other files have been copied.
        """
        failures: list[OSError] = []
        for at_once in _rounds(transfers):
            sent = next((one for one in at_once if one.source == self.node), None)
            received = next((one for one in at_once if one.target == self.node), None)
            steps = max(len(one.record.checksums) for one in at_once)
            moving = self._moved(steps, sent, received, read, failures)
            try:
                if received is not None:
                    write(received.record, moving)
            except OSError as error:
                failures.append(error)
            for _ in moving:  # the others wait for the rest
                pass
        if failures:
            raise failures[0]

    def _moved(
        self,
        steps: int,
        sent: Transfer | None,
        received: Transfer | None,
        read: Callable[[FileRecord], Iterator[Buffer]],
        failures: list[OSError],
    ) -> Iterator[Buffer]:
        """Send a file in chunks, and yield those of another that comes. All leaders take equally many steps."""
        chunks = iter(()) if sent is None else read(sent.record)
        room = np.empty(0, np.uint8) if received is None else pages(received.record.chunk_bytes)
        for step in range(steps):
            num_sent, num_received = ([0] * len(self.nodes) for _ in range(2))
            data = np.empty(0, np.uint8)
            if sent is not None and step < len(sent.record.checksums):
                num_sent[sent.target] = count = _chunk_bytes(sent.record, step)
                try:
                    data = next(chunks)
                except OSError as error:  # its target finds out
                    failures.append(error)
                    chunks = itertools.repeat(np.zeros(sent.record.chunk_bytes, np.uint8))
                    data = next(chunks)
                data = data[:count]
            if received is not None and step < len(received.record.checksums):
                num_received[received.source] = _chunk_bytes(received.record, step)
            into = room[: sum(num_received)]
            with _reaching():
                self._group.all_to_all(torch.from_numpy(into), torch.from_numpy(data), num_received, num_sent)
            if len(into):
                yield into


def _chunk_bytes(record: FileRecord, number: int) -> int:
    return min(record.chunk_bytes, record.num_bytes - number * record.chunk_bytes)


def _rounds(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Yield transfers in rounds, in each of which a node sends at most one file and receives at most one."""
    left = deque(transfers)
    while left:
        sources: set[int] = set()
        targets: set[int] = set()
        at_once = []
        for _ in range(len(left)):
            one = left.popleft()
            if one.source in sources or one.target in targets:
                left.append(one)
            else:
                at_once.append(one)
                sources.add(one.source)
                targets.add(one.target)
        yield at_once


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Return a context in which errors of the store are errors of checkpoints."""
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"ranks can no longer reach each other: {str(error).partition(chr(10))[0]}") from error

"""The other ranks of a run, as threads that save checkpoints reach them: texts between ranks, files between nodes.

[Note: Parts] Every rank writes its own files, and sends rank 0 a list of them, its part. Rank 0 makes one manifest of
all parts. Texts pass through the store in which the ranks met. So the background threads need no collectives of ranks,
which could interfere with the collectives of training.

[Note: Divided places] A folder that all nodes share has all files. A folder that each node has for itself, in its
memory or on its drives, has those of its own ranks, and copies of those of the node before, which come over a process
group that nothing else uses. Each has the manifest of the whole checkpoint. So one node may be lost, and also several
of which no two are neighbours. The first rank of a node, its leader, does what is to be done there. Rank 0 alone
decides what is verified, promoted and removed, and tells the leaders in one order. So what is kept is the same on all
nodes.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, final

from executor.checkpoint.files.flusher import Buffer
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.format.manifest import FileRecord, Manifest
from executor.checkpoint.source import rank_of


class Transfer(NamedTuple):
    """A file that one node sends to another, by their numbers."""

    source: int
    target: int
    record: FileRecord


class Peers(Protocol):
    """All ranks of a run, and their nodes.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        nodes: the ranks of each node, its leader first.
        node: number of this rank's node.
    """

    rank: int
    size: int
    nodes: Sequence[Sequence[int]]
    node: int

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its node."""

    def send(self, key: str, text: str) -> None:
        """Send a text to whoever receives it.

        Raises:
            CheckpointError: the ranks can no longer reach each other. The other methods raise it too.
        """

    def receive(
        self, key: str, patience_s: float = math.inf, check: Callable[[], None] = lambda: None, *, keeps: bool = False
    ) -> str:
        """Wait for a text and return it. It is gone then, unless others receive it too.

        Args:
            key: of the text.
            patience_s: longest wait. If a rank is lost, the wait ends soon.
            check: called again and again. If it raises, the wait ends.
            keeps: whether other ranks receive the text too.

        Raises:
            CheckpointError: it did not come in time, or a rank is lost.
        """

    def forget(self, key: str) -> None:
        """Remove a text that every receiver has."""

    def exchange(
        self,
        transfers: Sequence[Transfer],
        read: Callable[[FileRecord], Iterator[Buffer]],
        write: Callable[[FileRecord, Iterator[Buffer]], None],
    ) -> None:
        """Copy files between nodes. All leaders call it together, with the same transfers.

        Args:
            transfers: the files.
            read: yields the chunks of a file that this node has.
            write: writes a file that this node gets, and checks it.

        Raises:
            CheckpointError: a file cannot be read or written here, or is damaged. All other files have been copied.
        """


def owned(peers: Peers, node: int, manifest: Manifest) -> list[FileRecord]:
    """Return the files of a checkpoint that the ranks of a node have written."""
    return [record for record in manifest.files if rank_of(record.path) in peers.nodes[node]]


@final
class Agreement:
    """One checkpoint of several ranks: from their parts to one manifest; see [Note: Parts].

    Args:
        peers: all ranks.
        turn: number of the checkpoint, the same on all ranks.
        is_divided: whether every node has a folder of its own.
        patience_s: longest time for which rank 0 waits for parts.
    """

    def __init__(self, peers: Peers, turn: int, patience_s: float, *, is_divided: bool) -> None:
        self._peers, self._turn, self._patience_s, self._is_divided = peers, turn, patience_s, is_divided
        # Whether the others know what this rank has to tell them.
        self._has_part = self._has_gone = self._has_ended = False

    def manifest(self, step: int, part: Manifest) -> Manifest | None:
        """Hand in this rank's part, whose files are durable; return the manifest if this rank completes a folder.

        Raises:
            CheckpointError: a rank could not write its part, or did not write it in time.
        """
        peers = self._peers
        if peers.rank:
            self._send(f"part {peers.rank}", {"part": part.model_dump(mode="json")})
            self._has_part = True
            if not (self._is_divided and peers.is_leader):
                self._has_ended = True
                return None
            joined = json.loads(peers.receive(self._key("manifest"), keeps=True))
            if "error" in joined:
                self._has_ended = True
                raise CheckpointError(joined["error"])
            return Manifest.read(joined["manifest"].encode())
        parts = [part]
        for rank in range(1, peers.size):
            sent = json.loads(peers.receive(self._key(f"part {rank}"), self._patience_s))
            if "error" in sent:
                raise CheckpointError(f"rank {rank}: {sent['error']}")
            parts.append(Manifest.model_validate(sent["part"]))
        made = Manifest.of(step, parts, {"ranks": [each.extra for each in parts]})
        if self._is_divided:
            self._send("manifest", {"manifest": made.to_json().decode()})
        self._has_part = True
        return made

    def copied(self) -> None:
        """Tell rank 0 that this node has all that its folder is to have; wait until all nodes do, so that all name it.

        Raises:
            CheckpointError: a node has not.
        """
        if not self._is_divided:
            return
        peers = self._peers
        if peers.rank:
            self._send(f"copied {peers.node}", {})
            answer = json.loads(peers.receive(self._key("go"), keeps=True))
        else:
            told = [json.loads(peers.receive(self._key(f"copied {node}"))) for node in range(1, len(peers.nodes))]
            errors = [f"node {node}: {each['error']}" for node, each in enumerate(told, 1) if "error" in each]
            answer = {"error": errors[0]} if errors else {}
            self._send("go", answer)
        self._has_gone = True
        if "error" in answer:
            self._has_ended = True
            raise CheckpointError(answer["error"])

    def end(self) -> None:
        """Tell rank 0 that this node has completed its folder; rank 0 waits until all nodes have.

        Raises:
            CheckpointError: a node could not complete its folder.
        """
        if not self._is_divided:
            return
        peers = self._peers
        self._has_ended = True
        if peers.rank:
            self._send(f"end {peers.node}", {})
            return
        ends = [json.loads(peers.receive(self._key(f"end {node}"))) for node in range(1, len(peers.nodes))]
        for heard in ("manifest", "go"):
            peers.forget(self._key(heard))
        if errors := [f"node {node}: {end['error']}" for node, end in enumerate(ends, 1) if "error" in end]:
            raise CheckpointError(errors[0])

    def fail(self, error: str) -> None:
        """Tell the others that this rank has failed, if they wait for it. Calling it twice is allowed."""
        peers = self._peers
        with contextlib.suppress(CheckpointError):
            if not self._has_part and (peers.rank or self._is_divided):
                self._send(f"part {peers.rank}" if peers.rank else "manifest", {"error": error})
            elif not self._has_gone and self._is_divided:
                self._send(f"copied {peers.node}" if peers.rank else "go", {"error": error})
            elif not self._has_ended and peers.rank:
                self._send(f"end {peers.node}", {"error": error})
        self._has_part = self._has_gone = self._has_ended = True

    def _send(self, what: str, data: dict[str, object]) -> None:
        self._peers.send(self._key(what), json.dumps(data))

    def _key(self, what: str) -> str:
        return f"checkpoint {self._turn} {what}"

"""The other ranks of a run, as threads that save checkpoints reach them: texts between ranks, files between nodes.

Every rank writes its own files, and sends rank 0 a list of them, its part. Rank 0 makes one manifest of
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
from typing import TYPE_CHECKING, NamedTuple, final

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.format.manifest import FileRecord, Manifest
from executor.checkpoint.source import rank_of

if TYPE_CHECKING:
    from executor.checkpoint.nodes import Nodes  # which imports torch


class Transfer(NamedTuple):
    """A file that one node sends to another, by their numbers."""

    source: int
    target: int
    record: FileRecord


def owned(peers: "Nodes", node: int, manifest: Manifest) -> list[FileRecord]:
    """Return the files of a checkpoint that the ranks of a node have written."""
    return [record for record in manifest.files if rank_of(record.path) in peers.nodes[node]]


@final
class Agreement:
    """One checkpoint of several ranks: from their parts to one manifest.

    Args:
        peers: all ranks.
        turn: number of the checkpoint, the same on all ranks.
        is_divided: whether every node has a folder of its own.
        patience_s: longest time for which rank 0 waits for parts.
    """

    def __init__(self, peers: "Nodes", turn: int, patience_s: float, *, is_divided: bool) -> None:
        self._peers, self._turn, self._patience_s, self._is_divided = peers, turn, patience_s, is_divided
        # What the others still wait for from this rank, in order.
        self._owed = ["manifest", "go"] if is_divided else []
        if peers.rank:
            more = [f"copied {peers.node}", f"end {peers.node}"] if is_divided and peers.is_leader else []
            self._owed = [f"part {peers.rank}", *more]

    def manifest(self, step: int, part: Manifest) -> Manifest | None:
        """Hand in this rank's part, whose files are durable; return the manifest if this rank completes a folder.

        Raises:
            CheckpointError: a rank could not write its part, or did not write it in time.
        """
        peers = self._peers
        if peers.rank:
            self._send({"part": part.model_dump(mode="json")})
            if not self._owed:
                return None
            return Manifest.read(self._heard("manifest")["manifest"].encode())
        parts = [part]
        for rank in range(1, peers.size):
            sent = json.loads(peers.receive(self._key(f"part {rank}"), self._patience_s))
            if "error" in sent:
                raise CheckpointError(f"rank {rank}: {sent['error']}")
            parts.append(Manifest.model_validate(sent["part"]))
        made = Manifest.of(step, parts, {"ranks": [each.extra for each in parts]})
        if self._is_divided:
            self._send({"manifest": made.to_json().decode()})
        return made

    def copied(self) -> None:
        """Tell rank 0 that this node has all that its folder is to have; wait until all nodes do, so that all name it.

        Raises:
            CheckpointError: a node has not.
        """
        if not self._is_divided:
            return
        if self._peers.rank:
            self._send({})
            self._heard("go")
            return
        errors = self._errors("copied")
        self._send({"error": errors[0]} if errors else {})
        if errors:
            raise CheckpointError(errors[0])

    def end(self) -> None:
        """Tell rank 0 that this node has completed its folder; rank 0 waits until all nodes have.

        Raises:
            CheckpointError: a node could not complete its folder.
        """
        if not self._is_divided:
            return
        if self._peers.rank:
            self._send({})
            return
        errors = self._errors("end")
        for heard in ("manifest", "go"):
            self._peers.forget(self._key(heard))
        if errors:
            raise CheckpointError(errors[0])

    def fail(self, error: str) -> None:
        """Tell the others that this rank has failed, if they wait for it. Calling it twice is allowed."""
        if self._owed:
            with contextlib.suppress(CheckpointError):
                self._send({"error": error})
            self._owed.clear()

    def _send(self, data: dict[str, object]) -> None:
        """Send what is owed first."""
        self._peers.send(self._key(self._owed[0]), json.dumps(data))
        self._owed.pop(0)

    def _heard(self, what: str) -> dict[str, str]:
        """Return what rank 0 tells all leaders. If that is an error, nobody waits for this rank any more."""
        heard: dict[str, str] = json.loads(self._peers.receive(self._key(what), keeps=True))
        if "error" in heard:
            self._owed.clear()
            raise CheckpointError(heard["error"])
        return heard

    def _errors(self, what: str) -> list[str]:
        """Return what the other nodes tell rank 0 that went wrong, when all have told."""
        nodes = range(1, len(self._peers.nodes))
        told = {node: json.loads(self._peers.receive(self._key(f"{what} {node}"))) for node in nodes}
        return [f"node {node}: {each['error']}" for node, each in told.items() if "error" in each]

    def _key(self, what: str) -> str:
        return f"checkpoint {self._turn} {what}"

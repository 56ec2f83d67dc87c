"""Places that every node has for itself: rank 0 decides, and the first rank of each node, its leader, does it there.

[Note: Divided places] A folder that all nodes share has all files. A folder that each node has for itself, in its
memory or on its drives, has those of its own ranks, and copies of those of the node before, which come over a process
group that nothing else uses. Each has the manifest of the whole checkpoint. So one node may be lost, and also several
of which no two are neighbours. Rank 0 alone decides what gets its name, is verified, promoted and removed. So what is
kept is the same on all nodes. A folder that all share is the case of one node: then rank 0 is the only leader.

[Note: Orders] Rank 0 appends orders to logs, which the leaders of other nodes follow. Each level has a log, which a
thread follows. Each checkpoint of training has one, which the thread follows that has written this node's files. Some
orders have an answer, for which rank 0 waits. Texts pass through the store in which the ranks met. So the background
threads need no collectives of ranks, which could interfere with the collectives of training.
"""

import collections
import contextlib
import functools
import itertools
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.files.writer import lower_thread_priority
from executor.checkpoint.format.manifest import FileRecord, Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import Place, step_of
from executor.checkpoint.source import rank_of

if TYPE_CHECKING:
    from executor.checkpoint.nodes import Nodes  # which imports torch

_END: Final = "end"
_STOP_S: Final = 1.0  # longest wait for a thread whose ``check`` raises
_UNANSWERED: Final = frozenset({"remove", "abandon"})

Bools = npt.NDArray[np.bool_]
Order = Mapping[str, Any]
"""What to ``do``, on which ``level``: plain JSON, and a manifest, which is text on its way to other nodes."""


class Transfer(NamedTuple):
    """A file that one node sends to another, by their numbers."""

    source: int
    target: int
    record: FileRecord


@final
class NodePlaces:
    """The places of this node, what its leader does there when rank 0 orders it, and rank 0's logs of orders.

    Args:
        peers: all ranks.
        places: of all levels.
        num_divided: levels, fastest first, of which every node has a folder of its own.
        check: called again and again during long work and waits. If it raises, they end.
    """

    def __init__(
        self, peers: "Nodes", places: Sequence[Place], num_divided: int, check: Callable[[], None] = lambda: None
    ) -> None:
        self.peers, self.places, self.num_divided, self._check = peers, tuple(places), num_divided, check
        self._followers: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards the numbers: one thread copies while another removes
        self._num_given: collections.Counter[str] = collections.Counter()  # by log
        self._manifests: dict[str, Manifest] = {}  # of the checkpoint that a log is about now

    @property
    def levels(self) -> range:
        """The levels with orders: divided ones, and the first shared one, which gets its files from all nodes."""
        return range(min(self.num_divided + 1, len(self.places)))

    def local(self, level: int) -> FolderPlace:
        """Return the folder of this node on a divided level, or the one that training writes into."""
        place = self.places[level]
        assert isinstance(place, FolderPlace), "places of nodes are folders"
        return place

    def do(self, order: Order, log: str) -> Any:
        """Do what is ordered in a log; return the answer, as plain JSON.

        Raises:
            OSError: it cannot be done.
        """
        level = order["level"]
        match order["do"]:
            case "steps":
                return [step_of(folder) for folder in self.local(level).folders()]
            case "held":
                return self._held(self.local(level).folder(order["step"]), order["known"])
            case "remove":
                self.local(level).remove(self.local(level).folder(order["step"]))
            case "copy":
                self._manifests[log] = self._copied(order)
            case "exchange":
                self._manifests[log] = manifest = order["manifest"]
                local, folder = self.local(level), self.local(level).root / order["name"]
                self.peers.exchange(
                    [Transfer(source, target, manifest.files[index]) for source, target, index in order["moves"]],
                    Checkpoint(folder, manifest).chunks,
                    functools.partial(local.add, folder, manifest),
                )
            case "complete":
                manifest = self._manifests.pop(log)
                self.local(level).complete(order["name"], manifest, self._files_here(manifest))
            case "abandon":
                self.local(level).abandon(order["name"])
            case other:
                raise AssertionError(other)
        return None

    def give(self, order: Order, log: str = "") -> int:
        """Give an order to the leaders of all other nodes, without waiting for it; return its number.

        Args:
            order: the order.
            log: the log that it goes to, by default that of its level.

        Raises:
            CheckpointError: the ranks can no longer reach each other.
        """
        log = log or _log_of(order["level"])
        with self._lock:
            number = self._num_given[log]
            self._num_given[log] += 1
            if order["do"] == _END:
                del self._num_given[log]
                self._manifests.pop(log, None)
            for node in range(1, len(self.peers.nodes)):
                self.peers.send(_key("order", log, number, node), json.dumps(order, default=_text))
        return number

    def ask(self, order: Order, log: str = "", check: Callable[[], None] = lambda: None) -> list[Any]:
        """Give an order to all leaders, this one too, as :meth:`give` does; return all answers, by node.

        Raises:
            OSError: a node cannot do it.
        """
        log = log or _log_of(order["level"])
        number = self.give(order, log)
        failure: OSError | None = None
        answers: list[Any] = []
        try:
            answers.append(self.do(order, log))
        except OSError as error:
            failure = error
        for node in range(1, len(self.peers.nodes)):
            answer = json.loads(self.peers.receive(_key("answer", log, number, node), check=check))
            answers.append(answer.get("is"))
            if "error" in answer:
                failure = failure or CheckpointError(f"node {node}: {answer['error']}")
        if failure is not None:
            raise failure
        return answers

    def follow(self, log: str) -> None:
        """Do what rank 0 orders in a log, until it ends that.

        Raises:
            CheckpointError: rank 0 has failed or is gone; or ``check`` has raised it.
        """
        number, failure = 0, ""  # of an order without an answer, for the next answer
        while (order := self._next(log, number))["do"] != _END:
            answer: dict[str, Any] = {}
            try:
                answer["is"] = self.do(order, log)
            except OSError as error:
                failure = failure or str(error)
            if order["do"] not in _UNANSWERED:
                if failure:
                    answer["error"], failure = failure, ""
                self.peers.send(_key("answer", log, number, self.peers.node), json.dumps(answer))
            number += 1
        self._manifests.pop(log, None)
        if "error" in order:
            raise CheckpointError(order["error"])

    def follow_levels(self) -> None:
        """Do what rank 0 orders, in a thread for each level, until rank 0 has closed or ``check`` raises."""
        for level in self.levels:
            name = f"checkpoint level {level}"
            self._followers.append(threading.Thread(target=self._follow_level, args=(level,), name=name, daemon=True))
            self._followers[-1].start()

    def wait(self, patience_s: float) -> None:
        """Wait until rank 0 has closed, for at most so long."""
        if self._followers:
            with self.peers.waiting():
                for thread in self._followers:
                    thread.join(patience_s)

    def end(self) -> None:
        """Let the followers of all levels end: those of other leaders, or if this is another, its own."""
        if self.peers.rank:
            self.wait(_STOP_S)
            return
        with contextlib.suppress(CheckpointError):
            for level in self.levels:
                self.give({"do": _END, "level": level})

    def _follow_level(self, level: int) -> None:
        lower_thread_priority()
        with contextlib.suppress(CheckpointError):  # rank 0 is gone, or this rank closes
            self.follow(_log_of(level))
        if level < self.num_divided:
            with contextlib.suppress(OSError):
                self.local(level).remove_spares()

    def _next(self, log: str, number: int) -> Order:
        text = self.peers.receive(_key("order", log, number, self.peers.node), check=self._check)
        order: dict[str, Any] = json.loads(text)
        if "manifest" in order:
            order["manifest"] = Manifest.read(order["manifest"].encode())
        return order

    def _held(self, folder: Folder, known: str) -> tuple[str, str, list[int]]:
        """Return a checkpoint's digest, its manifest if rank 0 does not know it, and which files are here and whole."""
        try:
            checkpoint = Checkpoint(folder)
        except DamagedError:
            return "", "", []
        manifest, whole = checkpoint.manifest, []
        for index, record in enumerate(manifest.files):
            with contextlib.suppress(DamagedError):
                checkpoint.verify_in_turn(self._check, [record])
                whole.append(index)
        tells = manifest.digest != known or self.peers.rank == 0
        return manifest.digest, _text(manifest) if tells else "", whole

    def _copied(self, order: Order) -> Manifest:
        """Copy files from the folder of a faster level: to this node's folder all, and to a shared place its own."""
        level, above, name = order["level"], self.local(order["source"]), order["name"]
        with Checkpoint(above.folder(order["step"])) as source:
            is_divided = level < self.num_divided
            if is_divided and self.peers.rank:  # rank 0 has begun its own
                self.local(level).begin_copy(source.manifest, name.rpartition("-")[2])
            self.places[level].copy(name, source, self._files_here(source.manifest, copies=is_divided), self._check)
            return source.manifest

    def _files_here(self, manifest: Manifest, *, copies: bool = True) -> list[FileRecord]:
        """Return this node's own files of a checkpoint, with its copies of others or without."""
        own = owned(self.peers, manifest)
        found = with_copies(own) if copies else own
        return list(itertools.compress(manifest.files, found[self.peers.node]))


def owned(peers: "Nodes", manifest: Manifest) -> Bools:
    """Return ``[nodes, files]``, whether the ranks of a node have written a file of a checkpoint."""
    ranks = [rank_of(record.path) for record in manifest.files]
    return np.array([[rank in node for rank in ranks] for node in peers.nodes], bool)


def with_copies(files: Bools) -> Bools:
    """Return what each node has if each of them has these files, and copies of those of the node before."""
    return files | np.roll(files, 1, axis=0)


def moves_of(manifest: Manifest, there: Bools, wanted: Bools) -> list[tuple[int, int, int]]:
    """Return which files go from where to where, so that each node has what is wanted there, and its copies.

    Args:
        manifest: of a checkpoint.
        there: ``[nodes, files]``, whether the node has the file. Each file is on some node.
        wanted: whether it is wanted there.

    Returns:
        Source, target and index of each file that a node lacks. It comes from the node that sends least.
    """
    load = np.zeros(len(there), int)  # bytes that each node sends
    moves = []
    for target, index in np.argwhere(with_copies(wanted) & ~there).tolist():
        (sources,) = np.nonzero(there[:, index])
        source = int(sources[load[sources].argmin()])
        load[source] += manifest.files[index].num_bytes
        moves.append((source, target, index))
    return moves


def _key(what: str, log: str, number: int, node: int) -> str:
    return f"{what} {log} {number} of {node}"


def _text(manifest: Manifest) -> str:
    return manifest.to_json().decode()


def _log_of(level: int) -> str:
    return f"level {level}"


@final
class Agreement:
    """One checkpoint of training: every rank writes its files, and rank 0 makes one manifest of all.

    Args:
        here: the places of this node.
        turn: number of the checkpoint, the same on all ranks.
        patience_s: longest time for which rank 0 waits for the others.
    """

    def __init__(self, here: NodePlaces, turn: int, patience_s: float) -> None:
        self._here, self._peers, self._patience_s = here, here.peers, patience_s
        self._log = f"checkpoint {turn}"
        self._has_told = False

    def complete(self, part: Manifest, draft: Path | None) -> Path | None:
        """Hand in what this rank has written, which is durable; let leaders complete their drafts when all have.

        Args:
            part: the files of this rank.
            draft: the folder of this node, on its leader.

        Returns:
            The folder of the checkpoint, on rank 0.

        Raises:
            CheckpointError: a rank could not write its part, or did not in time; or a node not its copies, or the name.
        """
        peers = self._peers
        if peers.rank:
            self._tell({"part": part.model_dump(mode="json")})
            if draft is not None:
                self._here.follow(self._log)
            return None
        assert draft is not None, "rank 0 has a draft"
        parts = [part]
        for rank in range(1, peers.size):
            sent = json.loads(peers.receive(self._part_of(rank), self._patience_s))
            if "error" in sent:
                raise CheckpointError(f"rank {rank}: {sent['error']}")
            parts.append(Manifest.model_validate(sent["part"]))
        manifest = Manifest.of(part.step, parts, {"ranks": [each.extra for each in parts]})
        own, where = owned(peers, manifest), {"level": 0, "name": draft.name}
        moves = moves_of(manifest, own, own)
        self._here.ask({"do": "exchange", "manifest": manifest, "moves": moves, **where}, self._log)
        self._here.ask({"do": "complete", **where}, self._log)  # so every checkpoint with a name has its copies
        with contextlib.suppress(CheckpointError):  # all nodes have it
            self._tell({})
        return self._here.local(0).folder(manifest.step)

    def fail(self, error: str) -> None:
        """Tell the others that this rank has failed, if they wait for it. Calling it twice is allowed."""
        with contextlib.suppress(CheckpointError):
            self._tell({"error": error})

    def _tell(self, how: Mapping[str, Any]) -> None:
        """Tell the others, once, how this rank has ended. After rank 0, nobody waits."""
        if self._has_told:
            return
        self._has_told = True
        if self._peers.rank:
            self._peers.send(self._part_of(self._peers.rank), json.dumps(how))
        else:
            self._here.give({"do": _END, **how}, self._log)

    def _part_of(self, rank: int) -> str:
        return f"part of {self._log} of {rank}"


@final
class DividedPlace(Place):
    """A folder of each node, as rank 0 sees it: what it does here, the other leaders do too."""

    def __init__(self, here: NodePlaces, level: int) -> None:
        self.local = here.local(level)
        super().__init__(self.local.place)
        self._here, self._level = here, level
        self._elsewhere: dict[str, Folder] | None = None  # checkpoints of earlier starts on other nodes, by name

    def folder(self, step: int, nonce: int = 0) -> Folder:
        """See :class:`Place`. It is this node's folder, which may be missing here."""
        return self.local.folder(step, nonce)

    def folders(self) -> Sequence[Folder]:
        """See :class:`Place`. A checkpoint may be on other nodes only."""
        if self._elsewhere is None:
            self.steps()
        assert self._elsewhere is not None
        found = {folder.name: folder for folder in self.local.folders()} | self._elsewhere
        return [found[name] for name in sorted(found, reverse=True)]

    def _ask(self, order: Order, check: Callable[[], None] = lambda: None) -> list[Any]:
        return self._here.ask({**order, "level": self._level}, check=check)

    def steps(self) -> list[set[int]]:
        """Return the steps of each node's checkpoints, damaged or not."""
        of_nodes = [set(steps) for steps in self._ask({"do": "steps"})]
        self._elsewhere = {self.folder(step).name: self.folder(step) for step in set().union(*of_nodes)}
        return of_nodes

    def held(self, step: int, check: Callable[[], None] = lambda: None) -> tuple[Manifest, Bools]:
        """Return what the nodes have of a checkpoint, of which each reads every byte.

        Returns:
            Its manifest, and ``[nodes, files]``, whether the node has the file, and it is whole.

        Raises:
            DamagedError: some part of it is on no node.
        """
        known = ""
        with contextlib.suppress(DamagedError):
            known = Checkpoint(self.local.folder(step)).manifest.digest
        answers = self._ask({"do": "held", "step": step, "known": known}, check)
        for digest, text in {digest: text for digest, text, _ in answers if text}.items():
            manifest = Manifest.read(text.encode())
            there = np.zeros((len(answers), len(manifest.files)), bool)
            for of_node, (its, _, whole) in zip(there, answers, strict=True):
                of_node[whole if its == digest else []] = True
            if there.any(axis=0).all():
                return manifest, there
        raise DamagedError(f"{self.folder(step)}: a part of it is on no node, or damaged on all")

    def bring(self, manifest: Manifest, there: Bools, wanted: Bools) -> None:
        """Bring to each node what it lacks of a checkpoint, see :func:`moves_of`; it is checked on the way.

        Raises:
            CheckpointError: a file cannot be brought.
        """
        name, moves = self.folder(manifest.step).name, moves_of(manifest, there, wanted)
        self._ask({"do": "exchange", "name": name, "manifest": manifest, "moves": moves})

    def begin_copy(self, manifest: Manifest) -> str:
        """See :class:`Place`."""
        return self.local.begin_copy(manifest, secrets.token_hex(4))

    def copy(
        self,
        name: str,
        source: Checkpoint,
        records: Sequence[FileRecord],  # noqa: ARG002
        check: Callable[[], None],  # noqa: ARG002
    ) -> None:
        """See :class:`Place`. Only all nodes together copy to their folders, by an order."""
        raise AssertionError(f"{name}: {source.folder} is not of nodes")

    def complete(self, name: str, manifest: Manifest) -> Folder:
        """See :class:`Place`."""
        self._ask({"do": "complete", "name": name})
        return self.folder(manifest.step)

    def abandon(self, name: str) -> None:
        """See :class:`Place`."""
        self.local.abandon(name)
        with contextlib.suppress(CheckpointError):
            self._here.give({"do": "abandon", "level": self._level, "name": name})

    def _check_whole(self, folder: Folder, check: Callable[[], None]) -> None:
        self.held(step_of(folder), check)

    def remove(self, folder: Folder) -> None:
        """See :class:`Place`."""
        if self._elsewhere is not None:
            self._elsewhere.pop(folder.name, None)
        self._here.give({"do": "remove", "level": self._level, "step": step_of(folder)})
        self.local.remove(folder)

    def _remove_dead_drafts(self, last: int) -> None:
        self.local._remove_dead_drafts(last)

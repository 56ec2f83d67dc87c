"""A place that every node has for itself, as rank 0 sees it, and what it has the leaders do there.

See [Note: Divided places] in :mod:`executor.checkpoint.peers`. Each level has a log of orders. Rank 0 appends to it,
and a thread of every other leader follows it. Some orders have an answer, for which rank 0 waits.
"""

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.files.writer import lower_thread_priority
from executor.checkpoint.format.manifest import FileRecord, Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.peers import owned
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import Place, step_of

if TYPE_CHECKING:
    from executor.checkpoint.nodes import Nodes  # which imports torch

_END: Final = "end"
_STOP_S: Final = 1.0  # longest wait for a thread whose ``check`` raises
_UNANSWERED: Final = frozenset({"remove", "abandon"})

Order = Mapping[str, Any]


@final
class NodePlaces:
    """The places of this node, what its leader does there when rank 0 orders it, and rank 0's log of orders.

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
        self._copies: dict[str, tuple[Manifest, list[FileRecord]]] = {}  # that are not complete, by name
        self._followers: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards the numbers: one thread copies while another removes
        self._num_given = [0] * len(self.places)

    @property
    def levels(self) -> range:
        """The levels with orders: divided ones, and the first shared one, which gets its files from all nodes."""
        return range(min(self.num_divided + 1, len(self.places)))

    def local(self, level: int) -> FolderPlace:
        """Return the folder of this node on a divided level."""
        place = self.places[level]
        assert isinstance(place, FolderPlace), "places of nodes are folders"
        return place

    def do(self, level: int, order: Order) -> Any:
        """Do what is ordered on a level; return the answer, as plain JSON.

        Raises:
            OSError: it cannot be done.
        """
        match order["do"]:
            case "steps":
                return [step_of(folder) for folder in self.local(level).folders()]
            case "held":
                return self._held(self.local(level).folder(order["step"]))
            case "manifest":
                if order["node"] != self.peers.node:
                    return None
                return Checkpoint(self.local(level).folder(order["step"])).manifest.to_json().decode()
            case "remove":
                self.local(level).remove(self.local(level).folder(order["step"]))
            case "copy":
                self._copy(level, order)
            case "complete":
                self.local(level).complete(order["name"], *self._copies.pop(order["name"]))
            case "abandon":
                if self._copies.pop(order["name"], None) is not None:
                    self.local(level).abandon(order["name"])
            case other:
                raise AssertionError(other)
        return None

    def give(self, level: int, order: Order) -> int:
        """Give an order to the leaders of all other nodes, without waiting for it; return its number.

        Raises:
            CheckpointError: the ranks can no longer reach each other.
        """
        with self._lock:
            number, self._num_given[level] = self._num_given[level], self._num_given[level] + 1
            for node in range(1, len(self.peers.nodes)):
                self.peers.send(_key("order", level, number, node), json.dumps(order))
        return number

    def ask(self, level: int, order: Order, check: Callable[[], None] = lambda: None) -> list[Any]:
        """Give an order to all leaders, this one too; return all answers, by node.

        Raises:
            OSError: a node cannot do it.
        """
        number = self.give(level, order)
        failure: OSError | None = None
        answers: list[Any] = []
        try:
            answers.append(self.do(level, order))
        except OSError as error:
            failure = error
        for node in range(1, len(self.peers.nodes)):
            answer = json.loads(self.peers.receive(_key("answer", level, number, node), check=check))
            answers.append(answer.get("is"))
            if "error" in answer:
                failure = failure or CheckpointError(f"node {node}: {answer['error']}")
        if failure is not None:
            raise failure
        return answers

    def follow(self) -> None:
        """Do what rank 0 orders, in a thread for each level, until rank 0 has closed or ``check`` raises."""
        for level in self.levels:
            name = f"checkpoint level {level}"
            self._followers.append(threading.Thread(target=self._follow, args=(level,), name=name, daemon=True))
            self._followers[-1].start()

    def wait(self, patience_s: float) -> None:
        """Wait until rank 0 has closed, for at most so long."""
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
                self.give(level, {"do": _END})

    def _follow(self, level: int) -> None:
        lower_thread_priority()
        number, failure = 0, ""  # of an order without an answer, for the next answer
        with contextlib.suppress(CheckpointError):  # rank 0 is gone, or this rank closes
            while (order := self._next(level, number))["do"] != _END:
                answer: dict[str, Any] = {}
                try:
                    answer["is"] = self.do(level, order)
                except OSError as error:
                    failure = failure or str(error)
                if order["do"] not in _UNANSWERED:
                    if failure:
                        answer["error"], failure = failure, ""
                    self.peers.send(_key("answer", level, number, self.peers.node), json.dumps(answer))
                number += 1
        if level < self.num_divided:
            with contextlib.suppress(OSError):
                self.local(level).remove_spares()

    def _next(self, level: int, number: int) -> Order:
        order: Order = json.loads(self.peers.receive(_key("order", level, number, self.peers.node), check=self._check))
        return order

    def _held(self, folder: Folder) -> tuple[str, list[int]]:
        """Return the digest of a checkpoint, and the indices of the files that are here and whole."""
        try:
            checkpoint = Checkpoint(folder)
        except DamagedError:
            return "", []
        whole = []
        for index, record in enumerate(checkpoint.manifest.files):
            with contextlib.suppress(DamagedError):
                checkpoint.verify_in_turn(self._check, [record])
                whole.append(index)
        return checkpoint.manifest.digest, whole

    def _copy(self, level: int, order: Order) -> None:
        """Copy files from the folder of a faster level: to this node's folder all, and to a shared place its own."""
        above, name = self.local(order["source"]), order["name"]
        with Checkpoint(above.folder(order["step"])) as source:
            manifest = source.manifest
            nodes = (self.peers.node, self.peers.node - 1) if level < self.num_divided else (self.peers.node,)
            records = [record for node in nodes for record in owned(self.peers, node, manifest)]
            if level < self.num_divided:
                if name not in self._copies and self.peers.rank:  # rank 0 has begun its own
                    self.local(level).begin_copy(manifest, name.rpartition("-")[2])
                self._copies[name] = manifest, records
            self.places[level].copy(name, source, records, self._check)


def _key(what: str, level: int, number: int, node: int) -> str:
    return f"{what} {level} {number} of {node}"


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

    def steps(self) -> list[set[int]]:
        """Return the steps of each node's checkpoints, damaged or not."""
        of_nodes = [set(steps) for steps in self._here.ask(self._level, {"do": "steps"})]
        self._elsewhere = {self.folder(step).name: self.folder(step) for step in set().union(*of_nodes)}
        return of_nodes

    def held(self, step: int, check: Callable[[], None] = lambda: None) -> tuple[Manifest, list[list[int]]]:
        """Return what the nodes have of a checkpoint, of which each reads every byte.

        Returns:
            Its manifest, and for each node the indices of the files that it has, each of them whole.

        Raises:
            DamagedError: some part of it is on no node.
        """
        answers = self._here.ask(self._level, {"do": "held", "step": step}, check)
        for digest in dict.fromkeys(digest for digest, files in answers if files):
            files = [whole if its == digest else [] for its, whole in answers]
            node = next(node for node, of_node in enumerate(files) if of_node)
            text = self._here.ask(self._level, {"do": "manifest", "step": step, "node": node})[node]
            manifest = Manifest.read(text.encode())
            if set().union(*files) == set(range(len(manifest.files))):
                return manifest, files
        raise DamagedError(f"{self.folder(step)}: a part of it is on no node, or damaged on all")

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
        self._here.ask(self._level, {"do": "complete", "name": name})
        return self.folder(manifest.step)

    def abandon(self, name: str) -> None:
        """See :class:`Place`."""
        self.local.abandon(name)
        with contextlib.suppress(CheckpointError):
            self._here.give(self._level, {"do": "abandon", "name": name})

    def _check_whole(self, folder: Folder, check: Callable[[], None]) -> None:
        self.held(step_of(folder), check)

    def remove(self, folder: Folder) -> None:
        """See :class:`Place`."""
        if self._elsewhere is not None:
            self._elsewhere.pop(folder.name, None)
        self._here.give(self._level, {"do": "remove", "step": step_of(folder)})
        self.local.remove(folder)

    def _remove_dead_drafts(self, last: int) -> None:
        self.local._remove_dead_drafts(last)

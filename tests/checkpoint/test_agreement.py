"""How ranks agree on one checkpoint: whoever fails, and when, all hear of it, and nobody waits for ever."""

import math
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor.checkpoint.divided import Agreement, NodePlaces, moves_of, owned, with_copies
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.source import rank_of

S = 20.0


class Board:
    """Texts that ranks leave for each other."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()


class Rank:
    """A rank, as ``Nodes`` has it, that meets the others at a board."""

    def __init__(self, board: Board, rank: int, nodes: list[list[int]], fails: str = "") -> None:
        self.fails = fails
        self.board, self.rank, self.nodes, self.size = board, rank, nodes, sum(map(len, nodes))
        self.node = next(node for node, ranks in enumerate(nodes) if rank in ranks)
        self.is_leader = nodes[self.node][0] == rank

    def send(self, key: str, text: str) -> None:
        with self.board.changed:
            assert key not in self.board.texts, "nobody says a thing twice"
            self.board.texts[key] = text
            self.board.changed.notify_all()

    def receive(self, key: str, patience_s: float = math.inf, check: Callable[[], None] = lambda: None) -> str:
        del check
        with self.board.changed:
            assert self.board.changed.wait_for(lambda: key in self.board.texts, min(patience_s, S)), f"{key} never came"
            return self.board.texts.pop(key)

    def exchange(self, *_transfers: object) -> None:
        if len(self.nodes) > 1:
            self.check("copy")

    def check(self, what: str) -> None:
        if self.fails == what:
            raise CheckpointError("no room")


class Naming(Files):
    """Files that may have no room for the name of a checkpoint."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def rename(self, source: Path, target: Path) -> None:
        self._rank.check("end")
        super().rename(source, target)


def part(rank: int) -> Manifest:
    return Manifest(step=3, files=(), tensors={}, extra={"rank": rank})


def ended(rank: Rank, folder: Path) -> Path | str | None:
    """Do as an engine does, and fail where the rank does; return the checkpoint, or why there is none."""
    place = FolderPlace(folder, Naming(rank))
    agreement = Agreement(NodePlaces(rank, [place], len(rank.nodes) > 1), 7, S)
    draft = place.begin(3, (), "ab") if rank.is_leader else None
    try:
        rank.check("part")
        return agreement.complete(part(rank.rank), draft)
    except CheckpointError as error:
        agreement.fail(str(error))
        agreement.fail("once more")
        return str(error)


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    failing=st.integers(0, 8),
    fails=st.sampled_from(["part", "copy", "end", ""]),
)
@example(sizes=[1, 1], failing=1, fails="end")
@example(sizes=[1, 1], failing=1, fails="copy")
@example(sizes=[1, 2], failing=0, fails="copy")
@example(sizes=[2, 2], failing=3, fails="part")
@example(sizes=[1, 2], failing=0, fails="part")
def test_all_hear_of_a_failure_and_nobody_waits(sizes: list[int], failing: int, fails: str) -> None:
    """Nodes have folders of their own; one that has several ranks shares one."""
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    board, count = Board(), sum(sizes)
    failing %= count
    ranks = [Rank(board, rank, nodes, fails * (rank == failing)) for rank in range(count)]
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(count) as threads:
        folders = [Path(root) / str(node) for node in range(len(nodes))]
        jobs = [threads.submit(ended, rank, folders[rank.node]) for rank in ranks]
        found = [job.result(2 * S) for job in jobs]
        manifests = [Checkpoint(path).manifest for folder in folders for path in folder.glob("step-*")]
    leaders = starts if len(nodes) > 1 else [0]
    is_copied = len(nodes) > 1
    if fails == "part" or (failing in leaders and (fails == "end" or (fails == "copy" and is_copied))):
        assert isinstance(found[0], str), "rank 0 acknowledges nothing"
        assert "no room" in found[0]
        assert all(isinstance(found[rank], str) for rank in leaders), "all nodes hear of it"
        assert fails == "end" or not manifests, "no node completes its folder"
        return
    assert found == [folders[0] / "step-00000003"] + [None] * (count - 1)
    expected = Manifest.of(3, [part(rank) for rank in range(count)], {"ranks": [{"rank": r} for r in range(count)]})
    assert manifests == [expected] * len(nodes)
    assert board.texts == {}, "nothing is left"


def test_files_belong_to_the_node_of_the_rank_that_wrote_them() -> None:
    paths = [
        "model/model-00002.safetensors",
        "optimizer/exp_avg-00001-12.safetensors",
        "optimizer/v-2-100000.safetensors",
    ]
    assert [rank_of(path) for path in paths] == [2, 1, 100000]
    assert rank_of("model/values.safetensors") == -1
    files = [{"path": path, "num_bytes": 1, "chunk_bytes": 4096, "checksums": ("0" * 16,)} for path in paths]
    manifest = Manifest.model_validate({"step": 1, "files": files, "tensors": {}})
    rank = Rank(Board(), 0, [[0, 1], [2, 3], [4]])
    own = owned(rank, manifest)
    assert own.tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    assert with_copies(own).tolist() == [[False, True, False], [True, True, False], [True, False, False]]
    assert moves_of(manifest, own, own) == [(0, 1, 1), (1, 2, 0)]
    every = np.array([[True, True, False]] * 3)
    assert moves_of(manifest, with_copies(own), every) == [(1, 0, 0), (0, 2, 1)], "from the node that sends least"

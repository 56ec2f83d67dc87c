"""How ranks agree on one checkpoint: whoever fails, and when, all hear of it, and nobody waits for ever."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.peers import Agreement, owned
from executor.checkpoint.source import rank_of

S = 20.0


class Board:
    """Texts that ranks leave for each other."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()


class Rank:
    """A rank, as ``Nodes`` has it, that meets the others at a board."""

    def __init__(self, board: Board, rank: int, nodes: list[list[int]]) -> None:
        self.board, self.rank, self.nodes, self.size = board, rank, nodes, sum(map(len, nodes))
        self.node = next(node for node, ranks in enumerate(nodes) if rank in ranks)
        self.is_leader = nodes[self.node][0] == rank

    def send(self, key: str, text: str) -> None:
        with self.board.changed:
            assert key not in self.board.texts, "nobody says a thing twice"
            self.board.texts[key] = text
            self.board.changed.notify_all()

    def receive(
        self, key: str, patience_s: float = math.inf, check: Callable[[], None] = lambda: None, *, keeps: bool = False
    ) -> str:
        del check
        with self.board.changed:
            assert self.board.changed.wait_for(lambda: key in self.board.texts, min(patience_s, S)), f"{key} never came"
            return self.board.texts[key] if keeps else self.board.texts.pop(key)

    def forget(self, key: str) -> None:
        self.board.texts.pop(key)


def part(rank: int) -> Manifest:
    return Manifest(step=3, files=(), tensors={}, extra={"rank": rank})


def ended(rank: Rank, is_divided: bool, fails: str) -> Manifest | str | None:
    """Do as an engine does, and fail before what ``fails`` says; return the manifest, or why there is none."""

    def write(what: str) -> None:
        if fails == what:
            raise CheckpointError("no room")

    agreement = Agreement(rank, 7, S, is_divided=is_divided)
    try:
        write("part")
        manifest = agreement.manifest(3, part(rank.rank))
        if manifest is not None:
            write("copy")
            agreement.copied()
            write("end")
            agreement.end()
    except CheckpointError as error:
        agreement.fail(str(error))
        agreement.fail("once more")
        return str(error)
    return manifest


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    is_divided=st.booleans(),
    failing=st.integers(0, 8),
    fails=st.sampled_from(["part", "copy", "end", ""]),
)
@example(sizes=[1, 1], is_divided=True, failing=1, fails="end")
@example(sizes=[1, 1], is_divided=True, failing=1, fails="copy")
@example(sizes=[1, 2], is_divided=True, failing=0, fails="copy")
@example(sizes=[2, 2], is_divided=True, failing=3, fails="part")
@example(sizes=[1, 2], is_divided=True, failing=0, fails="part")
def test_all_hear_of_a_failure_and_nobody_waits(sizes: list[int], is_divided: bool, failing: int, fails: str) -> None:
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    board, count = Board(), sum(sizes)
    failing %= count
    ranks = [Rank(board, rank, nodes) for rank in range(count)]
    with ThreadPoolExecutor(count) as threads:
        jobs = [threads.submit(ended, rank, is_divided, fails * (rank.rank == failing)) for rank in ranks]
        found = [job.result(2 * S) for job in jobs]
    completing = [rank.rank for rank in ranks if rank.rank == 0 or (is_divided and rank.is_leader)]
    if fails == "part" or (fails and failing in completing):
        assert isinstance(found[0], str), "rank 0 acknowledges nothing"
        assert "no room" in found[0]
        if fails == "part" or (fails == "copy" and is_divided):
            assert all(isinstance(found[rank], str) for rank in completing), "no node completes its folder"
        return
    expected = Manifest.of(3, [part(rank) for rank in range(count)], {"ranks": [{"rank": r} for r in range(count)]})
    assert [found[rank] for rank in completing] == [expected] * len(completing)
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
    rank = Rank(Board(), 0, [[0, 1], [2, 3]])
    assert [[record.path for record in owned(rank, node, manifest)] for node in range(2)] == [paths[1:2], paths[:1]]

"""A month of training on 4,096 GPUs whose nodes fail: simulated, beside what plans expect of it.

``python benchmarks/planning/month.py`` plans once, and chooses checkpoints for several rates of failures. Then it
lives through months of 512 nodes, of which any may be lost at any time, also two neighbours at once. A simulated month
knows nothing of the formulas in :mod:`planner.checkpoints.interval`: it goes from failure to failure, and back to
the newest checkpoint that is left.

How often machines fail is from a run on 16,384 H100: 419 interruptions that nobody had planned in 54 days, 78 % of
them by hardware ("The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.4). A quarter of the GPUs has a quarter.
"""

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from rich.progress import track

from benchmarks.origin import origin, write_result
from hwprofiles.registry import load_profile
from planner.checkpoints.choosing import choose_checkpoints
from planner.checkpoints.interval import Protection, nest
from planner.checkpoints.trial import Trial
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.checkpoints import CheckpointLevel, CheckpointRequest
from planner.plan.planning import make_plan
from ullage.cli.request import with_pfs

OUTPUT = Path(__file__).parents[1] / "results" / "planning_month.json"
HOUR_S, MONTH_S = 3600.0, 30 * 86400.0
NUM_GPUS, NUM_NODES = 4096, 512
MEASURED_MTBF_S: Final = 54 * 24 * HOUR_S / 419 * 16_384 / NUM_GPUS
HARDWARE: Final = 0.78
FACTORS: Final = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Times between failures, as multiples of those measured."""
FILE_SYSTEM_BYTES_PER_S: Final = 200_000_000
"""Of each node; 100 GB/s of all."""
RESTART_S: Final = 600.0
NUM_MONTHS: Final = 400


class Month:
    """Training of one month, from failure to failure."""

    def __init__(self, levels: tuple[CheckpointLevel, ...], iteration_s: float) -> None:
        self._levels, self._iteration_s = levels, iteration_s
        self._from = 0  # the iteration that was gone back to
        self._begun_s = 0.0  # when training went on from there
        self._safe = [0] * len(levels)  # newest checkpoint of each level
        self._lost: tuple[int, float] | None = None  # the last lost node, and when its neighbours have its state again

    def _takes_s(self, until: int) -> float:
        checkpoints = (level.cost_s * (until // level.every - self._from // level.every) for level in self._levels)
        return (until - self._from) * self._iteration_s + sum(checkpoints)

    def reached(self, now_s: float) -> int:
        """Return the iteration that has ended."""
        most = max(int((now_s - self._begun_s) / self._iteration_s), 0) + 1
        return self._from + bisect.bisect_right(range(1, most + 1), now_s - self._begun_s, key=self._takes_from)

    def _takes_from(self, count: int) -> float:
        return self._takes_s(self._from + count)

    def fail(self, now_s: float, node: int | None) -> None:
        """Go back to what is left after a process, or a node, was lost."""
        for number, level in enumerate(self._levels):
            newest = self.reached(now_s) // level.every * level.every
            while newest > self._from and self._begun_s + self._takes_s(newest) + level.latency_s > now_s:
                newest -= level.every
            self._safe[number] = max(self._safe[number], newest if newest > self._from else 0)
        survives = 0
        if node is not None:
            if self._lost and now_s < self._lost[1] and (node - self._lost[0]) % NUM_NODES in {1, NUM_NODES - 1}:
                survives = len(self._levels) - 1
                self._safe[:survives] = [0] * survives
            self._lost = node, now_s + self._levels[0].restart_s
        self._from = max(self._safe[survives:])
        self._safe = [min(safe, self._from) for safe in self._safe]
        self._begun_s = now_s + self._levels[survives].restart_s


def months(levels: tuple[CheckpointLevel, ...], iteration_s: float, mtbf_s: float) -> Iterator[float]:
    """Yield the share of each month that is lost."""
    random = np.random.default_rng(0)
    for _ in range(NUM_MONTHS):
        month, now_s = Month(levels, iteration_s), random.exponential(mtbf_s)
        while now_s < MONTH_S:
            month.fail(now_s, int(random.integers(NUM_NODES)) if random.random() < HARDWARE else None)
            now_s += random.exponential(mtbf_s)
        yield 1 - month.reached(MONTH_S) * iteration_s / MONTH_S


def main() -> None:
    """Plan, choose, simulate and write."""
    begun = origin("numpy")
    hardware = with_pfs(load_profile("h100"), FILE_SYSTEM_BYTES_PER_S)
    model = resolve_model("llama-3-70b")
    plan = make_plan(Request(model, hardware, num_devices=NUM_GPUS, global_batch=NUM_GPUS, seq_len=4096))
    iteration_s, trial = plan.prediction.iteration_s, Trial(plan)
    rows = []
    for factor in track(FACTORS, description="months"):
        mtbf_s = factor * MEASURED_MTBF_S
        kinds = {"memory": mtbf_s / (1 - HARDWARE), "pfs": mtbf_s / HARDWARE}
        chosen = choose_checkpoints(plan, CheckpointRequest(mtbf_s=kinds, restart_s=RESTART_S), trial)
        alone = chosen.levels[-1]  # where every checkpoint goes to the file system
        slowest = Protection(alone.cost_s, alone.latency_s, alone.restart_s, 1 / mtbf_s, least_s=alone.latency_s)
        every = nest([slowest], iteration_s)
        ways = {
            "chosen": (chosen.levels, chosen.waste),
            "file system": ((alone.model_copy(update={"every": every.every[0]}),), every.waste),
        }
        for way, (levels, waste) in ways.items():
            lost = np.fromiter(months(levels, iteration_s, mtbf_s), float)
            rows.append(
                {
                    "way": way,
                    "mtbf_h": mtbf_s / HOUR_S,
                    "levels": {level.level: level.every for level in levels},
                    "expected": waste,
                    "simulated": float(lost.mean()),
                    "standard_error": float(lost.std() / np.sqrt(NUM_MONTHS)),
                    "from": float(np.quantile(lost, 0.05)),
                    "to": float(np.quantile(lost, 0.95)),
                }
            )
    about = {"gpus": NUM_GPUS, "nodes": NUM_NODES, "months": NUM_MONTHS, "iteration_s": iteration_s}
    write_result(OUTPUT, begun | about | {"rows": rows})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()

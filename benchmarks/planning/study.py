"""A thousand points, killed twice, and nothing computed again. ``python benchmarks/planning/study.py [NUM_POINTS]``.

OPT-13B over numbers of GPUs x PCIe x cores x device memory, as the command line runs it on two worker processes: once
killed (SIGKILL, workers too) after a third and after two thirds and resumed; and a seeded sample of its points again
in a store of their own, which must come out the same. With fewer points everything is done alike.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.origin import origin, write_result
from ullage.whatif.design import Space
from ullage.whatif.running.point import plan_point
from ullage.whatif.running.store import Store
from ullage.whatif.study import Study, load_study

SWEEPS = (
    "gpus=8,16,32,64",
    "pcie=0.5x..2.75x..0.25x",
    "cores=0.25x,0.5x,1x,1.5x,2x",
    "device-memory=0.4x,0.55x,0.7x,0.85x,1x",
)
REQUEST = ("--model", "opt-13b", "--hardware", "a100-cluster")
NUM_POINTS, NUM_WORKERS, NUM_SAMPLED = 1000, 2, 20
OUTPUT = Path(__file__).parents[1] / "results" / "planning_study.json"


def command(output: Path, num_points: int) -> list[str]:
    """Return the command line of the study."""
    sweeps = [part for sweep in SWEEPS for part in ("--sweep", sweep)]
    design = ["--design", f"random,points={num_points},seed=0"]
    where = ["--workers", str(NUM_WORKERS), "--output", str(output)]
    return [sys.executable, "-m", "ullage", "whatif", *REQUEST, *sweeps, *design, *where]


def keys(store: Path) -> list[str]:
    """Return the points that are done, in the order in which they were."""
    lines = store.read_bytes().split(b"\n")[:-1] if store.exists() else []
    return [json.loads(line)["key"] for line in lines]


def run_until(arguments: list[str], store: Path, enough: int, progress: Progress, task: Any) -> float:
    """Run the study until so many points are done, then kill it; return the seconds that took."""
    begin_s = time.perf_counter()
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None:
            done = len(keys(store))
            progress.update(task, completed=done)
            if done >= enough:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.2)
        code = process.wait()
    elapsed_s = time.perf_counter() - begin_s
    assert code in {0, -signal.SIGKILL}, f"the study ended with {code}"
    return elapsed_s


def same_again(study: Study, folder: Path) -> int:
    """Plan a sample of the points again, one by one in this process; return how many, all of them equal."""
    cases = {case.key: case for case in Space(study.request).cases()}
    points = [point for point in study.points if point.result.status != "refused"]
    sample = random.Random(0).sample(points, min(NUM_SAMPLED, len(points)))  # noqa: S311 - not for secrets
    with Store(folder / "again.jsonl") as store:
        for point in sample:
            request = cases[point.key].request
            assert request is not None
            store.put(point.key, plan_point(request, "plan"))
            assert store.results[point.key] == point.result, f"{point.settings} came out differently"
    return len(sample)


def main() -> None:
    """Run, kill, resume, compare, and write what came of it."""
    began = origin("numba", "numpy", "scipy", "highspy")
    num_points = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_POINTS
    with tempfile.TemporaryDirectory() as name, Progress() as progress:
        folder = Path(name)
        arguments, store = command(folder / "study.json", num_points), folder / "study.points.jsonl"
        task = progress.add_task("points", total=num_points)
        elapsed_s, nums_before = [], []
        for enough in (num_points // 3, 2 * num_points // 3, num_points + 1):
            before = keys(store)
            elapsed_s.append(run_until(arguments, store, enough, progress, task))
            assert keys(store)[: len(before)] == before, "what was done stays done"
            nums_before.append(len(before))
        done = keys(store)
        assert len(done) == len(set(done)), "a point was computed twice"
        study = load_study(folder / "study.json")
        num_sampled = same_again(study, folder)
    statuses = [point.result.status for point in study.points]
    result = {
        **began,
        "request": " ".join(REQUEST),
        "sweeps": SWEEPS,
        "num_workers": NUM_WORKERS,
        "num_points": len(study.points),
        "num_planned": len(done),
        "num_by_status": {status: statuses.count(status) for status in sorted(set(statuses))},
        "num_kept_at_each_start": nums_before,
        "elapsed_s": [round(seconds, 1) for seconds in elapsed_s],
        "total_s": round(sum(elapsed_s), 1),
        "core_s_per_point": round(NUM_WORKERS * sum(elapsed_s) / len(done), 3),
        "num_computed_twice": len(done) - len(set(done)),
        "num_sampled_again_and_equal": num_sampled,
    }
    if num_points == NUM_POINTS:
        write_result(OUTPUT, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Running one job in a process of its own, within a time limit."""

import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.forks import ADDRESS, started
from benchmarks.peers.engines import PACKAGES
from benchmarks.peers.jobs import Job, Outcome

ROOT = Path(__file__).parents[2]
_END_S = 0.5  # a job leaves nothing that takes longer


class Clock:
    """What is left of the time that all processes together may take.

    Args:
        budget_s: seconds from now.
    """

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(self._end_s - time.monotonic(), 0.0)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Starts processes.

    Attributes:
        num_cores: that the processes may use.
        peers: folder that the peers are installed in, beside what is installed anyhow; ``None``: there is none.
        limit_s: most seconds that one process may take.
        clock: all of them together.
        verbose: show what the process writes.
    """

    num_cores: int
    peers: Path | None
    limit_s: float
    clock: Clock
    verbose: bool = False

    def run(self, job: Job, limit_s: float | None = None) -> Outcome:
        """Run a job; a process that fails, dies or takes too long gives an outcome that says so."""
        limit_s = min(limit_s or self.limit_s, self.clock.left_s)
        self._unlock()
        with tempfile.TemporaryDirectory() as folder:
            job_file, outcome_file = Path(folder) / "job.json", Path(folder) / "outcome.json"
            dataclasses.replace(job, started_s=time.time()).save(job_file)
            command = [sys.executable, "-m", "benchmarks.peers.worker", str(job_file), str(outcome_file)]
            with (Path(folder) / "log.txt").open("w+") as log:
                process = started(command, self._environment(job), log)
                try:
                    code = process.wait(limit_s)
                finally:
                    process.end(_END_S)  # and what it has started
                if code is None:
                    return Outcome(error=f"took more than {limit_s:.0f} s")
                log.seek(0)
                text = log.read()
            if self.verbose:
                sys.stderr.write(text)
            if not outcome_file.exists():
                last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
                return Outcome(error=f"the process ended with {code}: {last}"[:500])
            return Outcome.load(outcome_file)

    @property
    def extensions(self) -> Path:
        """Where DeepSpeed's extensions are compiled: in a place of our own, so that no other process waits for us."""
        assert self.peers is not None
        return self.peers.absolute() / "extensions"

    def _unlock(self) -> None:
        """Remove locks that a compilation left which was ended: PyTorch would wait for them for ever."""
        if self.peers is not None:
            for lock in self.extensions.glob("**/lock"):
                lock.unlink()

    def _environment(self, job: Job) -> dict[str, str]:
        environment = dict(os.environ)
        places = [str(ROOT), environment.get("PYTHONPATH", "")]
        if self.peers is not None and job.engine in PACKAGES:  # others shall not pay for importing them
            places.append(str(self.peers.absolute()))
            environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), str(self.peers.absolute() / "bin")])
        environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
        if self.peers is not None:
            environment.setdefault("TORCH_EXTENSIONS_DIR", str(self.extensions))
        if job.setting("spin", default=False):  # what OpenMP reads when it is loaded
            environment.pop(ADDRESS, None)
        environment["OMP_NUM_THREADS"] = str(job.step_threads)
        environment["OMP_WAIT_POLICY"] = "active" if job.setting("spin", default=False) else "passive"
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        return environment

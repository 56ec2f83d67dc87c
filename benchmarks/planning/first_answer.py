"""How long until `ullage plan` answers, beside another version? ``python benchmarks/planning/first_answer.py BASE``.

BASE is a git revision or a folder with a checkout. Both versions run in the same environment and take turns, so that
other load on the machine slows both. Every process is whole: from its start until it has ended. The first one of each
version is not counted, as it compiles. CPU time (user and system) is less noisy than wall-clock time on a busy machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.origin import origin, write_result

HERE = Path(__file__).parents[2]
OUTPUT = HERE / "benchmarks" / "results" / "first_answer.json"
REQUESTS = {
    "opt-13b on 8": ("--model", "opt-13b", "--gpus", "8"),
    "opt-175b on 64": ("--model", "opt-175b", "--gpus", "64"),
    "moe-1t on 4096": ("--model", "moe-1t", "--gpus", "4096", "--hardware", "h100"),
    "opt-175b on 1, which does not fit": ("--model", "opt-175b", "--gpus", "1"),
    "a name that is refused": ("--model", "opt-13bb", "--gpus", "8"),
}


def checkout(base: str, folder: Path) -> Path:
    """Return the folder of another version, unpacked if it is a revision."""
    if Path(base).is_dir():
        return Path(base).resolve()
    data = subprocess.run(["git", "archive", base], cwd=HERE, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def answer(tree: Path, request: tuple[str, ...], output: Path) -> dict[str, float]:
    """Run one process of a version; return seconds until its first output and until its end, and its CPU time."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # whoever installs it has compiled modules
    line = [sys.executable, "-m", "ullage", "plan", *request, "--output", str(output)]
    begin_s = time.perf_counter()
    with subprocess.Popen(line, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first_s = time.perf_counter() - begin_s
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        end_s = time.perf_counter() - begin_s
        process.returncode = os.waitstatus_to_exitcode(status)
    return {"first_output_s": first_s, "process_s": end_s, "cpu_s": usage.ru_utime + usage.ru_stime}


def compared(trees: dict[str, Path], request: tuple[str, ...], num_rounds: int, folder: Path) -> dict[str, Any]:
    """Return medians of each version, and those of this one over those of the other."""
    plans = {name: folder / f"{name}.json" for name in trees}
    for path in plans.values():
        path.unlink(missing_ok=True)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(num_rounds + 1):
        for name, tree in trees.items():
            found = answer(tree, request, plans[name])
            runs[name] += [found] if number else []
    medians = {
        name: {key: round(statistics.median(run[key] for run in each), 3) for key in each[0]}
        for name, each in runs.items()
    }
    ratios = {key: round(medians["now"][key] / value, 3) for key, value in medians["base"].items()}
    row: dict[str, Any] = {"request": " ".join(request), **medians, "now_over_base": ratios}
    if all(path.exists() for path in plans.values()):
        made = [json.loads(path.read_text(encoding="utf-8")) for path in plans.values()]
        for plan in made:  # digests cover fields that only one version knows; a search may need fewer simulations
            for name in ("model_digest", "hardware_digest", "content_digest", "num_simulations"):
                del plan[name]
            for proof in plan["certificate"]["proofs"]:
                if "overrun" in proof:  # that nothing fits can be proven with different multipliers
                    proof |= {"overrun": True, "multipliers": {}}
        known = set.intersection(*({engine["name"] for engine in plan["engines"]} for plan in made))
        for plan in made:  # engines that only one version compares with
            plan["engines"] = [engine for engine in plan["engines"] if engine["name"] in known]
        row["same_plan"] = made[0] == made[1]
    return row


def main() -> None:
    """Time everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a git revision, or a folder with a checkout")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each version that count (5)")
    args = parser.parse_args()
    began = origin("highspy", "llvmlite", "numba", "numpy")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        (unpacked := Path(folder) / "base").mkdir()
        trees = {"base": checkout(args.base, unpacked), "now": HERE}
        for name, request in track(REQUESTS.items(), description="requests"):
            rows[name] = compared(trees, request, args.rounds, Path(folder))
    write_result(OUTPUT, {**began, "num_rounds": args.rounds, "rows": rows})
    for name, row in rows.items():
        now, ratio = row["now"], row["now_over_base"]["cpu_s"]
        print(f"{ratio:6.2f} of the CPU time, first output after {now['first_output_s']:.1f} s: {name}")


if __name__ == "__main__":
    main()

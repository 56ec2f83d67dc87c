"""Plans made before a machine is at hand, and priced again by its own profile when it is.

    python -m benchmarks.prepared DIR --host-memory 111GB --cores 16      for benchmarks/gpu, at several host bandwidths

A search takes seconds in which a lent GPU does nothing. What a host's memory delivers decides most about a plan, and is
not known before, so there is one for each of a few rates; the fastest by the calibrated profile that fits is executed.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from hwprofiles.paths import replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.plan.competition import Found
from planner.plan.document import Plan, load_plan
from planner.plan.planning import make_plan
from planner.search.scoring import Candidate, Scorer
from ullage.cli.arguments import parse_bytes

FOLDER: Final = "ULLAGE_PREPARED"
"""Environment variable: the folder of plans made before, if there is one."""
RATES: Final = (120e9, 200e9, 400e9)
"""Bytes per second of the host's memory that plans are made for."""


_CHOSEN = (
    "micro_batch",
    "num_micro_batches",
    "precision",
    "optimizer",
    "clip",
    "split_masters",
    "loss_tile_tokens",
    "layer_tile_tokens",
)


def assumed(profile: HardwareProfile, host_bytes: float, num_cores: int, dram_bytes_per_s: float) -> HardwareProfile:
    """Return a profile whose host has so much memory, so many cores and such a rate of its memory."""
    numbers = {"host.memory_bytes": host_bytes, "host.dram_bytes_per_s": dram_bytes_per_s}
    found = replace(profile, numbers, Provenance(origin="assumed", source="before the machine is at hand"))
    cores = {name: min(getattr(found.host, name), num_cores) for name in ("num_cores", "num_optimizer_cores")}
    return found.model_copy(update={"host": found.host.model_copy(update=cores)})


def priced(plan: Plan, request: Request) -> Found | None:
    """Return what a plan that was made for another profile promises on that of a request.

    ``None``: it does not fit, or is for another model, batch or precision than the request.
    """
    decisions, rivals = plan.decisions, variants(request)
    sizes = {unit.name: unit.num_params for unit in plan.units()}
    for own in rivals:
        setup = own.setup
        if sizes != {unit.name: unit.num_params for unit in setup.units} or plan.seq_len != request.seq_len:
            continue
        given = setup.given
        if any(getattr(decisions, field) != getattr(given, field) for field in _CHOSEN):
            continue
        prediction = Scorer(setup.units, request.seq_len, own.cost).predict(decisions)
        best = Candidate(decisions, prediction.iteration_s, prediction.missing_bytes)
        return Found(own, best, rivals, (), 0) if prediction.fits else None
    return None


def planned(request: Request, name: str, budget_s: float | None = None) -> Plan:
    """Return the fastest of the plans with a name that were made before; if none fits, search.

    Args:
        request: what is planned for, with the machine's own profile.
        name: of the plans.
        budget_s: of a search.

    Raises:
        ValueError: nothing fits, or the request cannot be met.
    """
    folder = os.environ.get(FOLDER)
    paths = sorted(Path(folder).glob(f"*/{name}.json")) if folder else []
    best: tuple[Plan, Found] | None = None
    for plan in map(load_plan, paths):
        found = priced(plan, request)
        if found and (best is None or found.prediction.iteration_s < best[1].prediction.iteration_s):
            best = plan, found
    if best is None:
        return make_plan(request, budget_s=budget_s)
    plan, found = best
    changed = {
        "hardware": request.hardware,
        "prediction": found.prediction,
        "certificate": found.certificate(),
        "engines": (),
    }
    return plan.model_copy(update=changed).sealed()


def _make(request: Request, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(make_plan(request).to_json(), encoding="utf-8")
    except ValueError as error:
        return f"{path.parent.name}/{path.stem}: not planned: {error}"
    return ""


def requests(profile: HardwareProfile) -> Iterator[tuple[str, Request]]:
    """Yield what the stages on a GPU plan for, and by which names."""
    from benchmarks.gpu.agreement import SETTINGS, folder_name, request_of  # noqa: PLC0415 - they import this
    from benchmarks.gpu.peers import FIRST, cell_of  # noqa: PLC0415
    from benchmarks.peers.driver import request_of as request_of_cell  # noqa: PLC0415

    for name, setting in SETTINGS.items():
        if setting.placing is None:
            yield folder_name(name), request_of(setting, profile)
    for model, shape in FIRST:
        with contextlib.suppress(ValueError):
            cell = cell_of(model, shape, None, 0)
            yield cell.name, request_of_cell(cell, profile, "cuda")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make all plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--profile", default="h100", metavar="NAME", help="of the machine, but for its host (h100)")
    parser.add_argument("--host-memory", type=parse_bytes, default=111 * 10**9, metavar="SIZE", help="(111GB)")
    parser.add_argument("--cores", type=int, default=16, metavar="N", help="(16)")
    args = parser.parse_args(arguments)
    base = load_profile(args.profile)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begun = [
            pool.submit(_make, request, args.folder / f"{rate / 1e9:.0f}" / f"{name}.json")
            for rate in RATES
            for name, request in requests(assumed(base, args.host_memory, args.cores, rate))
        ]
        for why in filter(None, (future.result() for future in begun)):
            print(why)


if __name__ == "__main__":
    main()

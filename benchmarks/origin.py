"""What every result of a measurement begins with: the command, when and on what it ran, and what took part."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from hwprofiles.files import write_whole
from hwprofiles.machine import cpu_name, num_cores

_ROOT = Path(__file__).parents[1]


def origin(*packages: str, beside: Path | None = None, gpu: bool = False) -> dict[str, Any]:
    """Return that; call it before anything is measured, as the load is that of the moment.

    Args:
        packages: whose versions are told, of those that are installed.
        beside: a folder that some of them are installed in, in place of the environment.
        gpu: a GPU takes part.
    """
    result: dict[str, Any] = {
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], _ROOT), *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "load_average_before": os.getloadavg()[0],
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    return (
        result
        | (gpu_facts() if gpu else {})
        | {"versions": {"python": platform.python_version(), **_versions(packages, beside)}}
    )


def gpu_facts() -> dict[str, Any]:
    """Return name and memory of the GPU; CUDA is initialised, after which a process cannot be forked from."""
    import torch  # noqa: PLC0415 - a second, of which drivers without a GPU have no need

    return {"gpu": torch.cuda.get_device_name(), "gpu_bytes": torch.cuda.mem_get_info()[1]}


def _versions(packages: tuple[str, ...], beside: Path | None) -> dict[str, str]:
    there = {d.metadata["Name"]: d.version for d in distributions(path=[str(beside)])} if beside else {}
    found = {}
    for name in packages:
        try:
            found[name] = there.get(name) or version(name)
        except PackageNotFoundError:
            continue
    return found


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file whole, with its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")

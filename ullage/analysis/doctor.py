"""Facts about this machine that matter for training, and the first problem."""

import importlib
import os
import platform
import re
import resource
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from hwprofiles import __version__
from hwprofiles.installation import check_versions
from hwprofiles.machine import available_memory_bytes, cpu_name, num_cores

_PACKAGES: Final = ("torch", "transformers", "numba", "scipy", "highspy", "pydantic", "rich")
_QUERY: Final = (
    "name",
    "driver_version",
    "memory.total",
    "memory.free",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
_TOOL_TIMEOUT_S: Final = 20
_NODES, _PAGES = Path("/sys/devices/system/node"), Path("/sys/kernel/mm")


def examine() -> dict[str, Any]:
    """Return facts about this machine; ``failure`` is the first problem with its remedy, or ``None``."""
    missing = _missing()
    gpus = gpus_of()
    found: dict[str, Any] = {
        "ullage": __version__,
        "python": platform.python_version(),
        "missing": missing,
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        "num_numa_nodes": len(list(_NODES.glob("node[0-9]*"))) or None,
        "transparent_hugepages": _transparent_hugepages(),
        "num_free_hugepages": _free_hugepages(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_memory_bytes": available_memory_bytes(),
        "lockable_bytes": _lockable_bytes(),
        "gpus": gpus,
        **_torch(missing),
    }
    return found | {"failure": failure_of(found)}


def failure_of(found: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the first problem in the facts of :func:`examine`, and its remedy; ``None`` if there is no problem."""
    if found["missing"]:
        errors = "; ".join(f"{name} ({error})" for name, error in found["missing"].items())
        return {"what": f"packages cannot be used: {errors}", "remedy": "pip install 'ullage[execute]'"}
    if found["gpus"] and found["num_usable_gpus"] == 0:
        return {
            "what": "the driver has a GPU, but torch cannot use it",
            "remedy": "install a torch that is built for CUDA, no newer than the driver; see CUDA_VISIBLE_DEVICES",
        }
    for gpu in found["gpus"]:  # check only the width: the generation falls while the link is idle
        width, most = gpu["pcie_width"], gpu["pcie_width_max"]
        if width is not None and most is not None and width < most:
            return {
                "what": f"{gpu['name']} has x{width} of x{most} PCIe lanes",
                "remedy": "put it into a slot with all lanes; copies are slower than they could be",
            }
    return None


def gpus_of() -> list[dict[str, Any]]:
    """Return the GPUs that ``nvidia-smi`` lists; ``[]`` without ``nvidia-smi``. Unknown values are ``None``."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [_gpu(line) for line in done.stdout.splitlines() if line.count(",") == len(_QUERY) - 1]


def _gpu(line: str) -> dict[str, Any]:
    name, driver, *words = (word.strip() for word in line.split(","))
    numbers = [int(word) if word.isdigit() else None for word in words]
    total, free = (None if mebibytes is None else mebibytes << 20 for mebibytes in numbers[:2])
    names = ("pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max")
    memory = {"memory_bytes": total, "free_bytes": free}
    return {"name": name, "driver": driver, **memory, **dict(zip(names, numbers[2:], strict=True))}


def _missing() -> dict[str, str]:
    """Return the error of each package that is too old, or whose import fails, also for want of a shared library."""
    missing = {}
    for name in _PACKAGES:
        try:
            check_versions([name])
            importlib.import_module(name)
        except (ImportError, OSError) as error:
            missing[name] = str(error)
    return missing


def _torch(missing: Mapping[str, str]) -> dict[str, Any]:
    if "torch" in missing:
        return {"torch": None, "cuda": None, "num_usable_gpus": 0}
    import torch  # noqa: PLC0415 - slow to import

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"torch": version("torch"), "cuda": torch.version.cuda, "num_usable_gpus": usable}


def _transparent_hugepages() -> str | None:
    chosen = re.search(r"\[(\w+)\]", _text(_PAGES / "transparent_hugepage/enabled"))
    return chosen[1] if chosen else None


def _free_hugepages() -> int:
    return sum(int(_text(file) or 0) for file in (_PAGES / "hugepages").glob("*/free_hugepages"))


def _lockable_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""

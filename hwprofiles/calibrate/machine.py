"""What the operating system says about this machine: cores, memory, names."""

import math
import os
import platform
import re
import socket
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Return the cores this process may use: its affinity, and the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory in _cgroups():
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(math.ceil(int(quota) / int(period)), 1))
    return cores


def available_memory_bytes() -> int:
    """Return the memory that is free for use: the system's, or what the control groups leave, if that is less."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    available = int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for directory in (*_cgroups(), _CGROUP / "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(directory / limit_name), _read(directory / used_name)
            if limit.isdigit() and used.isdigit():
                available = min(available, max(int(limit) - int(used), 0))
    return available


def cpu_name() -> str:
    """Return the processor's model name."""
    found = re.search(r"model name\s*:\s*(.+)", _read(Path("/proc/cpuinfo")))
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def profile_name() -> str:
    """Return the host's name in the form that a profile's name must have."""
    slug = re.sub(r"[^a-z0-9._-]+", "-", socket.gethostname().lower()).lstrip("._-")
    return slug or "this-machine"


def _cgroups() -> list[Path]:
    """Return the directories of this process's version 2 control group and of all groups around it."""
    found = re.search(r"^0::/(.*)$", _read(Path("/proc/self/cgroup")), re.MULTILINE)
    own = _CGROUP / found[1] if found else _CGROUP
    return [d for d in (own, *own.parents) if d == _CGROUP or _CGROUP in d.parents]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, or not this version of control groups
        return ""

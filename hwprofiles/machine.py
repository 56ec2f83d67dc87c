"""Facts of the operating system about this machine: cores, memory, names. Is a profile of this machine?

Everything is read from files of Linux, so planning needs no torch. Other systems give fewer facts.
"""

import ctypes
import itertools
import math
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs pydantic, and `ullage doctor` says if that is missing
    from hwprofiles.profile import HardwareProfile, MachineIdentity

_SYS, _PROC = Path("/sys"), Path("/proc")
_SAME_MEMORY = 0.02  # different kernels reserve a little memory of different sizes
_MANY = 8  # with at least so many cores, two are left to threads that issue work; with fewer, one
_CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Return the number of cores that this process may use by its affinity and the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(math.ceil(quota), 1) for quota in map(_quota_cores, _cgroups("cpu")) if quota)])


def num_issuing_cores(num_cores: int) -> int:
    """Return how many of a rank's cores the threads that issue work to its GPU need; the others update.

    Args:
        num_cores: cores of the rank.
    """
    return min(num_cores // 2, 2 if num_cores >= _MANY else 1)


def cache_bytes() -> int:
    """Return the size of the last-level caches of all sockets together; 0 if it is not known."""
    places = (_SYS / "devices/system/cpu").glob("cpu[0-9]*/cache/index3")
    sizes = {_read(place / "shared_cpu_list"): _read(place / "size") for place in places}
    return sum(int(size[:-1]) << 10 for size in sizes.values() if re.fullmatch(r"\d+K", size))


def available_memory_bytes() -> int:
    """Return the free bytes of the system, or of this process's control groups if those have less."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(_PROC / "meminfo"))
    available = int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *(free for free in map(_free_bytes, _cgroups("memory")) if free is not None)])


def cpu_name() -> str:
    """Return the processor's model name."""
    found = re.search(r"model name\s*:\s*(.+)", _read(Path("/proc/cpuinfo")))
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def profile_name() -> str:
    """Return the host's name in the form that a profile's name must have."""
    slug = re.sub(r"[^a-z0-9._-]+", "-", socket.gethostname().lower()).lstrip("._-")
    return slug or "this-machine"


def gpu_names() -> tuple[str, ...]:
    """Return the names of the GPUs that NVIDIA's driver lists, in the order of their bus addresses."""
    files = sorted((_PROC / "driver/nvidia/gpus").glob("*/information"))
    found = (re.search(r"Model:\s*(.+)", _read(file)) for file in files)
    return tuple(match[1].strip() for match in found if match)


def drive_names(folder: Path) -> tuple[str, ...]:
    """Return the models of the drives of a folder's file system; ``()`` if they have no names.

    A virtual drive often has no name. A file system on several devices or on a network has none.
    """
    try:
        device = folder.stat().st_dev
    except OSError:
        return ()
    place = _SYS / f"dev/block/{os.major(device)}:{os.minor(device)}"
    return tuple(sorted({name for path in _drives(place) if (name := _read(path / "device/model"))}))


def _drives(place: Path) -> Iterator[Path]:
    """Yield the whole drives that a block device, partition, RAID or mapping consists of."""
    parts = sorted((place / "slaves").glob("*"))
    if parts:
        yield from itertools.chain.from_iterable(map(_drives, parts))
    elif (place / "partition").exists():
        yield place.resolve().parent
    else:
        yield place


def this_machine(folders: Sequence[Path] = ()) -> "MachineIdentity":
    """Return the identity of this machine, with the drives of some folders."""
    from hwprofiles.profile import MachineIdentity  # noqa: PLC0415 - see above

    names = {name for folder in folders for name in drive_names(folder)}
    return MachineIdentity(
        cpu=cpu_name(),
        num_cpus=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=gpu_names(),
        drives=tuple(sorted(names)),
    )


def differences(profile: "HardwareProfile") -> tuple[str, ...]:
    """Return the known differences between this machine and the one that a profile was measured on.

    Drives that were measured must still be here. New drives are not a difference, nor is more memory: that of a virtual
    machine may grow as it is used.
    """
    then = profile.measured_on
    if then is None:
        return ()
    now = this_machine()
    result = []
    if now.cpu != then.cpu:
        result.append(f"its CPU is {then.cpu!r}, this one {now.cpu!r}")
    if now.num_cpus != then.num_cpus:
        result.append(f"it has {then.num_cpus} logical CPUs, this one {now.num_cpus}")
    if now.memory_bytes < (1 - _SAME_MEMORY) * then.memory_bytes:
        result.append(f"it has {then.memory_bytes / 1e9:.1f} GB of memory, this one {now.memory_bytes / 1e9:.1f} GB")
    if now.gpus != then.gpus:
        result.append(f"its GPUs are {_listed(then.gpus)}, those of this one {_listed(now.gpus)}")
    here = {name for file in (_SYS / "block").glob("*/device/model") if (name := _read(file))}
    if missing := sorted(set(then.drives) - here):
        result.append(f"its drives {_listed(missing)} are not in this one")
    return tuple(result)


ALLOWED = ", or use it anyway with --allow-other-machine"


def check_measured_here(profile: "HardwareProfile", otherwise: str = ALLOWED) -> None:
    """Refuse a profile that was measured on another machine.

    Args:
        profile: the profile that is about to be used.
        otherwise: the end of the error message: an alternative to calibrating here.

    Raises:
        ValueError: the profile was measured on another machine.
    """
    if found := differences(profile):
        raise ValueError(
            f"profile {profile.name} was measured on another machine: {'; '.join(found)}; run `ullage calibrate` "
            f"here{otherwise}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _cgroups(controller: str) -> list[Path]:
    """Return the directories of this process's control groups that limit something, and of all their parents.

    Those of version 2 are below one root, those of version 1 below one root per controller. In a container, the root
    may be the container's own group, and the path one of the host.
    """
    result = [_CGROUP, _CGROUP / controller]
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _CGROUP / controller if controllers else _CGROUP
            own = root / path.lstrip("/")
            result += [directory for directory in (own, *own.parents) if root in directory.parents]
    return result


def _quota_cores(group: Path) -> float | None:
    """Return how many cores a control group may use, of either version; ``None``: no quota."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _free_bytes(group: Path) -> int | None:
    """Return the bytes that a control group may still use, of either version; ``None``: no limit.

    The kernel counts the page cache as used. It drops pages of files that were not used lately before it refuses
    memory (``inactive_file`` in the kernel's "Control Group v2" and "Memory Resource Controller").
    """
    limit, used = _read(group / "memory.max"), _read(group / "memory.current")
    if not limit:
        limit, used = _read(group / "memory.limit_in_bytes"), _read(group / "memory.usage_in_bytes")
    if not (limit.isdigit() and used.isdigit()):
        return None
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    # In version 1 the plain number leaves out the groups below, which the usage has.
    cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(int(limit) - max(int(used) - cached, 0), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, or not this version of control groups
        return ""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES = 1 << 30  # glibc takes thresholds as int


def keep_freed_memory() -> bool:
    """Stop glibc from giving freed tensors back to the kernel; return whether it did.

    By default every large tensor is mapped anew and its pages are zeroed again at first touch. In training on a CPU
    this takes a fifth of the time of elementwise kernels. Kept memory costs nothing the second time, but the process
    keeps its peak. Without glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, _LARGEST_BYTES) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))

"""A packaged profile with this machine's memory and cores: what is planned for where calibration has left none.

    python benchmarks/gpu/stand_in.py h100 OUTPUT.json

Plans for it run here; their predicted times are those of another machine.
"""

import argparse
from pathlib import Path

import torch

from hwprofiles.machine import available_memory_bytes, num_cores
from hwprofiles.paths import replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile, save_profile
from ullage.calibrate.run import USABLE_SHARE
from ullage.cli.arguments import parse_bytes

_DEVICE_SHARE = 0.95


def stand_in(profile: HardwareProfile, host_bytes: float | None = None) -> HardwareProfile:
    """Return a profile with no more memory and cores than are free here, or with a given host memory."""
    host_bytes = host_bytes or min(profile.host.memory_bytes.value, USABLE_SHARE * available_memory_bytes())
    numbers = {"host.memory_bytes": host_bytes}
    if torch.cuda.is_available():
        free_bytes = _DEVICE_SHARE * torch.cuda.mem_get_info()[0]
        numbers["device.memory_bytes"] = min(profile.device.memory_bytes.value, free_bytes)
    found = replace(profile, numbers, Provenance(origin="assumed", source="what is free on another machine"))
    cores = {name: min(getattr(found.host, name), num_cores()) for name in ("num_cores", "num_optimizer_cores")}
    return found.model_copy(update={"host": found.host.model_copy(update=cores)})


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="name of a packaged profile")
    parser.add_argument("output", type=Path)
    parser.add_argument("--host-memory", type=parse_bytes, metavar="SIZE", help="that plans may use (what is free now)")
    args = parser.parse_args()
    save_profile(stand_in(load_profile(args.profile), args.host_memory), args.output)


if __name__ == "__main__":
    main()

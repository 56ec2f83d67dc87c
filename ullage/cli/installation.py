"""Check that imports find Ullage's own packages: other projects use the names ``planner`` and ``executor`` too."""

import importlib.util
from pathlib import Path

from hwprofiles.installation import InstallationError

PACKAGES = ("hwprofiles", "planner", "executor", "ullage")


def check_packages() -> None:
    """Check that Python finds all packages of Ullage in the folder of this one.

    Raises:
        InstallationError: a package is missing or is found elsewhere; the message names it and the remedy.
    """
    home = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise InstallationError(f"package {name!r} is missing beside {home / 'ullage'}; install ullage again")
        found = Path(spec.origin).resolve() if spec.origin else None
        if found is None or found.parent.parent != home:
            where = found or ", ".join(spec.submodule_search_locations or ()) or "elsewhere"
            raise InstallationError(
                f"package {name!r} is not Ullage's: it resolves to {where}, not to {home / name}; pip uninstall {name} "
                "if another distribution installed it, leave a folder that has a file of that name, or use a fresh "
                "environment"
            )

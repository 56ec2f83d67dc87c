"""A check that the packages of this program are its own: ``planner`` and ``executor`` are names that others use too."""

import importlib.util
from pathlib import Path

PACKAGES = ("hwprofiles", "planner", "executor", "ullage")


class InstallationError(ImportError):
    """Another distribution's package would be imported in place of ours."""


def check_packages() -> None:
    """Check that all our packages resolve beside this one.

    Raises:
        InstallationError: one is missing or resolves elsewhere; names it and says what to do.
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
                f"package {name!r} does not belong to this installation: it resolves to {where}, not to "
                f"{home / name}; pip uninstall {name} if another distribution brought it, do not run beside a file of "
                "that name, or use a fresh environment"
            )

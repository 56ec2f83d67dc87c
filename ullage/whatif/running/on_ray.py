"""Plan points on a Ray cluster, with the same function as on this machine."""

import importlib
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from ullage.whatif.running.point import Effort, plan_point, program_digest
from ullage.whatif.running.workers import AHEAD, Runner, Task, num_usable_cores
from ullage.whatif.study import Result

try:
    ray: Any = importlib.import_module("ray")  # untyped, because its types differ between versions
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("--ray needs Ray; pip install 'ullage[ray]'", name="ray") from error


class ClusterError(ValueError):
    """A Ray cluster cannot be used; the message contains the remedy."""


def on_ray(address: str, num_workers: int | None) -> Runner:
    """Return a function that plans points on a Ray cluster, each in a task of one core.

    Args:
        address: address of a running cluster (``auto`` finds the one of this machine); empty: start a new cluster on
            this machine for the time of the study.
        num_workers: points to plan at once; by default the number of cores of the cluster.
    """

    def run(tasks: Iterable[Task], effort: Effort) -> Iterator[tuple[str, Result]]:
        _connect(address, num_workers)
        try:
            _check_program()
            yield from _planned(tasks, num_workers or int(ray.cluster_resources().get("CPU", 1)), effort)
        finally:
            ray.shutdown()

    return run


def _connect(address: str, num_workers: int | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # otherwise Ray warns about a change that does not affect Ullage
    options = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
    try:
        if address:
            _check_reachable(address)
            ray.init(address=address, **options)
        else:
            ray.init(num_cpus=num_workers or num_usable_cores(), include_dashboard=False, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ClusterError(
            f"no Ray cluster at {address or 'this machine'}: {reason}; start one with `ray start --head`, or give "
            "--ray alone for one of this machine"
        ) from error


def _check_reachable(address: str) -> None:
    """Fail at once if nothing listens at the address. Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        with socket.create_connection((host, int(port)), timeout=10):
            pass


def _check_program() -> None:
    """Check that the cluster's nodes run the same program, because results are stored under its digest.

    Raises:
        ClusterError: the nodes have another version, or none.
    """
    try:
        there = ray.get(ray.remote(_program_of_cluster).remote())
    except ray.exceptions.RayError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise ClusterError(
            f"the cluster's nodes cannot run ullage: {reason}; install the same version there"
        ) from error
    if there != program_digest():
        raise ClusterError(
            "the cluster's nodes have another version of ullage or its libraries; install the same there"
        )


def _program_of_cluster() -> str:
    return program_digest()


def _planned(tasks: Iterable[Task], num_workers: int, effort: Effort) -> Iterator[tuple[str, Result]]:
    plan = ray.remote(num_cpus=1, max_retries=3)(plan_point)
    todo, running = iter(tasks), dict[Any, str]()
    while True:
        for key, request, checkpoints in itertools.islice(todo, num_workers + AHEAD - len(running)):
            running[plan.remote(request, effort, checkpoints)] = key
        if not running:
            return
        done, _ = ray.wait(list(running), num_returns=1)
        for reference in done:
            try:
                result = ray.get(reference)
            except ray.exceptions.RayError as error:
                raise ClusterError(
                    f"a worker of the cluster was lost ({str(error).splitlines()[0]}); run the same command again "
                    "to continue"
                ) from error
            yield running.pop(reference), result

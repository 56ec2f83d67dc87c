"""A request for the memory of this machine that is free now."""

import dataclasses

from planner.choices.request import Request
from ullage.cli.options import Options
from ullage.cli.request import request_of


def request_here(asked: Options) -> Request:
    """Return the request that is asked for; with ``memory="free"``, for this machine and what is free now.

    If the machine has no profile, it is measured first.

    Raises:
        ValueError: see :func:`ullage.cli.request.request_of`; or the machine named is of another kind than this one.
    """
    if asked.memory is None:
        return request_of(asked)
    from ullage.this_machine.planning import free_memory, machine_now  # noqa: PLC0415 - torch takes seconds

    of_machine = {"hardware": asked.hardware, "device_memory": asked.device_memory}
    machine = machine_now(
        {name: value for name, value in of_machine.items() if value is not None},  # type: ignore[arg-type]
        free_memory(),
        asked.num_devices,
    )
    return request_of(dataclasses.replace(asked, memory=None, device_memory=None, hardware=machine))

"""``ullage.plan``: plans from names or objects, with the defaults of the command line."""

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any, Final

from hwprofiles.profile import Dtype, HardwareProfile
from hwprofiles.registry import LOCAL
from planner.choices.request import Request
from planner.decisions import Precision
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfig
from planner.plan.document import Plan
from ullage.cli.default_hardware import default_hardware
from ullage.cli.options import CHECKPOINTS, Options
from ullage.rivals import make_plan
from ullage.this_machine.request import request_here

# Options that are keywords of their own here, or that need more than a request.
_OWN: Final = {"model", "hardware", "num_devices", "precision"}
_OPTIONS: Final = {f.name for f in dataclasses.fields(Options) if f.metadata["group"] != CHECKPOINTS} - _OWN


def plan(
    model: str | Path | Model | Request,
    *,
    hardware: str | HardwareProfile | None = None,
    gpus: int | None = None,
    precision: Precision | Dtype | None = None,
    budget_s: float | None = None,
    **options: Any,
) -> Plan:
    """Find the fastest way to train a model on a machine, and prove how far it can be from the best.

    Args:
        model: a name (``"opt-13b"``), the path of a ``config.json``, sizes, or a model from ``ullage.capture_module``;
            or a whole :class:`Request`, which replaces all other arguments except ``budget_s``.
        hardware: name or path of a profile, ``"local"`` for this machine's own, or a profile. Default: the profile that
            ``ullage calibrate`` wrote for this machine, or else ``"a100-80"``.
        gpus: devices to train on; they fill one node after another. Default: one.
        precision: type of weights and gradients. Default: that of a captured model; for other models bf16, or fp32 on a
            device that multiplies fp32 more than twice as fast. ``Precision(weights="bf16", master="bf16")``: the
            weight is the optimizer's master copy.
        budget_s: time limit of the search in seconds; by default a few seconds.
        options: what else ``ullage plan`` takes, by the names of studies: ``seq_len``, ``micro_batch``,
            ``num_micro_batches``, ``global_batch``, ``tensor_parallel``, ``optimizer``, ``clip``, ``storage``,
            ``kernels``, ``products="fp8"``, ``lora="rank=16"``, ``quantize="nf4"``, ``batches="masked"``,
            ``memory="free"``, ... See `ullage plan --help`.

    Raises:
        InfeasibleError: no plan fits in memory; the message says which memory is too small, by how much, and which
            changes would help.
        ValueError: the model, machine or option does not exist, or the machine cannot run the request.
    """
    if not isinstance(model, str | Path | ModelConfig | CapturedModel | Request):
        raise TypeError(
            f"the model is {type(model).__name__}; give a name, the path of a config.json, sizes, a request, or what "
            "ullage.capture_module makes of an nn.Module"
        )
    if budget_s is not None and (not isinstance(budget_s, int | float) or not 0 < budget_s < math.inf):
        raise ValueError(f"budget_s is {budget_s!r}, but must be a number of seconds above 0")
    named = {"hardware": hardware, "gpus": gpus, "precision": precision}
    given = {name: value for name, value in (named | options).items() if value is not None}
    if isinstance(model, Request):
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be combined with a Request; put them into the request, or give a model "
                "instead"
            )
        return make_plan(model, budget_s=budget_s)
    if unknown := sorted(set(options) - _OPTIONS):
        raise ValueError(f"plan() has no option {unknown[0]}; use one of {', '.join(sorted(_OPTIONS))}")
    if "gpus" in given:
        given["num_devices"] = given.pop("gpus")
    if hardware is None and "memory" not in given:
        _warn_about_default()
    return make_plan(request_here(Options(model=model, **given)), budget_s=budget_s)


def _warn_about_default() -> None:
    name, note = default_hardware()
    if note and name != LOCAL:
        warnings.warn(note, UserWarning, stacklevel=3)

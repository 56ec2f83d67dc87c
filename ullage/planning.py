"""``ullage.plan``: plans from names or objects, with the defaults of the command line."""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hwprofiles.profile import Dtype, HardwareProfile
from hwprofiles.registry import LOCAL
from planner.bounds.certificate import computing_s
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import Precision
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfig
from planner.plan.document import Plan
from planner.plan.planning import make_plan as make_plan_alone
from planner.plan.unlike import make_unlike_plan
from ullage.cli.default_hardware import default_hardware
from ullage.cli.options import CHECKPOINTS, Options, option_value
from ullage.cli.remedies import Remedy, remedies_of
from ullage.cli.request import unlike_request
from ullage.output.progress import Report, search_words
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
    beside: Mapping[str, int] | None = None,
    precision: Precision | Dtype | None = None,
    budget_s: float | None = None,
    max_simulations: int | None = None,
    engines: bool = True,
    progress: Report | None = None,
    **options: Any,
) -> Plan:
    """Find the fastest way to train a model on a machine, and prove how far it can be from the best.

    Args:
        model: a name (``"opt-13b"``), the path of a ``config.json``, sizes, or a model from ``ullage.capture_module``;
            or a whole :class:`Request`, which replaces all other arguments except ``budget_s``.
        hardware: name or path of a profile, ``"local"`` for this machine's own, or a profile. Default: the profile that
            ``ullage calibrate`` wrote for this machine, or else ``"a100-80"``.
        gpus: devices to train on; they fill one node after another. Default: one.
        beside: devices of other kinds in the same run, by the names of their profiles, as in ``{"a100-80": 4}``; they
            divide ``global_batch`` by their speed.
        precision: type of weights and gradients. Default: that of a captured model; for other models bf16, or fp32 on a
            device that multiplies fp32 more than twice as fast. ``Precision(weights="bf16", master="bf16")``: the
            weight is the optimizer's master copy.
        budget_s: time limit of the search in seconds; by default a few seconds.
        max_simulations: end the search after so many schedules. With 1, the first plan found is returned: the search
            takes a fraction of the time, and the plan is a few percent slower.
        engines: whether to compare with other engines, which takes as long as the search.
        progress: called with the present step in words, the schedules simulated so far, and 0.
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
    search: dict[str, Any] = {"max_simulations": max_simulations, "budget_s": budget_s}
    if progress is not None:
        search["progress"] = lambda best, count: progress(search_words(best, count), count, 0)
    make = make_plan if engines else make_plan_alone
    named = {"hardware": hardware, "gpus": gpus, "beside": beside, "precision": precision}
    given = {name: value for name, value in (named | options).items() if value is not None}
    if isinstance(model, Request):
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be combined with a Request; put them into the request, or give a model "
                "instead"
            )
        return make(model, **search)
    given.pop("beside", None)
    asked = _options(model, given)
    if hardware is None and "memory" not in given:
        _warn_about_default()
    if beside is not None:
        if max_simulations is not None:
            raise ValueError("max_simulations is for devices of one kind; give budget_s, or leave beside out")
        return make_unlike_plan(*unlike_request(asked, beside), search.get("progress"), budget_s)
    return make(request_here(asked), **search)


def what_would_fit(model: str | Path, **options: Any) -> Iterator[Remedy]:
    """Yield changes with which a request that does not fit in memory would fit, as soon as each is found.

    Args:
        model: name, or path of a ``config.json``.
        options: what else :func:`plan` takes, beside those of the search.

    Raises:
        ValueError: the model, machine or option does not exist.
    """
    asked = _options(model, {name: value for name, value in options.items() if value is not None})
    return remedies_of(asked, request_here(asked))


def bound_tokens_per_s(model: str | Path, **options: Any) -> float:
    """Return tokens/s over all devices that no plan exceeds, from the time in which the devices compute.

    It is found in milliseconds, and tells which machines are not worth a plan. It says nothing of memory. The bound of
    a plan's certificate is closer.

    Args:
        model: name, or path of a ``config.json``.
        options: what else :func:`plan` takes, beside those of the search.

    Raises:
        ValueError: the model, machine or option does not exist, or the machine cannot run the request.
    """
    request = request_here(_options(model, {name: value for name, value in options.items() if value is not None}))
    tried = variants(request)
    return max(one.choice.num_sequences * request.seq_len / computing_s(one) for one in tried)


def _options(model: Any, given: dict[str, Any]) -> Options:
    if unknown := sorted(set(given) - _OPTIONS - _OWN - {"gpus"}):
        raise ValueError(f"plan() has no option {unknown[0]}; use one of {', '.join(sorted(_OPTIONS))}")
    return Options(
        model=model,
        **{"num_devices" if name == "gpus" else name: option_value(name, value) for name, value in given.items()},
    )


def _warn_about_default() -> None:
    name, note = default_hardware()
    if note and name != LOCAL:
        warnings.warn(note, UserWarning, stacklevel=3)

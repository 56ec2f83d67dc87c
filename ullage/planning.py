"""``ullage.plan``: plans from names or objects, with the defaults of the command line."""

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any, Literal, get_args

from hwprofiles.profile import Dtype, HardwareProfile
from hwprofiles.registry import LOCAL, load_profile
from planner.choices.request import Request
from planner.decisions import Precision
from planner.models.adapters import Lora
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfig
from planner.models.quantization import Quantization
from planner.plan.document import Plan
from planner.plan.planning import default_precision
from ullage.cli.default_hardware import default_hardware
from ullage.cli.options import BATCHES, DEFAULT_SEQ_LEN
from ullage.cli.request import first_micro_batch, model_named
from ullage.rivals import make_plan

# Fields of a request that have another name here, or that are not options.
_OWN = {"model", "hardware", "num_devices", "precision"}
_OPTIONS = {field.name for field in dataclasses.fields(Request)} - _OWN


def plan(
    model: str | Path | Model | Request,
    *,
    hardware: str | HardwareProfile | None = None,
    gpus: int | None = None,
    precision: Precision | Dtype | None = None,
    products: Literal["fp8"] | None = None,
    budget_s: float | None = None,
    lora: str | None = None,
    quantize: Quantization | None = None,
    batches: Literal["whole", "masked"] | None = None,
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
        products: ``"fp8"``: linear layers of hidden layers multiply in fp8, on a device that can. Default: in the type
            of weights.
        budget_s: time limit of the search in seconds; by default a few seconds.
        lora: train adapters of ``peft`` beside frozen weights: ``"rank=16"``, or another value of ``--lora``. Only for
            a name or a ``config.json``.
        quantize: ``"nf4"`` or ``"int8"``: keep the frozen projections quantized.
        batches: ``"masked"``: batches are texts of any length, padded or packed, with an attention mask. Only for a
            name or a ``config.json``.
        options: other fields of :class:`Request`, such as ``seq_len``, ``micro_batch``, ``num_micro_batches``,
            ``global_batch``, ``tensor_parallel``, ``optimizer``, ``clip`` and ``storage``.

    Raises:
        InfeasibleError: no plan fits in memory; the message says which memory is too small, by how much, and which
            changes would help.
        ValueError: the model, machine or option does not exist, or the machine cannot run the request.
    """
    _check_kinds(model, lora, budget_s)
    if isinstance(model, Request):
        named = {
            "hardware": hardware,
            "gpus": gpus,
            "precision": precision,
            "products": products,
            "lora": lora,
            "quantize": quantize,
        }
        named["batches"] = batches
        given = [name for name, value in named.items() if value is not None]
        if given or options:
            names = ", ".join([*given, *options])
            raise ValueError(
                f"{names} cannot be combined with a Request; put them into the request, or give a model instead"
            )
        return make_plan(model, budget_s=budget_s)
    if unknown := sorted(set(options) - _OPTIONS):
        raise ValueError(f"plan() has no option {unknown[0]}; use one of {', '.join(sorted(_OPTIONS))}")
    _check_adapters(model, lora, quantize)
    masked = _masked(model, batches)
    machine = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware or _default_hardware())
    if isinstance(model, str | Path):
        weights = precision.weights if isinstance(precision, Precision) else precision
        dtype = weights or default_precision(machine.device).weights
        called_with = options.get("seq_len"), first_micro_batch(options.get("micro_batch"), options.get("global_batch"))
        sizes = model_named(
            str(model),
            *called_with,
            dtype,
            lora=None if lora is None else Lora.read(lora),
            quantization=quantize,
            masked=masked,
            as_on_gpu=machine.device.kind == "gpu",
        )
        if isinstance(sizes, CapturedModel):  # the capture fixes the type
            options.pop("seq_len", None)
    else:
        sizes = model
    if isinstance(sizes, CapturedModel):
        chosen = sizes.is_free and options.get("global_batch") is not None  # the planner chooses the micro-batch
        options = {"seq_len": sizes.seq_len, "micro_batch": None if chosen else sizes.micro_batch, **options}
        precision = precision or sizes.dtype
    else:
        options = {"seq_len": min(DEFAULT_SEQ_LEN, sizes.max_positions), **options}
    precision = _with_products(precision or default_precision(machine.device), products)
    request = Request(sizes, machine, num_devices=1 if gpus is None else gpus, precision=precision, **options)
    return make_plan(request, budget_s=budget_s)


def _with_products(precision: Precision | Dtype, products: str | None) -> Precision | Dtype:
    if products is None:
        return precision
    if products != "fp8":
        raise ValueError(f"products is {products!r}, but must be 'fp8', or be left out; choose one")
    if isinstance(precision, Precision):
        return precision.model_copy(update={"products": products})
    return Precision(weights=precision, products=products)


def _check_kinds(model: object, lora: object, budget_s: object) -> None:
    if not isinstance(model, str | Path | ModelConfig | CapturedModel | Request):
        raise TypeError(
            f"the model is {type(model).__name__}; give a name, the path of a config.json, sizes, a request, or what "
            "ullage.capture_module makes of an nn.Module"
        )
    if not isinstance(lora, str | None):
        raise TypeError(f'lora is {lora!r}, but must be a text, as in "rank=16,targets=q_proj+v_proj"')
    if budget_s is not None and (not isinstance(budget_s, int | float) or not 0 < budget_s < math.inf):
        raise ValueError(f"budget_s is {budget_s!r}, but must be a number of seconds above 0")


def _check_adapters(model: str | Path | Model, lora: str | None, quantize: Quantization | None) -> None:
    if lora is not None and not isinstance(model, str | Path):
        raise ValueError(
            f"lora is for a name or a config.json, but the model is a {type(model).__name__}; capture the model that "
            "peft.get_peft_model makes: ullage.capture_module"
        )
    if quantize is not None and (lora is None or quantize not in get_args(Quantization)):
        raise ValueError(
            f"quantize is {quantize!r}, but must be one of {', '.join(get_args(Quantization))}, and is for the frozen "
            'weights beside adapters; give lora="rank=16" too'
        )


def _masked(model: str | Path | Model, batches: str | None) -> bool:
    if batches not in {None, *BATCHES}:
        raise ValueError(f"batches is {batches!r}, but must be one of {', '.join(BATCHES)}")
    if batches == "masked" and not isinstance(model, str | Path):
        raise ValueError(
            f"batches is 'masked' for a name or a config.json, but the model is a {type(model).__name__}; capture it "
            "with an attention_mask among its inputs: ullage.capture_module"
        )
    return batches == "masked"


def _default_hardware() -> str:
    name, note = default_hardware()
    if note and name != LOCAL:
        warnings.warn(note, UserWarning, stacklevel=3)
    return name

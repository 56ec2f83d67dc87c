"""The options for model, machine and batch, and for checkpoints: fields of one type, with their help and their values.

The command line, the keywords of ``ullage.plan``, the axes of studies and the reference pages are made from these
fields. :mod:`ullage.cli.request` makes a request from them. It is separate because it imports the planner, which
parsing does not need.
"""

# ruff: noqa: RUF009 - a function makes the fields

import argparse
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from planner.choices.constraints import DIVIDED, TRAINED, Asked, check_values, described
from planner.optimizers import OPTIMIZERS
from planner.terms import DEFAULT_RESTART_S, MIN_CHECKPOINTS, Level
from ullage.cli.arguments import (
    choice,
    fraction,
    input_shape,
    lora,
    mtbf,
    parse_bytes,
    parts,
    positive_float,
    positive_int,
    seconds,
    switch,
)

if TYPE_CHECKING:
    from hwprofiles.profile import HardwareProfile
    from planner.models.adapters import Lora
    from planner.models.captured import CapturedInput, Model

PACKAGED_HARDWARE: Final = "a100-80"  # the default where this machine was not calibrated
QUANTIZATIONS: Final = ("nf4", "int8")
CHECKPOINTS: Final = "when to make checkpoints (with --mtbf)"
_GROUPS: Final = (TRAINED, DIVIDED, CHECKPOINTS)
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

_SHARED: Final = {
    "--precision": ("bf16|fp32[,products=fp8][,...]", "types, as in bf16,products=fp8."),
    "--memory": ("free|device=SIZE[,host=SIZE]", "memory to plan for, as in device=16GiB,host=64GB."),
    "--parallel": (
        "tensor=N[,...]",
        "parallel degrees, as in tensor=2,pipeline=4 (default: 1 each, or chosen with --global-batch).",
    ),
    "--tiles": (
        "loss=N[,layer=N][,segment=N]",
        (
            "compute in tiles of a micro-batch, as in loss=512. The size of a micro-batch means: all at once (default: "
            "the planner uses tiles where they save much memory)."
        ),
    ),
    "--checkpoints": ("max-lost-work=TIME[,...]", "limits and sizes, as in max-lost-work=30m,keep=3."),
}
"""What stands for the value of a flag that several fields share, and the first words of its help."""


def _option(
    words: str,
    of: Callable[[str], Any] | Sequence[str] | None = None,
    metavar: str | None = None,
    *,
    group: str = TRAINED,
    **more: Any,
) -> Any:
    """Return a field whose option has this help.

    Args:
        words: help text.
        of: reads a value, or all values.
        metavar: what stands for a value in the help.
        group: heading in the help.
        more: see :func:`planner.choices.constraints.described`.
    """
    kind = {"choices": tuple(of)} if isinstance(of, Sequence) else {"type": of} if of else {}
    shown = {} if metavar is None else {"metavar": metavar}
    return described(words, group=group, **kind, **shown, **more)


_checkpoint = functools.partial(_option, group=CHECKPOINTS, flags=("--checkpoints",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Asked):
    """A request as it is asked for; ``None``: not given.

    Attributes:
        model: its name or file, or the model itself.
        hardware: its name or file, or the profile itself.
        lora: adapters, or a text that describes them.
    """

    model: "str | Path | Model" = _option(
        "name (see `ullage models`), hub id, path of a config.json, or package.module:function that returns any "
        "nn.Module. Ullage captures such a module without allocating its memory, and also architectures of "
        "transformers that it has no formulas for. If parameters of the module are frozen, the plan keeps them frozen, "
        "in their own type",
        flags=("--model", "-m"),
    )
    input_shape: "Sequence[CapturedInput] | None" = _option(
        "inputs of a captured model, as in 4x2048:int64 or input_ids=4x2048:int64 labels=4x2048:int64. TYPE is "
        "float (the type of the weights; the default), int64, int32 or bool. The first dimension is the micro-batch; "
        "--micro-batch changes it, and --seq-len changes the tokens of integer inputs. "
        "The loss is the output if that is a scalar; else its .loss; else its only scalar; else the cross-entropy of "
        "its first floating tensor stands for it. To the last two, all other outputs that do not lead there are added",
        input_shape,
        "[NAME=]SHAPE[:TYPE]",
        nargs="+",
    )
    lora: "Lora | str | None" = _option(
        "train LoRA adapters of peft beside frozen weights: "
        "rank=N[,targets=NAME+NAME][,alpha=X][,dropout=X][,save=NAME+NAME], as in rank=16,targets=q_proj+v_proj. The "
        "default targets are all-linear (every projection but the head); the default alpha is the rank; save names "
        "modules that are trained as a whole. Only for models by name, hub id or config.json. none: train all weights "
        "(the default)",
        lora,
        "rank=N[,...]",
    )
    quantize: Literal["none", "nf4", "int8"] | None = _option(
        "keep the frozen projections of --lora quantized as bitsandbytes does: nf4 (4 bits, with double "
        "quantization) or int8",
        ("none", *QUANTIZATIONS),
    )
    hardware: "str | HardwareProfile | None" = _option(
        "profile of the machine; see `ullage hardware` (default: this machine's own profile if `ullage calibrate` "
        f"wrote one; else {PACKAGED_HARDWARE})",
        metavar="NAME|PATH|local",
    )
    batches: Literal["whole", "masked"] | None = _option(
        "whole: all sequences have the same length (the default). masked: texts of any length are padded or "
        "packed, as by TRL; the plan then includes the memory of an attention mask",
        ("whole", "masked"),
    )
    nodes: int | None = _option("nodes that share the devices (default: the fewest possible)", positive_int, "N")
    products: Literal["weights", "fp8"] | None = _option(
        "type in which linear layers of hidden layers multiply, forward and backward. weights: that of weights "
        "(the default). fp8: as torchao's Float8Linear, with a scale for each tensor; for devices that have such "
        "products (compute capability 8.9 or newer)",
        ("weights", "fp8"),
        flags=("--precision",),
        part="products",
    )
    master: Literal["fp32", "bf16"] | None = _option(
        "type of the optimizer's master copy of weights (default: fp32). bf16, with --optimizer "
        + " or ".join(name for name, state in OPTIMIZERS.items() if state.rounded)
        + ": the bf16 weight itself, rounded stochastically, so that state takes 2 B/param less and no copy is kept",
        ("fp32", "bf16"),
        flags=("--precision",),
        part="master",
    )
    memory: Literal["free"] | None = _option(
        "of this machine, what is free now. If it was not calibrated, Ullage measures it first, in half a minute",
        ("free",),
        flags=("--memory",),
        part="",
    )
    device_memory: int | None = _option(
        "at most this much of each device; of a GPU, 1 GiB of it is for libraries",
        parse_bytes,
        flags=("--memory",),
        part="device",
    )
    host_memory: int | None = _option(
        "this much of each host's memory, whatever its profile says: what was free at calibration is too little if the "
        "memory of a virtual machine grows as it is used",
        parse_bytes,
        flags=("--memory",),
        part="host",
    )
    mtbf: dict[Level, float] | None = _option(
        "mean time between failures of the whole job, as in 6h. The planner then chooses levels and intervals of "
        "checkpoints. Or one time for each kind of failure, named by the fastest level that survives it: memory=2h (a "
        "process fails), nvme=1d (power fails), pfs=30d (a node fails)",
        mtbf,
        "TIME|LEVEL=TIME,...",
        group=CHECKPOINTS,
    )
    max_checkpoint_overhead: float | None = _checkpoint(
        "largest share of the time that checkpoints may cost, as in 1%%", fraction, part="max-overhead"
    )
    max_lost_work: float | None = _checkpoint(
        "most training time that one failure may lose", seconds, part="max-lost-work"
    )
    restart: float | None = _checkpoint(
        f"time from a failure until the restarted job reads a checkpoint ({DEFAULT_RESTART_S:g}s)",
        seconds,
        part="restart",
    )
    keep: int | None = _checkpoint(f"checkpoints to keep at each level ({MIN_CHECKPOINTS})", positive_int, part="keep")
    checkpoint_buffer: int | None = _checkpoint(
        "host memory per rank for checkpoint data that is not written yet (default: the best size)",
        parse_bytes,
        part="buffer",
    )
    drive_writes_per_day: float | None = _checkpoint(
        "how often the node's drives may be overwritten per day, from their data sheet (default: the profile's)",
        positive_float,
        part="drive-writes-per-day",
    )
    pfs_bandwidth: int | None = _checkpoint(
        "bandwidth of each node to a shared file system, if the profile has none", parse_bytes, part="pfs-bandwidth"
    )
    iterations: int | None = _checkpoint(
        "length of the run whose expected time is shown (default: one day)", positive_int, part="iterations"
    )

    def __post_init__(self) -> None:
        check_values(Options, self)


class Option:
    """A field of :class:`Options`, as commands and studies spell it.

    Attributes:
        dest: name of the field.
        name: name in studies: that of its flag, or of the field if several fields share the flag.
        flag: its flag; empty if only Python and studies set it.
        of: what :func:`planner.choices.constraints.described` was given.
    """

    def __init__(self, field: "dataclasses.Field[Any]") -> None:
        self.of, self.dest = field.metadata, field.name
        self.flags: tuple[str, ...] = self.of.get("flags", (f"--{field.name.replace('_', '-')}",))
        self.flag = self.flags[0] if self.flags else ""
        whole = self.flag and self.part is None
        self.name = self.flag.removeprefix("--").replace("-", "_") if whole else field.name

    @property
    def part(self) -> str | None:
        """Name of the field in the value of its flag; ``None`` if it is the whole value."""
        return self.of.get("part")

    def read(self, text: str) -> Any:
        """Return the value that a text means.

        Raises:
            ValueError: it means none.
        """
        if self.choices:
            return choice(*self.choices)(text)
        if self.of.get("switch"):
            return switch(text)
        return self.of.get("type", positive_int if self.is_count else str)(text)

    @property
    def choices(self) -> Sequence[str]:
        """The texts that it can be; empty: any that its type reads."""
        found: Sequence[str] = self.of.get("choices", self.of.get("texts", ()))
        return found

    @property
    def is_count(self) -> bool:
        """Whether the value is a whole number."""
        return "most" in self.of or self.of.get("type") is positive_int


@functools.cache
def known_options() -> Mapping[str, Option]:
    """Return each option by its name in studies, in the order of the help."""
    own = Options.__annotations__  # the model comes first
    fields = sorted(
        dataclasses.fields(Options), key=lambda field: (_GROUPS.index(field.metadata["group"]), field.name not in own)
    )
    return {option.name: option for option in map(Option, fields)}


def option_value(dest: str, value: Any) -> Any:
    """Return the value of a keyword in Python: sizes and times may be texts, as on the command line.

    Raises:
        ValueError: a text means none.
    """
    option = known_options().get(dest)
    if not isinstance(value, str) or option is None or option.of.get("type") not in {parse_bytes, seconds}:
        return value
    try:
        return option.read(value)
    except ValueError as error:
        raise ValueError(f"{dest}: {error}") from None


def add_options(parser: argparse.ArgumentParser, *, model_required: bool, checkpoints: bool = False) -> None:
    """Add the options. Their default is ``None``, so that the program knows which options were given."""
    by_flag: dict[str, list[Option]] = {}
    for option in known_options().values():
        parser.set_defaults(**{option.dest: None})
        if option.flag:
            by_flag.setdefault(option.flag, []).append(option)
    groups = {name: parser.add_argument_group(name) for name in _GROUPS if checkpoints or name != CHECKPOINTS}
    for flag, options in by_flag.items():
        if (shown := groups.get(options[0].of["group"])) is None:
            continue
        if options[0].part is not None:
            _add_shared(shown, flag, options)
            continue
        (option,) = options
        more: dict[str, Any] = {key: option.of[key] for key in ("choices", "metavar", "nargs") if key in option.of}
        if option.of.get("switch"):
            more["action"] = argparse.BooleanOptionalAction
        elif not option.choices:
            more |= {"type": option.read, "metavar": more.get("metavar", "N" if option.is_count else None)}
        if option.dest == "model":
            more["required"] = model_required
        shown.add_argument(*option.flags, dest=option.dest, help=option.of["help"], **more)


class _Store(argparse.Action):
    def __call__(self, _parser: Any, namespace: Any, values: Any, _flag: Any = None) -> None:
        for dest, value in values.items():
            setattr(namespace, dest, value)


def _add_shared(group: "argparse._ArgumentGroup", flag: str, options: Sequence[Option]) -> None:
    """Add a flag that several fields share, each with a name in its value."""
    by_part = {str(option.part): option for option in sorted(options, key=lambda option: option.part != "")}
    readers = {part: option.read for part, option in by_part.items()}
    metavar, head = _SHARED[flag]
    words = [f"{part or '|'.join(option.choices)}: {option.of['help']}" for part, option in by_part.items()]
    group.add_argument(
        flag,
        action=_Store,
        dest=argparse.SUPPRESS,
        metavar=metavar,
        type=lambda text: {by_part[part].dest: value for part, value in parts(text, readers).items()},
        help=f"{head} {'; '.join(words)}",
    )


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options that were given, by the names of their fields."""
    values = {option.dest: getattr(args, option.dest, None) for option in known_options().values()}
    return {dest: value for dest, value in values.items() if value is not None}


def given_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of the options that were given."""
    given = given_options(args)
    return list(dict.fromkeys(option.flag for option in known_options().values() if option.dest in given))


def is_captured(model: "str | Path | Model") -> bool:
    """Return whether a model is named by a function that returns a module, not by a file."""
    return bool(_FACTORY.fullmatch(str(model))) and not Path(str(model)).exists()


def check_adapters(asked: Options) -> None:
    """Check that a quantized base comes with adapters, and that the model can have adapters.

    Raises:
        ValueError: it does not, or the model cannot.
        TypeError: adapters are neither a text nor what a text has been read to.
    """
    if asked.lora is None:
        if asked.quantize not in {None, "none"}:
            raise ValueError(
                f"--quantize {asked.quantize} is for frozen weights, but without --lora all weights are trained; give "
                "--lora rank=16 too"
            )
        return
    if isinstance(asked.lora, int | float):
        raise TypeError(f'lora is {asked.lora!r}, but must be a text, as in "rank=16,targets=q_proj+v_proj"')
    if not isinstance(asked.model, str | Path):
        raise ValueError(  # noqa: TRY004 - the kind is right, but not beside adapters
            f"lora is for a name or a config.json, but the model is a {type(asked.model).__name__}; capture the model "
            "that peft.get_peft_model makes: ullage.capture_module"
        )
    if is_captured(asked.model):
        raise ValueError(
            f"--lora is for models of transformers, but --model {asked.model} is a function; let it return the model "
            "that peft.get_peft_model makes, without --lora"
        )


def check_names(args: argparse.Namespace) -> None:
    """Check that the machine and the model exist. This is faster than importing the planner.

    Raises:
        ValueError: the machine or the model does not exist.
    """
    from hwprofiles.registry import load_profile  # noqa: PLC0415 - `--help` does without
    from planner.models.config import NoFormulasError  # noqa: PLC0415
    from planner.models.registry import resolve_model  # noqa: PLC0415
    from ullage.cli.default_hardware import default_hardware  # noqa: PLC0415

    load_profile(args.hardware or default_hardware()[0])
    check_adapters(Options(**given_options(args)))
    if not is_captured(args.model):
        with contextlib.suppress(NoFormulasError):
            resolve_model(args.model)

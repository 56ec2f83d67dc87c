"""A request for a plan, and the part of it that leaves choices to the planner."""

import dataclasses
from typing import ClassVar, get_args

from pydantic import ConfigDict

from hwprofiles.profile import Dtype, HardwareProfile
from planner.costs.kernels import no_products
from planner.decisions import BF16, Choice, Count, Precision, check_fp8_weights
from planner.graph import Batch
from planner.models.captured import Model
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.terms import KernelChoice, Storage

MOST_MICRO_BATCHES = 4096  # per iteration: a schedule has tasks for each
# Upper limits of a request. A larger number is a mistake, and planning would take very long.
_MOST = {
    "num_devices": 100_000,
    "seq_len": 100_000_000,
    "micro_batch": 1_000_000,
    "num_micro_batches": MOST_MICRO_BATCHES,
    "global_batch": 10_000_000,
    "expert_units": 10_000,
    "loss_tile_tokens": 100_000_000,
    "layer_tile_tokens": 100_000_000,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraints:
    """The values that the user gave; ``None`` leaves the choice to the planner.

    Attributes:
        num_devices: devices to train on, over as many nodes as they fill.
        micro_batch: sequences per forward on each device; by default :func:`planner.terms.default_micro_batch`, unless
            a global batch is wanted.
        num_micro_batches: forwards per iteration (gradient accumulation); 1 unless a global batch is wanted.
        global_batch: sequences per iteration over all devices.
        tensor_parallel, pipeline_parallel, expert_parallel: how devices share the model; 1 unless a global batch is
            wanted.
        expert_units: units into which a rank's experts of a layer are divided; by default units that are large enough
            to be worth moving.
        loss_tile_tokens: tokens whose logits exist at a time; as many as a micro-batch has, or more: all. See
            [Note: Tiles] in :mod:`planner.choices.tiles`.
        layer_tile_tokens: tokens for which norms and MLPs compute at a time; likewise.
        fp8_weights: whether weights of products in fp8 are fetched from the host, and gathered, in fp8; by default,
            where that is faster.
        kernels: the kernels that run beside products and attention: by default those of ``transformers``.
        storage: storage that may be used beside device and host; see :data:`planner.terms.Storage`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_devices: Count = 1
    micro_batch: Count | None = None
    num_micro_batches: Count | None = None
    global_batch: Count | None = None
    tensor_parallel: Count | None = None
    pipeline_parallel: Count | None = None
    expert_parallel: Count | None = None
    expert_units: Count | None = None
    loss_tile_tokens: Count | None = None
    layer_tile_tokens: Count | None = None
    fp8_weights: bool | None = None
    kernels: KernelChoice | None = None
    storage: Storage = "never"


@dataclasses.dataclass(frozen=True)
class Request(Constraints):
    """A request for a plan.

    Attributes:
        model: sizes of the model, or a captured one.
        hardware: the machine.
        seq_len: tokens per sequence.
        precision: types of weights and gradients, or the name of one type for both.
        optimizer: the optimizer.
        clip: clip gradients by their global norm.
        subgroup_params: most parameters in one subgroup, the smallest part whose update can be placed.
        expert_load: shares of all visits that go to each expert; see :class:`planner.graph.Batch`.
    """

    model: Model
    hardware: HardwareProfile
    _: dataclasses.KW_ONLY
    seq_len: int = 2048
    precision: Precision | Dtype = BF16
    optimizer: Optimizer = "adamw"
    clip: bool = True
    subgroup_params: int = 100_000_000
    expert_load: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _precision(self.precision))
        self._check_numbers()
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}, but must be one of {', '.join(OPTIMIZERS)}; choose one")
        if self.storage not in get_args(Storage):
            raise ValueError(f"storage is {self.storage!r}, but must be one of {', '.join(get_args(Storage))}")
        self._check_precision(self.types)
        if self.storage == "nvme" and self.hardware.nvme is None:
            raise ValueError(
                f"storage is 'nvme', but profile {self.hardware.name} has no nvme; ask for 'activations' or choose a "
                "profile with drives"
            )
        dtype, device = self.types.weights, self.hardware.device
        if dtype not in device.gemm or dtype not in device.attention:
            raise ValueError(
                f"profile {self.hardware.name} says nothing about products and attention in {dtype}; choose another "
                "precision or machine, or measure it with `ullage calibrate`"
            )
        if (products := self.types.products) and products not in device.gemm:
            raise ValueError(no_products(self.hardware, products))
        if products and (self.tensor_parallel or 1) > 1:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, but in {products} each part of a matrix would have a "
                f"scale of its own; choose 1, or leave out --products {products}"
            )
        self._check_kernels()
        if self.fp8_weights:
            check_fp8_weights(self.types, self.optimizer)
        per_node = self.hardware.devices_per_node
        if self.num_devices > per_node and self.hardware.inter_node is None:
            raise ValueError(
                f"{self.hardware.name} has {per_node} device(s) and no network between nodes, but {self.num_devices} "
                f"are asked for; ask for at most {per_node}, or choose a larger machine with --hardware (`ullage "
                "hardware` lists them), or a profile with inter_node"
            )

    def _check_kernels(self) -> None:
        if self.kernels not in {None, *get_args(KernelChoice)}:
            raise ValueError(
                f"kernels is {self.kernels!r}, but must be one of {', '.join(get_args(KernelChoice))}; choose one"
            )
        if self.kernels == "compiled" and self.storage != "never":
            raise ValueError(
                f"storage is {self.storage!r}, but a compiled block has no separate products whose outputs could be "
                "offloaded; leave out --storage or --kernels compiled"
            )
        if self.kernels == "liger" and self.hardware.device.kind == "host":
            raise ValueError("kernels is 'liger', but Liger's kernels are for GPUs; leave out --kernels liger")

    def _check_precision(self, precision: Precision) -> None:
        if precision.can_be_kept(self.optimizer):
            return
        if precision.without_fp8 == Precision(weights="bf16", master="bf16"):
            known = " or ".join(name for name, row in OPTIMIZERS.items() if row.rounded)
            raise ValueError(
                f"the master copy is bf16, but {self.optimizer} keeps only one in fp32; choose optimizer {known}, or "
                "leave master out"
            )
        raise ValueError(
            f"precision is {precision!r}, but types of state or gradients can only be simulated so far; give "
            "'bf16' or 'fp32'"
        )

    def _check_numbers(self) -> None:
        for field in (*(each.name for each in dataclasses.fields(Constraints)), "seq_len", "subgroup_params"):
            value = getattr(self, field)
            if field in {"storage", "fp8_weights", "kernels"} or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}, but must be a whole number of at least 1")
        for field, most in _MOST.items():
            if (value := getattr(self, field)) is not None and value > most:
                raise ValueError(f"{field} is {value}, but no more than {most} can be planned; ask for less")

    @property
    def constraints(self) -> Constraints:
        """The degrees and batch sizes that the user gave."""
        return Constraints(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Constraints)})

    @property
    def types(self) -> Precision:
        """The types of weights and gradients."""
        assert isinstance(self.precision, Precision)
        return self.precision

    def batch(self, choice: Choice) -> Batch:
        """Return the batch of one forward and backward on a rank."""
        return batch_of(choice, self.types, self.seq_len, self.expert_load, self.hardware)


def _precision(given: Precision | Dtype) -> Precision:
    if isinstance(given, Precision):
        return given
    if given not in get_args(Dtype):
        raise ValueError(f"precision is {given!r}, which cannot be planned; give one of {', '.join(get_args(Dtype))}")
    return Precision(weights=given)


def batch_of(
    choice: Choice,
    precision: Precision,
    seq_len: int,
    expert_load: tuple[tuple[float, ...], ...],
    hardware: HardwareProfile,
) -> Batch:
    """Return the batch of one forward and backward on a rank of a machine."""
    return Batch(
        choice.micro_batch,
        seq_len,
        precision.weight_bytes,
        attention_scratch=hardware.device.kind == "gpu",
        tensor_parallel=choice.tensor_parallel,
        expert_parallel=choice.expert_parallel,
        expert_units=choice.expert_units,
        kernels=choice.kernels or "transformers",
        expert_load=expert_load,
        fp8_products=("emulated" if hardware.device.kind == "host" else "device") if precision.products else None,
        loss_tile_tokens=choice.loss_tile_tokens,
        layer_tile_tokens=choice.layer_tile_tokens,
    )

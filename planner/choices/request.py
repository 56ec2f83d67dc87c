"""A request for a plan."""

import dataclasses
from typing import get_args

from hwprofiles.profile import Dtype, HardwareProfile
from planner.choices.constraints import Asked, Constraints, Count, ExpertLoad, check_values
from planner.costs.kernels import no_products
from planner.decisions import BF16, Choice, Precision, check_fp8_weights, check_speculate, check_split_masters
from planner.graph import Batch
from planner.models.captured import Model
from planner.optimizers import OPTIMIZERS
from planner.terms import COMPILED, DEFAULT_SEQ_LEN


@dataclasses.dataclass(frozen=True)
class Request(Asked):
    """A request for a plan. What :class:`Asked` leaves open is known here.

    Attributes:
        model: sizes of the model, or a captured one.
        hardware: the machine.
        seq_len: tokens per sequence.
        precision: types of weights and gradients, or the name of one type for both.
        expert_load: shares of all visits that go to each expert; see :class:`planner.graph.Batch`.
    """

    model: Model
    hardware: HardwareProfile
    _: dataclasses.KW_ONLY
    seq_len: Count = DEFAULT_SEQ_LEN
    precision: Precision | Dtype = BF16
    expert_load: ExpertLoad = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", precision_of(self.precision))
        check_values(Asked, self)
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
                f"scale of its own; choose 1, or leave out --precision products={products}"
            )
        self._check_kernels()
        if self.fp8_weights:
            check_fp8_weights(self.types, self.optimizer)
        if self.split_masters:
            check_split_masters(self.types)
        if self.speculate:
            check_speculate(self.clip, self.optimizer)
        per_node = self.hardware.devices_per_node
        if self.num_devices > per_node and self.hardware.inter_node is None:
            raise ValueError(
                f"{self.hardware.name} has {per_node} device(s) and no network between nodes, but {self.num_devices} "
                f"are asked for; ask for at most {per_node}, or choose a larger machine with --hardware (`ullage "
                "hardware` lists them), or a profile with inter_node"
            )

    def _check_kernels(self) -> None:
        if self.kernels in COMPILED and self.storage != "never":
            raise ValueError(
                f"storage is {self.storage!r}, but a compiled block has no separate products whose outputs could be "
                f"offloaded; leave out --storage or --kernels {self.kernels}"
            )
        if self.kernels == "liger" and self.hardware.device.kind == "host":
            raise ValueError("kernels is 'liger', but Liger's kernels are for GPUs; leave out --kernels liger")

    def _check_precision(self, precision: Precision) -> None:
        if precision.can_be_kept(self.optimizer):
            return
        known = " or ".join(name for name, row in OPTIMIZERS.items() if row.rounded)
        raise ValueError(
            f"the master copy is bf16, but {self.optimizer} keeps only one in fp32; choose optimizer {known}, or leave "
            "master out"
        )

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


def precision_of(given: Precision | Dtype) -> Precision:
    """Return types of weights and gradients; the name of a type means both.

    Raises:
        ValueError: the type cannot be planned.
    """
    if isinstance(given, Precision):
        return given
    if given not in get_args(Dtype):
        raise ValueError(f"precision is {given!r}, which cannot be planned; give one of {', '.join(get_args(Dtype))}")
    return Precision(weights=given)


def batch_of(
    choice: Choice, precision: Precision, seq_len: int, expert_load: ExpertLoad, hardware: HardwareProfile
) -> Batch:
    """Return the batch of one forward and backward on a rank of a machine."""
    return Batch(
        choice.micro_batch,
        seq_len,
        precision.weight_bytes,
        attention_scratch=hardware.device.kind == "gpu",
        tensor_parallel=choice.tensor_parallel,
        expert_parallel=choice.expert_parallel,
        context_parallel=choice.context_parallel,
        passes_keys=choice.context_exchange is not None,
        splits_backward=choice.pipeline_order is not None,
        in_stages=choice.pipeline_parallel > 1,
        expert_units=choice.expert_units,
        kernels=choice.kernels or "transformers",
        expert_load=expert_load,
        fp8_products=("emulated" if hardware.device.kind == "host" else "device") if precision.products else None,
        loss_tile_tokens=choice.loss_tile_tokens,
        layer_tile_tokens=choice.layer_tile_tokens,
        segment_tile_sequences=choice.segment_tile_sequences,
    )

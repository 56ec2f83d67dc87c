"""The choices before placement: degrees of parallelism, and how a batch is divided into micro-batches.

[Note: Choices] Values that the user gives are fixed. For the others, all sensible values are tried: degrees that divide
the number of devices (tensor parallelism only within a node), and micro-batches of a power of two that divide the
global batch. Degrees are compared only if the user gives a global batch: without one, it would depend on data
parallelism.
"""

import itertools
from collections.abc import Iterator

from hwprofiles.profile import Device
from hwprofiles.quantity import Frozen
from planner.decisions import Choice, Count, Precision
from planner.graph import Batch
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfigError
from planner.models.formulas import experts
from planner.models.parameters import layer_shapes
from planner.models.sharding import share
from planner.terms import DEFAULT_MICRO_BATCH, Storage

MOST_MICRO_BATCHES = 4096  # per iteration: a schedule has tasks for each
# The least parameters of a unit of experts; smaller units are not worth moving and would make schedules long.
_UNIT_PARAMS, _MOST_UNITS = 100_000_000, 8


def batch_of(
    decided: Choice,
    seq_len: int,
    precision: Precision,
    expert_load: tuple[tuple[float, ...], ...],
    device: Device,
) -> Batch:
    """Return the batch of one forward and backward on a rank of a device."""
    return Batch(
        decided.micro_batch,
        seq_len,
        precision.weight_bytes,
        attention_scratch=device.kind == "gpu",
        tensor_parallel=decided.tensor_parallel,
        expert_parallel=decided.expert_parallel,
        expert_units=decided.expert_units,
        expert_load=expert_load,
        fp8_products=("emulated" if device.kind == "host" else "device") if precision.products else None,
        **decided.tiles._asdict(),
    )


class Constraints(Frozen):
    """The values that the user gave; ``None`` leaves the choice to the planner.

    Attributes:
        num_devices: in total.
        micro_batch: sequences per forward on each device; by default :func:`planner.terms.default_micro_batch`, unless
            a global batch is wanted.
        num_micro_batches: forwards per iteration; 1 unless a global batch is wanted.
        global_batch: sequences per iteration over all devices.
        tensor_parallel, pipeline_parallel, expert_parallel: degrees; 1 unless a global batch is wanted.
        expert_units: units into which a rank's experts of a layer are divided; by default units that are large enough
            to be worth moving.
        loss_tile_tokens: tokens whose logits exist at a time; see [Note: Tiles] in :mod:`planner.choices.tiles`.
        layer_tile_tokens: tokens for which norms and MLPs compute at a time; see there.
        fp8_weights: whether weights of products in fp8 are fetched in fp8; by default, where that is faster.
        storage: storage that may be used beside device and host; see :data:`planner.terms.Storage`.
    """

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
    storage: Storage = "never"

    def choices(self, model: Model, devices_per_node: int) -> tuple[Choice, ...]:
        """Return all choices to try; see [Note: Choices].

        Raises:
            ValueError: there is none; the message says why.
        """
        if self.num_devices % ((self.tensor_parallel or 1) * (self.pipeline_parallel or 1)):
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel or 1} x pipeline_parallel {self.pipeline_parallel or 1} must "
                f"divide the {self.num_devices} devices; change one of them"
            )
        if isinstance(model, CapturedModel):
            self._check_captured(model)
        found: list[Choice] = []
        reasons: list[ValueError] = []
        can_be_shared = False
        for tensor, pipeline in itertools.product(*self._ways(model, devices_per_node)):
            if self.num_devices % (tensor * pipeline):
                continue
            data = self.num_devices // (tensor * pipeline)
            for expert in self._expert_ways(model, data):
                degrees = {"data_parallel": data, "tensor_parallel": tensor}
                degrees |= {"pipeline_parallel": pipeline, "expert_parallel": expert}
                try:
                    _check(model, **degrees)
                except ValueError as error:
                    reasons.append(error)
                    continue
                can_be_shared = True
                units = self.expert_units or _expert_units(model, expert)
                found += [
                    Choice(**degrees, expert_units=units, micro_batch=size, num_micro_batches=count)
                    for size, count in self._cuts(data, pipeline)
                ]
        if not found:
            if not can_be_shared:
                raise reasons[0]
            raise ValueError(
                f"a global batch of {self.global_batch} sequences cannot be cut into equal micro-batches for "
                f"{self.num_devices} devices with the given degrees and sizes; choose a multiple of the data-parallel "
                f"ranks, in at most {MOST_MICRO_BATCHES} micro-batches each"
            )
        return tuple(found)

    def _check_captured(self, model: CapturedModel) -> None:
        """Check that the request does not need a captured model at another degree or batch size."""
        for kind in ("tensor", "pipeline", "expert"):
            if (getattr(self, f"{kind}_parallel") or 1) > 1:
                masked = any(spec.name == "attention_mask" for spec in model.inputs) and ":" not in model.factory
                remedy = "leave out the mask (batches masked), or that" if masked else "leave it out"
                raise ValueError(
                    f"{kind}_parallel {getattr(self, f'{kind}_parallel')}: {model.name} was captured whole, so ranks "
                    f"cannot share its layers; {remedy}"
                )

    def _ways(self, model: Model, devices_per_node: int) -> tuple[list[int], list[int]]:
        """Return the degrees of tensor and of pipeline parallelism to try."""
        divisors = [n for n in range(1, self.num_devices + 1) if self.num_devices % n == 0]
        if self.global_batch is None or isinstance(model, CapturedModel):
            divisors = [1]
        tensor = [n for n in divisors if devices_per_node % n == 0]
        return (
            [self.tensor_parallel] if self.tensor_parallel else tensor,
            [self.pipeline_parallel] if self.pipeline_parallel else divisors,
        )

    def _expert_ways(self, model: Model, data: int) -> list[int]:
        if self.expert_parallel:
            return [self.expert_parallel]
        if self.global_batch is None or isinstance(model, CapturedModel) or not model.is_expert_model:
            return [1]
        return [2**i for i in range(data.bit_length()) if data % 2**i == 0 and model.num_experts % 2**i == 0]

    def _cuts(self, data: int, pipeline: int) -> Iterator[tuple[int, int]]:
        """Yield sizes and numbers of micro-batches."""
        if self.global_batch is None:
            yield self.micro_batch or DEFAULT_MICRO_BATCH, self.num_micro_batches or 1
            return
        if self.global_batch % data:
            return
        each = self.global_batch // data
        for size in [self.micro_batch] if self.micro_batch else [2**i for i in range(each.bit_length())]:
            count, rest = divmod(each, size)
            # With fewer micro-batches than stages, some stages are always idle.
            filled = pipeline == 1 or count >= pipeline or self.pipeline_parallel
            if not rest and filled and count <= MOST_MICRO_BATCHES and self.num_micro_batches in {None, count}:
                yield size, count


def _check(model: Model, **degrees: int) -> None:
    """Check that a model can be divided by these degrees.

    Raises:
        ValueError: naming the number, the rule and the remedy.
    """
    if isinstance(model, CapturedModel):
        return
    batch = Batch(1, 1, tensor_parallel=degrees["tensor_parallel"], expert_parallel=degrees["expert_parallel"])
    experts.check(model, batch)
    share(model, batch)
    if degrees["data_parallel"] % degrees["expert_parallel"]:
        raise ModelConfigError(
            f"expert_parallel {degrees['expert_parallel']} must divide the {degrees['data_parallel']} data-parallel "
            "ranks, who share the experts; change one of them"
        )
    if degrees["pipeline_parallel"] > model.num_layers:
        raise ModelConfigError(
            f"{model.name} has {model.num_layers} layers, which {degrees['pipeline_parallel']} pipeline stages cannot "
            "share; choose fewer stages"
        )
    if degrees["pipeline_parallel"] > 1 and degrees["expert_parallel"] > 1:
        raise ModelConfigError("experts are not shared by ranks of a pipeline; choose one of both")


def _expert_units(model: Model, expert_parallel: int) -> int:
    """Return the number of units into which a rank's experts of a layer are divided, so that each is worth moving."""
    if isinstance(model, CapturedModel) or not model.is_expert_model:
        return 1
    layer = next(i for i in range(model.num_layers) if model.has_experts(i))
    bank = sum(shape[0] * shape[1] * shape[2] for name, shape in layer_shapes(model, layer) if ".experts." in name)
    num_experts = model.num_experts // expert_parallel
    return max(min(bank // expert_parallel // _UNIT_PARAMS, num_experts, _MOST_UNITS), 1)

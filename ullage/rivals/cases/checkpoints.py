"""Cases of checkpoint engines: how long one checkpoint blocks training, and what a run with checkpoints takes.

A published blocking throughput is the size of a checkpoint over the time that it stops training, one checkpoint by
itself: no earlier one is still being written. Only so do the published figures agree with one another: CheckFreq stops
a 7B run for 7.5 s by its throughput, while end to end every checkpoint adds 16 s at any interval, and torchsnapshot's
4.2 s are what it adds as long as checkpoints do not overlap, but not at every iteration (6.1 s).

These runs train with DeepSpeed's pipeline engine: tensor parallelism inside a node, a pipeline stage for each node. It
saves a file for every layer and tensor rank (``runtime/pipe/module.py::save_state_dict``), and two for every rank, of
the model and of the optimizer (``runtime/engine.py``). The metadata server creates them one after another. Where a case
does not give their number, layers follow from the size of a checkpoint: 14 bytes per parameter (weights in bf16, state
in fp32), and layers as wide as 128 times their number, as the published models are within a tenth.
"""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from hwprofiles.profile import HardwareProfile
from planner.checkpoints.lowering import Shard, with_checkpoints
from planner.checkpoints.trial import RunTimes, times
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.decisions import Sharding
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from planner.simulate.machine import run
from ullage.rivals import checkpoints
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome

_GB = 1e9
# Of a checkpoint whose number of files is not given:
_BYTES_PER_PARAM = 14
_WIDTH_OVER_LAYERS = 128
_MATRIX_VALUES = 12  # a layer has so many parameters for each square of its width
_FILES_PER_RANK = 2


class CheckpointCase(Case):
    """A run with checkpoints whose plain iteration is known. Aliases are the paths of its fields in a file.

    Attributes:
        nodes, gpus: of the whole job.
        engine: see :data:`ullage.rivals.checkpoints.policy.POLICIES`; or ours.
        checkpoint_gb: GB (1e9) of one checkpoint, of all ranks together; each has an equal share.
        every_iterations: from one checkpoint to the next.
        host_buffer_gb_per_node: host memory for copies that are not written yet, of engines that bound it.
        files: of one checkpoint, of all ranks; ``None``: as DeepSpeed's pipeline engine makes them.
        forward_s, backward_s, update_s: seconds of the phases of an iteration without checkpoints.
        iterations: of the whole run; needed for ``end_to_end_s``.
        blocking_gb_per_s, end_to_end_s: what was measured: GB (1e9) per second of blocked time, and seconds of the
            whole run.
    """

    nodes: Number
    gpus: Number
    engine: Literal["deepspeed", "checkfreq-async", "torchsnapshot", "datastates", "ullage"] = Field(
        alias="checkpoint.engine"
    )
    checkpoint_gb: Amount = Field(alias="checkpoint.bytes_total_gb")
    every_iterations: Number = Field(alias="checkpoint.every_iterations")
    host_buffer_gb_per_node: Amount = Field(alias="checkpoint.host_buffer_gb_per_node")
    files: Number | None = Field(None, alias="checkpoint.files")
    forward_s: Amount = Field(alias="phases_s.forward")
    backward_s: Amount = Field(alias="phases_s.backward")
    update_s: Amount = Field(alias="phases_s.update")
    iterations: Number | None = None
    blocking_gb_per_s: Amount | None = Field(None, alias="measured.blocking_throughput_gb_per_s")
    end_to_end_s: Amount | None = Field(None, alias="measured.end_to_end_s")

    @model_validator(mode="after")
    def _something_is_measured(self) -> Self:
        if self.blocking_gb_per_s is None and self.end_to_end_s is None:
            raise ValueError("nothing is measured; give measured.blocking_throughput_gb_per_s or measured.end_to_end_s")
        return self

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured, in SI units."""
        found = {
            Metric.BLOCKING: (self.blocking_gb_per_s, _GB),
            Metric.END_TO_END: (self.end_to_end_s, 1.0),
        }
        return {metric: value * unit for metric, (value, unit) in found.items() if value is not None}

    def check(self) -> None:
        """Check that the case can be expressed."""
        if self.gpus % self.nodes:
            raise CaseError(
                f"case {self.id}: gpus is {self.gpus}, but must be a multiple of nodes {self.nodes}; correct it"
            )
        if self.end_to_end_s is not None and self.iterations is None:
            raise CaseError(f"case {self.id}: end_to_end_s is of a whole run; give its number of iterations")

    @property
    def num_files(self) -> int:
        """The files of one checkpoint, of all ranks."""
        if self.files is not None:
            return self.files
        num_params = self.checkpoint_gb * _GB / _BYTES_PER_PARAM
        num_layers = round(math.cbrt(num_params / (_MATRIX_VALUES * _WIDTH_OVER_LAYERS**2)))
        return num_layers * (self.gpus // self.nodes) + _FILES_PER_RANK * self.gpus

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Lower the run with its engine, and simulate it."""
        per_node = self.gpus // self.nodes
        if per_node > profile.devices_per_node or (per_node < profile.devices_per_node and self.nodes > 1):
            raise CaseError(
                f"case {self.id}: gpus is {self.gpus} on {self.nodes} nodes, but {profile.name} has "
                f"{profile.devices_per_node} devices per node; name another profile"
            )
        values: dict[Metric, float] = {}
        if self.blocking_gb_per_s is not None:
            blocked_s = self._simulate(profile, self.every_iterations + 1).blocked_s[0]
            if not blocked_s:
                raise CaseError(
                    f"case {self.id}: blocking_throughput_gb_per_s: {self.engine} is predicted not to block "
                    "training at all, which is no throughput; give end_to_end_s instead"
                )
            values[Metric.BLOCKING] = self.checkpoint_gb * _GB / blocked_s
        if self.iterations is not None:
            values[Metric.END_TO_END] = self._simulate(profile, self.iterations).end_to_end_s
        return Outcome(values)

    def _simulate(self, profile: HardwareProfile, num_iterations: int) -> RunTimes:
        taken, training = iteration(self.forward_s, self.backward_s, self.update_s)
        state = [Shard(round(self.checkpoint_gb * _GB / self.gpus), Tier.GPU, taken.tasks[-1].index)]
        buffer_bytes = round(self.host_buffer_gb_per_node * _GB * self.nodes / self.gpus)
        cost = CostModel(profile, (), Sharding(data_parallel=self.gpus))
        try:
            make, costs = checkpoints.engine(self.engine, cost, "pfs", state, buffer_bytes, num_files=self.num_files)
            made = with_checkpoints(taken, state, make, num_iterations=num_iterations, every=self.every_iterations)
            prices = costs.prices(made, training)
        except ValueError as error:
            raise CaseError(f"case {self.id}: {error}") from error
        return times(made, run(made.schedule, prices, costs.capacities(), 1))


def iteration(forward_s: float, backward_s: float, update_s: float) -> tuple[Schedule, list[Price]]:
    """Return an iteration of which only the phases are known, and the prices of its tasks.

    Its only update takes no snapshot by itself: it waits for what the saver of a checkpoint names.
    """
    forward = Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, after_previous=(2,))
    backward = Task(1, Lane.COMPUTE, Op.BACKWARD, Phase.BACKWARD, after=(0,))
    update = Task(2, Lane.GPU_UPDATE, Op.UPDATE, Phase.UPDATE, after=(1,))
    prices = [Price(0.0, seconds, ((Resource.DEVICE, 1.0),)) for seconds in (forward_s, backward_s, update_s)]
    return Schedule((forward, backward, update), description="an iteration of known phases"), prices

"""Behaviour of other engines that placements cannot express, as one field of their decisions."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Amount = Annotated[int, Field(ge=0)]


class Habits(BaseModel):
    """Behaviour of other engines that the other fields of their decisions cannot express (simulated only).

    Attributes:
        recompute_block: the engine recomputes so many segments in a row before their backward, keeps only their
            outputs, and then runs each segment's forward once more (MegaTrain). It fetches parameters for each of
            these uses, into another buffer each time. 0: it recomputes once.
        layer_by_layer: all micro-batches pass a segment before the next segment begins, and gradients of a segment
            leave the device once. Inputs of segments travel through the host. If there are several ranks, each works
            on other segments of the same batch at any time (RoundPipe).
        publishes_late: the host's updates run beside the next iteration, which therefore uses weights that are one
            update old. Its end publishes them.
        num_steps: iterations of the user's batch that one iteration of the schedule stands for (ZenFlow).
        sum_bytes: bytes of host memory per parameter that a pass moves after each copy of a gradient to the host.
        prepare_bytes: the same, of a pass before the update.
        publish_bytes: the same, of a pass after the update.
        host_bytes: other bytes of host memory that the engine holds per parameter that it updates.
        bucket_params: gradients that are reduced after the last backward are joined into all-reduces of at most so many
            parameters (DeepSpeed). 0: each unit has its own.
        head_percent: the share of the last segment's saved activations and workspace that the engine holds, because its
            own head makes logits in chunks, or their gradient in place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recompute_block: Amount = 0
    layer_by_layer: bool = False
    publishes_late: bool = False
    num_steps: Annotated[int, Field(ge=1)] = 1
    sum_bytes: Amount = 0
    prepare_bytes: Amount = 0
    publish_bytes: Amount = 0
    host_bytes: Amount = 0
    bucket_params: Amount = 0
    head_percent: Annotated[int, Field(ge=0, le=100)] = 100

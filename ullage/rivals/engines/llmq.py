"""LLMQ: a trainer in C++ with kernels of its own; weights, gradients and moments may wait in host memory.

Source: github.com/IST-DASLab/llmq, ``README.md``, ``doc.md`` and ``src/models``. Its users state what is sharded,
offloaded and made again in backward. Here these options come in the order in which its published runs take them.
"""

import itertools
from collections.abc import Iterator
from typing import Final, NamedTuple

from planner.decisions import Activations, Place, UnitDecision
from planner.models.config import ModelConfig
from planner.models.operators import Batch, Operator
from planner.placements import ACTIVATIONS
from planner.setup import Setup, pieces
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import AFTER_BACKWARD, given
from ullage.rivals.kernels import llmq
from ullage.rivals.kernels.llmq import Remade

_SLOTS = 2  # of weights, state and gradients of layers


class Placement(NamedTuple):
    """What is where.

    Attributes:
        streams: moments, and the weights that are updated, are on the host (``--offload-opt-m``, ``--offload-opt-v``,
            ``--offload-master``).
        fetches: layers' weights come from there, whole (``--shard-weights`` beside the latter).
        zero_stage: 2 shards gradients (``--shard-gradients``).
        gradients_on_host: their sums wait on the host (``--offload-gradients``).
    """

    streams: bool = False
    fetches: bool = False
    zero_stage: int = 1
    gradients_on_host: bool = False


PLACEMENTS: Final = (
    Placement(),
    Placement(streams=True),
    Placement(streams=True, fetches=True),
    Placement(streams=True, fetches=True, zero_stage=2),
    Placement(streams=True, fetches=True, zero_stage=2, gradients_on_host=True),
)
# ``--recompute-norm --recompute-swiglu``, and ``--recompute-ffn`` beside the first.
REMADE: Final[tuple[tuple[Remade, ...], ...]] = ((), ("norms", "swiglu"), ("norms", "ffn"))


def graphs(model: ModelConfig, batch: Batch) -> Iterator[tuple[Operator, ...]]:
    """Yield the engine's operators, with more and more of a layer made again in backward.

    Raises:
        ModelConfigError: the engine does not have such layers.
    """
    for remade in REMADE:
        yield llmq.build_graph(model, batch, remade)


def llm_q(setup: Setup) -> Iterator[RivalDecisions]:
    """LLMQ with each of its placements, activations kept and recomputed.

    The device updates, also what is on the host, when all gradients are there and their norm is known; the next
    iteration waits. Layers come and go whole, two at a time. Ranks gather weights from one copy in the memory of their
    node. Whole layers are recomputed from inputs on the host (``--recompute-block --offload-residual``). The host
    launches each layer as a CUDA graph. Weights have no master copy in fp32, which changes numerics. Not counted: of
    products in fp8, the device's cast weights, beside which ranks shard those in bf16.

    Args:
        setup: the request, for devices of one node; better in units of the engine's :func:`graphs`.
    """
    for placed, activations in itertools.product(PLACEMENTS, ACTIVATIONS):
        yield place(setup, placed, activations)


def place(setup: Setup, placed: Placement, activations: Activations, *, on_host: bool = True) -> RivalDecisions:
    """Return the decisions of a placement.

    Args:
        setup: as :func:`llm_q`.
        placed: what is where.
        activations: of layers.
        on_host: whether inputs of recomputed layers wait on the host.
    """
    precision, several = setup.given.precision, setup.given.data_parallel > 1
    if precision.weights == "bf16" and precision.master_bytes > precision.weight_bytes:
        precision = precision.model_copy(update={"master": "bf16"})
    units = {
        unit.name: UnitDecision(
            params="host" if placed.fetches and unit.in_layer and unit.num_weights else "gpu",
            activations=activations if unit.can_swap else "keep",
            update=(Place.STREAM if placed.streams else Place.GPU,) * len(pieces(setup, unit)),
            streamed_gradients="host" if placed.gradients_on_host and unit.in_layer else "gpu",
        )
        for unit in setup.units
    }
    own = {"precision": precision, "collectives": setup.given.collectives}
    own |= {"loss_tile_tokens": None, "layer_tile_tokens": None, "kernels": None}  # it has its own
    return RivalDecisions(
        **given(setup) | own | {"zero_stage": placed.zero_stage if several else 0},
        policy="llmq",
        fetches_whole="together" if placed.fetches else None,
        inputs_on_host=on_host,
        gradient_path=GradientPath.ON_DEVICE,
        adds_in_products=True,
        launches_graphs=True,
        num_param_slots=_SLOTS,
        num_state_slots=_SLOTS,
        num_gradient_slots=_SLOTS,
        num_activation_slots=_SLOTS,
        units=units,
        **AFTER_BACKWARD,
    )

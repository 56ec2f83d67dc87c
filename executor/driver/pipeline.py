"""Runs micro-batches through the stages of a pipeline.

[Note: Pipelines] Each stage is a session of its own: a smaller model, with its own schedule, lanes and memory, shared
by its data- and tensor-parallel ranks. Its schedule has the forwards and backwards of the micro-batches in the order of
:func:`planner.lowering.compute.turns_of`, and what is received from other stages before each of them, and sent behind
(:mod:`planner.lowering.sends`). This module walks that order, and hands these tasks their tensors. They have lanes of
their own, so that computing goes on while a stage sends. Whatever else the plan of a stage has, such as weights that
are fetched and updates on the host, works as in one process.
"""

import collections
import contextlib
import inspect
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from executor.distributed.groups import Group
from executor.distributed.ranks import Ranks
from executor.driver.iteration import IterationDriver
from executor.driver.runtime import Runtime
from executor.module.stages import Stage
from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering.compute import turns_of
from planner.schedule.tasks import STAGE_LANES, Lane, Op, Task

Loss = Callable[[Any, Mapping[str, Any]], Tensor]
"""Returns the loss of a model's output and its batch, a scalar."""


def own_loss(output: Any, _batch: Mapping[str, Any]) -> Tensor:
    """Return the loss of a model that returns it, alone or as ``loss`` of an object or mapping."""
    of_object = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = output if isinstance(output, Tensor) else of_object
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    raise ValueError(
        f"the model returned a {type(output).__name__} without a loss that is one number; give what makes it: "
        "forward_backward(batches, lambda output, batch: ...)"
    )


_Edges = list[tuple[torch.Size, torch.dtype, GradientEdge | None]]
"""Of each tensor that a forward has made and sent on: its shape, its type, and what backward begins with.

The tensor is needed no more. In evaluation, backward begins with nothing.
"""

_Begun = tuple[_Edges, list[Tensor] | None]
"""A micro-batch between forward and backward in a round; take the gradients for the stage before, if there is one."""


def _edges(made: Sequence[Tensor]) -> _Edges:
    trains = torch.is_grad_enabled()
    return [(x.shape, x.dtype, get_gradient_edge(x) if trains and x.requires_grad else None) for x in made]


def _without_loss(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch for a stage that makes no loss, without labels, if the model's forward can do without.

    Decoders behind an encoder read the labels, moved by one.
    """
    wanted = inspect.signature(model.forward).parameters.get("labels")
    if wanted is not None and wanted.default is inspect.Parameter.empty:
        return dict(batch)
    given = {name: value for name, value in batch.items() if name != "labels"}
    if "labels" not in batch or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return given
    shifted: Callable[..., Tensor] | None = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shifted is None:
        return dict(batch)
    if not given.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
        given["decoder_input_ids"] = shifted(labels=batch["labels"])
    return given


_ALONE = (
    "ranks of a pipeline have the gradients of their stage alone; clip with optimizer.clip_grad_norm_(), which counts "
    "those of all stages"
)


@final
class Pipeline:
    """Runs a stage's micro-batches, see [Note: Pipelines].

    Args:
        model: the user's, of which this process has one stage.
        stage: what this process computes of it.
        units, decisions: those of the stage.
        groups: the parameters of each of the optimizer's groups, in all stages.
        driver, runtime: those of the stage.

    Attributes:
        stage, groups: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: Stage,
        units: Sequence[Unit],
        decisions: Decisions,
        groups: Sequence[Sequence[nn.Parameter]],
        driver: IterationDriver,
        ranks: Ranks,
        runtime: Runtime,
    ) -> None:
        self.stage, self.groups = stage, groups
        self._model, self._decisions = model, decisions
        self._driver, self._ranks, self._runtime = driver, ranks, runtime
        self._device = runtime.backend.device
        driver.gradients.refusal = _ALONE
        self._number, self._count = ranks.stage, ranks.stages.size
        self._num_rounds = len(decisions.round_starts) + 1
        tasks = runtime.loop.schedule.tasks
        self._of_lanes = {lane: [task for task in tasks if task.lane is lane] for lane in STAGE_LANES}
        self._planned = {lane: collections.deque[Task]() for lane in STAGE_LANES}  # that this run has not reached
        self._written = {unit.name: runtime.state.units[unit.name].device_weights for unit in units if unit.writes}
        self._foreign: dict[nn.Parameter, Tensor] = {}  # weights of other stages, as this one is closed

    def run(self, batches: Sequence[Mapping[str, Any]], loss: Loss) -> list[float]:
        """Run forward and backward of all micro-batches; return the loss of each, on every stage.

        Args:
            batches: keyword arguments of the model, one mapping for each micro-batch of the plan.
            loss: the loss of an output, of which backward takes the mean over micro-batches.

        Raises:
            ValueError: there are more or fewer micro-batches than planned; or forward changes weights while another
                micro-batch waits for its backward.
            RankError: another rank has failed.
        """
        count = self._decisions.num_micro_batches
        if len(batches) != count:
            raise ValueError(f"{len(batches)} micro-batches were given, but the plan has {count}; give all of a step")
        follows = self._driver.begin()
        self._planned = {lane: collections.deque(tasks if follows else ()) for lane, tasks in self._of_lanes.items()}
        begun: dict[tuple[int, int], _Begun] = {}
        found: dict[int, Tensor] = {}
        for op, turn, micro_batch in turns_of(self._decisions):
            if op is Op.FORWARD:
                with self._checked_writes() if begun and self._written else contextlib.nullcontext():
                    begun[turn, micro_batch], own_loss = self._forward(turn, batches[micro_batch], loss, count)
                if own_loss is not None:
                    found[micro_batch] = own_loss
            elif op is Op.WEIGHT_GRADIENT:
                self._driver.make_later_gradients(turn, micro_batch)
            else:
                self._backward(turn, *begun.pop((turn, micro_batch)))
        return self._on_all_stages([float(found.get(number, 0.0)) * count for number in range(count)])

    def evaluate(self, batches: Sequence[Mapping[str, Any]], loss: Loss) -> list[float]:
        """See :meth:`executor.prepare.OffloadedOptimizer.evaluate`."""
        losses: list[float | Tensor] = [0.0] * len(batches)
        self._planned = {lane: collections.deque() for lane in STAGE_LANES}
        for turn, (number, batch) in itertools.product(range(self._num_rounds), enumerate(batches)):
            _, own_loss = self._forward(turn, batch, loss, 1)
            if own_loss is not None:
                losses[number] = own_loss
        return self._on_all_stages([float(loss) for loss in losses])

    @contextlib.contextmanager
    def _checked_writes(self) -> Iterator[None]:
        """Return a context for a forward that may write to weights, which other micro-batches wait to use in backward.

        It may write the same values again, as forwards do that clamp weights. Raises as :meth:`run`.
        """
        before = {name: weights.clone() for name, weights in self._written.items()}
        yield
        for name, weights in before.items():
            if not torch.equal(weights, self._written[name]):
                raise ValueError(
                    f"forward changed weights of {name}, with which another micro-batch is to run backward; change "
                    "them between steps, or leave the pipeline out"
                )

    def _is_last(self, turn: int) -> bool:
        return (turn, self._number) == (self._num_rounds - 1, self._count - 1)

    def _on_all_stages(self, losses: Sequence[float]) -> list[float]:
        """Return the last stage's losses, when everything has been sent."""
        for lane in STAGE_LANES:
            self._runtime.machine.await_stage(lane)
        total = torch.tensor(losses, dtype=torch.float64, device="cpu")
        self._ranks.stages.all_reduce(total)
        return total.tolist()

    def _forward(self, turn: int, batch: Mapping[str, Any], loss: Loss, count: int) -> tuple[_Begun, Tensor | None]:
        """Run the forward of a micro-batch, of so many, in a round; the last chunk has a loss."""
        stage, links = self.stage, self._ranks.forward
        self._driver.progress.begin_forward()
        stage.check(batch, loss if loss is own_loss else None)
        stage.receive = lambda values: self._receive(links[(self._number - 1) % self._count], values, 0)
        try:
            with stage.in_round(turn):
                if self._is_last(turn):
                    made = loss(stage.output(self._model(**batch)), batch) / count
                    return (_edges([made]), stage.gradients), made.detach()
                self._model(**_without_loss(self._model, batch))
                sent = stage.made()
        finally:
            stage.receive = None
        self._send(Lane.SEND, links[self._number], [each.detach() for each in sent], 0)
        return (_edges(sent), stage.gradients), None

    def _backward(self, turn: int, edges: _Edges, to_send: list[Tensor] | None) -> None:
        gradients = [torch.ones(shape, dtype=dtype, device=self._device) for shape, dtype, _ in edges]
        if not self._is_last(turn):
            self._receive(self._ranks.back[self._number], gradients, 1)
        begun = [(edge, gradient) for (_, _, edge), gradient in zip(edges, gradients, strict=True) if edge is not None]
        torch.autograd.backward([edge for edge, _ in begun], [gradient for _, gradient in begun])
        if to_send:
            self._send(Lane.SEND_BACK, self._ranks.back[(self._number - 1) % self._count], to_send, 1)

    def _own(self, values: Tensor) -> Tensor:
        """Return the part of flat values that this tensor-parallel rank sends: all ranks have all of them."""
        count = self._ranks.tensor.size
        return values.chunk(count)[self._ranks.tensor.rank] if len(values) % count == 0 else values

    def _receive(self, group: Group, values: Sequence[Tensor], sender: int) -> None:
        """Fill contiguous values; tensor-parallel ranks gather the parts that each of them gets."""
        parts = [(flat, self._own(flat)) for flat in (each.view(-1) for each in values)]
        self._exchange(Lane.RECEIVE, group, [own for _, own in parts], sender)
        self._runtime.machine.await_stage(Lane.RECEIVE)
        for flat, own in parts:
            if len(own) < len(flat):
                self._ranks.tensor.all_gather(flat, own)

    def _send(self, lane: Lane, group: Group, values: Sequence[Tensor], sender: int) -> None:
        """Begin to send, beside what is computed."""
        self._exchange(lane, group, [self._own(each.contiguous().view(-1)) for each in values], sender)

    def _exchange(self, lane: Lane, group: Group, values: Sequence[Tensor], sender: int) -> None:
        """Begin the lane's next task with these values. Where the plan has none, make one."""
        runtime = self._runtime
        runtime.machine.end_open()
        runtime.actions.links.hand_over(lane, group, sender, values)
        if self._planned[lane] and not self._driver.progress.has_left:
            runtime.loop.issue_up_to(self._planned[lane].popleft().index + 1)
        else:
            runtime.machine.issue_unplanned(lane)

    def clip_grad_norm_(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See :meth:`executor.prepare.OffloadedOptimizer.clip_grad_norm_`; the norm is that of all stages."""
        is_first = self._ranks.sharing.rank == 0  # the first of the stages that share weights counts them
        tied = () if is_first else self._decisions.tied_weights
        again = {id(self._model.get_parameter(name)) for name in tied}
        self._driver.gradients.refusal = ""
        try:
            norms = [p.grad.norm() for p in parameters if p.grad is not None and id(p) not in again]
            on_host = torch.stack(norms).to("cpu", torch.float64) if norms else torch.zeros(0, dtype=torch.float64)
            squares = on_host.square().sum().view(1)
            self._ranks.stages.all_reduce(squares)
            total = squares.sqrt().to(torch.float32)[0].to(self._device)
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        finally:
            self._driver.gradients.refusal = _ALONE
        return total

    def shared(self, parameter: Tensor, dtype: torch.dtype, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a weight of any stage, on the host. All processes call this together.

        Args:
            parameter: the parameter.
            dtype: the type of its values.
            read: returns them where they are.
        """
        shape, home = self.stage.homes[cast("nn.Parameter", parameter)]
        is_own = self._number == home
        values = read(parameter).to("cpu").contiguous() if is_own else torch.empty(shape, dtype=dtype, device="cpu")
        self._ranks.stages.send(values, home)
        return values

    def of_all_stages(self, state: Mapping[int, Any]) -> dict[int, Any]:
        """Return the optimizer's state of all stages, by the numbers of parameters. All call this together."""
        homes = dict(enumerate(self.stage.homes[p][1] for group in self.groups for p in group))
        own, found = io.BytesIO(), dict[int, Any]()
        torch.save({number: entry for number, entry in state.items() if homes[number] == self._number}, own)
        for home in range(self._ranks.stages.size):
            count = torch.tensor(own.tell(), device="cpu")
            self._ranks.stages.send(count, home)
            data = torch.empty(int(count), dtype=torch.uint8, device="cpu")
            if home == self._number:
                data = torch.frombuffer(bytearray(own.getbuffer()), dtype=torch.uint8)
            self._ranks.stages.send(data, home)
            found |= torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
        return dict(sorted(found.items()))

    def give_back(self) -> None:
        """Give this process the weights of all stages. All call this together, when each has those of its own."""
        for parameter in self.stage.homes:
            self._foreign[parameter] = self.shared(parameter, parameter.dtype, Tensor.detach)

    def close(self) -> None:
        """Make the model whole again. Weights that were not given back are NaN."""
        self.stage.undo()
        for parameter, (shape, _) in self.stage.homes.items():
            if parameter.shape != shape:
                empty = torch.full(shape, math.nan, dtype=parameter.dtype, device="cpu")
                parameter.data = self._foreign.pop(parameter, empty)

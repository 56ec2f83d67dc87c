"""Context parallelism: the exchanges of tokens inside a model's modules.

A rank's layers get the hidden states of its own tokens ([Note: Context parallelism] in
:mod:`planner.models.formulas.context`). What the model makes of whole sequences before its first layer, such as masks
and positions, stays whole. An attention module is given a tensor of the shape that whole sequences have, which takes no
memory. Its projections compute with the rank's own tokens instead, and return all tokens of the rank's heads. So
everything between the projections is the module's own code for whole sequences with fewer heads: rotation, masks,
windows, any kernel of attention. The projection behind attention gets its own tokens of all heads again.

Or keys and values pass from rank to rank (:mod:`executor.distributed.ring_attention`). Then a rank has two parts of
each sequence, and sequences are shared only where gradients are wanted. In evaluation, each rank computes all of them,
so that caches have the keys of all tokens.

Behind the last layer, the hidden states stand for those of whole sequences
(:class:`executor.distributed.sequences.SharedHidden`), so whatever the model or the loop does with them is right.
"""

import functools
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from executor.callbacks import forward_of, in_backward, replace_attribute, with_gradient
from executor.distributed.collectives import all_to_all
from executor.distributed.groups import Group
from executor.distributed.ring_attention import Beside, Parts, Redirected, Ring, halves, own_tokens
from executor.distributed.sequences import SharedHidden
from executor.distributed.shards import BindingError, check_outputs
from executor.distributed.tensor_parallel import NoCompile, Undo
from planner.graph import Operator, Unit

_HIDDEN = "hidden_states"


def bind_context_parallel(
    model: nn.Module, units: Sequence[Unit], group: Group, no_compile: NoCompile, beside: Beside | None
) -> list[Undo]:
    """Make layers compute with this rank's tokens; return functions that undo this.

    If there is something that works ``beside`` what is computed, keys pass from rank to rank there.

    Raises:
        BindingError: a layer is not as in ``transformers``.
    """
    operators = [operator for unit in units for operator in unit.operators]
    pairs = list(zip(_of(operators, "qkv"), _of(operators, "output"), strict=True))
    ring = Ring(group, beside) if beside else None
    sequences = _Sequences(group, ring)
    layers = [model.get_submodule(_parent(_parent(before.name))) for before, _ in pairs]
    whole = functools.partial(check_outputs, "ranks share sequences", "context=1")
    undo: list[Undo] = [
        model.register_forward_pre_hook(no_compile(hook), with_kwargs=True).remove for hook in (whole, sequences.begin)
    ]
    if embeddings := _of(operators, "embedding"):  # in the first stage of a pipeline
        embedding = model.get_submodule(embeddings[0].name)
        undo.append(embedding.register_forward_pre_hook(no_compile(sequences.check_same)).remove)
        undo.append(layers[0].register_forward_pre_hook(no_compile(sequences.cut), with_kwargs=True).remove)
    if _of(operators, "head"):  # in the last one
        ends = [operator for operator in units[-1].operators if operator.kind in {"norm", "projection"}]
        last = model.get_submodule(ends[-1].name) if ends else layers[-1]
        undo.append(last.register_forward_hook(no_compile(sequences.share)).remove)
    for before, after in pairs:
        if ring is None:
            undo += _exchange_heads(model, before, after, sequences, no_compile)
        else:
            undo.append(_pass_keys(model, _parent(before.name), sequences, ring, no_compile))
    return undo


def _pass_keys(model: nn.Module, path: str, sequences: "_Sequences", ring: Ring, no_compile: NoCompile) -> Undo:
    """Let an attention module compute with this rank's tokens, and attend to those of all; return what undoes it."""
    module = model.get_submodule(path)
    forward = forward_of(module)

    def attend(*args: Any, **kwargs: Any) -> Any:
        if not sequences.are_shared:
            return forward(*args, **kwargs)
        num_tokens = _hidden(args, kwargs).shape[1] * ring.group.size
        args, kwargs = tree_map(lambda leaf: sequences.rows(leaf, num_tokens), (args, kwargs))
        result = failure = None
        with Redirected(ring, num_tokens) as redirected:
            try:
                result = forward(*args, **kwargs)
            except Exception as error:
                if redirected.has_attended:
                    raise
                failure = error  # as scores of whole sequences are of another shape
        if not redirected.has_attended:
            raise ValueError(
                f"{path} ({type(module).__name__}) does not call scaled_dot_product_attention, so keys cannot pass "
                "from rank to rank; make the model with attn_implementation='sdpa', or plan with --parallel "
                "exchange=all-to-all"
            ) from failure
        return result

    return replace_attribute(module, "forward", no_compile(attend))


def _of(operators: Sequence[Operator], kind: str) -> list[Operator]:
    return [operator for operator in operators if operator.kind == kind]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


@final
class _Sequences:
    """The sequences of the forward that is under way.

    Attributes:
        group: ranks that share them.
    """

    def __init__(self, group: Group, ring: Ring | None) -> None:
        self.group, self._ring = group, ring
        self._is_shared = True
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_tokens = 0
        self._compared = False

    def begin(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how long the sequences are that a model is given; a hook before its forward."""
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim() in {2, 3})
        self._begin(next((each.shape[1] for each in given), 0))

    def _begin(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._rows.clear()
        self._is_shared = self._ring is None or torch.is_grad_enabled()

    def check_same(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Check that all ranks read the same sequences: first, and wherever nothing is trained; a hook.

        Raises:
            ValueError: they do not.
        """
        if args and not (self._compared and torch.is_grad_enabled()):
            self.group.check_same("batch", args[0].detach().cpu().numpy().tobytes())
            self._compared = True

    def num_tokens(self, num_own: int) -> int:
        """Return the tokens of a sequence of which this rank has so many.

        What is trained is shared equally. Else the last rank may have padding, but no forward is run a second time.
        """
        return num_own * self.group.size if torch.is_grad_enabled() or in_backward() else self._num_tokens

    @property
    def are_shared(self) -> bool:
        """Whether each rank has its own tokens; if keys pass from rank to rank, only where gradients are wanted."""
        return self._is_shared or in_backward()

    def _parts(self, num_tokens: int) -> list[Parts]:
        """Return the parts of a sequence that each rank has. Behind the last one's, there may be padding."""
        if self._ring is not None:
            return halves(num_tokens, self.group.size)
        count = -(-num_tokens // self.group.size)
        firsts = [min(rank * count, num_tokens) for rank in range(self.group.size)]
        return [[(first, min(count, num_tokens - first))] for first in firsts]

    def rows(self, given: Any, num_tokens: int) -> Any:
        """Return this rank's rows of what has one for each token; anything else as it is. Layers share them."""
        if not isinstance(given, Tensor) or given.dim() not in {2, 3} or given.shape[1] != num_tokens:
            return given
        if id(given) not in self._rows:
            self._rows[id(given)] = given, own_tokens(given, self._parts(num_tokens)[self.group.rank], 1)
        return self._rows[id(given)][1]

    def cut(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the first layer this rank's tokens; a hook before its forward.

        Raises:
            ValueError: ranks cannot share sequences that are trained equally.
        """
        hidden = _hidden(args, kwargs)
        num_tokens, ranks = hidden.shape[1], self.group.size
        divisor = ranks if self._ring is None else 2 * ranks
        if num_tokens % divisor and torch.is_grad_enabled():
            raise ValueError(
                f"{ranks} context-parallel ranks cannot share sequences of {num_tokens} tokens equally; pad them to a "
                f"multiple of {divisor}, with labels of -100"
            )
        self._begin(num_tokens)
        if not self._is_shared:
            return args, kwargs
        parts = self._parts(num_tokens)[self.group.rank]
        num_padded = -(-num_tokens // ranks) - sum(count for _, count in parts)

        def forward(whole: Tensor) -> Tensor:
            own = own_tokens(whole, parts, 1)
            return nn.functional.pad(own, (0, 0, 0, num_padded)) if num_padded else own

        def backward(gradient: Tensor) -> Tensor:
            whole = gradient.new_zeros(gradient.shape[0], num_tokens, *gradient.shape[2:])
            at = 0
            for first, count in parts:
                whole[:, first : first + count] = gradient[:, at : at + count]
                at += count
            return whole

        return _with_hidden(args, kwargs, with_gradient(hidden, forward, backward))

    def share(self, _module: nn.Module, _args: Any, hidden: Tensor) -> Tensor:
        """Let hidden states stand for those of whole sequences; a hook after the last module before the head."""
        if not self.are_shared:
            return hidden
        num_tokens = self.num_tokens(hidden.shape[1])
        parts = [each for of_rank in self._parts(num_tokens) for each in of_rank]
        return SharedHidden.at(hidden, self.group, parts)

    def heads(self, own: Tensor, num_fused: int) -> Tensor:
        """Exchange this rank's tokens of all heads for all tokens of its heads.

        Args:
            own: ``[batch, own tokens, fused parts x heads x width]``.
            num_fused: number of fused parts, each with all heads.

        Returns:
            ``[batch, tokens, fused parts x own heads x width]``.
        """
        ranks, num_tokens = self.group.size, self.num_tokens(own.shape[1])
        batch, num_own, width = own.shape
        received = self._exchange(own.view(batch, num_own, num_fused, ranks, -1).permute(3, 0, 1, 2, 4))
        received = received.view(ranks, batch, num_own, width // ranks)
        return received.transpose(0, 1).reshape(batch, -1, width // ranks)[:, :num_tokens]

    def tokens(self, whole: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads, ``[batch, tokens, own width]``, for its tokens of all heads."""
        ranks = self.group.size
        batch, num_tokens, width = whole.shape
        num_own = -(-num_tokens // ranks)
        if missing := num_own * ranks - num_tokens:
            whole = nn.functional.pad(whole, (0, 0, 0, missing))
        received = self._exchange(whole.reshape(batch, ranks, num_own, width).transpose(0, 1))
        return received.permute(1, 2, 0, 3).reshape(batch, num_own, ranks * width)

    def _exchange(self, sent: Tensor) -> Tensor:
        """Send each rank its part, ``[ranks, ...]``; return what each has sent."""
        ones = [1] * self.group.size
        return all_to_all(sent, self.group, ones, ones)


def _exchange_heads(
    model: nn.Module, before: Operator, after: Operator, sequences: _Sequences, no_compile: NoCompile
) -> list[Undo]:
    """Let an attention module compute with all tokens of this rank's heads; return functions that undo this.

    Its operators ``before`` and ``after`` are those around the core of attention.
    """
    path, ranks = _parent(before.name), sequences.group.size
    module = model.get_submodule(path)
    matrices = [spec for spec in before.parameters if len(spec.shape) == 2]
    projections = [model.get_submodule(_parent(spec.name)) for spec in matrices]
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        raise BindingError(
            f"{path} ({type(module).__name__}) does not say how wide its heads are, so ranks cannot share sequences; "
            "plan with --parallel context=1"
        )
    num_fused = 3 if len(projections) == 1 else 1  # one projection for each of queries, keys and values, or for all
    num_heads, num_keys = (spec.shape[0] // head_dim for spec in (matrices[0], matrices[-1]))
    given: Tensor | None = None  # the rank's tokens

    def begin(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the module a tensor of the whole sequences' shape, for which :func:`own` puts the rank's tokens."""
        nonlocal given
        given = hidden = _hidden(args, kwargs)
        shape = hidden.shape[0], sequences.num_tokens(hidden.shape[1]), hidden.shape[2]
        return _with_hidden(args, kwargs, hidden.new_empty(()).expand(shape))

    def own(projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal given
        hidden = given
        if projection is projections[-1]:
            given = None
        return hidden, *args[1:]

    def heads(projection: nn.Module, _args: Any, made: Tensor) -> Tensor:
        copies = ranks // num_keys
        if copies > 1 and num_fused == 1 and projection is not projections[0]:
            made = made.view(*made.shape[:2], num_keys, head_dim).repeat_interleave(copies, 2).flatten(2)
        return sequences.heads(made, num_fused)

    def tokens(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        whole, *others = args
        return sequences.tokens(whole), *others

    undo = _divide(module, num_heads, num_keys, ranks)
    undo.append(module.register_forward_pre_hook(no_compile(begin), with_kwargs=True).remove)
    for projection in projections:
        undo.append(projection.register_forward_pre_hook(no_compile(own)).remove)
        undo.append(projection.register_forward_hook(no_compile(heads)).remove)
    behind = model.get_submodule(_parent(after.parameters[0].name))
    return [*undo, behind.register_forward_pre_hook(no_compile(tokens)).remove]


def _divide(module: nn.Module, num_heads: int, num_keys: int, ranks: int) -> list[Undo]:
    """Let an attention module have this rank's heads; return functions that undo this."""
    counts = {name: getattr(module, name, 0) // ranks for name in ("num_heads", "split_size")}
    if hasattr(module, "num_key_value_heads"):
        counts["num_key_value_heads"] = max(num_keys, ranks) // ranks
    if hasattr(module, "num_key_value_groups"):
        counts["num_key_value_groups"] = num_heads // max(num_keys, ranks)
    return [replace_attribute(module, name, count) for name, count in counts.items() if count]


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs[_HIDDEN]
    return hidden


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {_HIDDEN: hidden})

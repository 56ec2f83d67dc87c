"""Vocabulary-parallel embedding, head and cross-entropy.

The loss is computed on sharded logits (Shoeybi et al., Megatron-LM, 2019, section 3). For each token, ranks exchange
three numbers instead of one logit per entry of the vocabulary.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from executor.distributed.collectives import gather_last_dim, reduce_from_group
from executor.distributed.groups import Group
from executor.distributed.shards import BindingError, ParameterShard

RowLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps scores ``[rows, vocabulary]`` and targets ``[rows]`` to the loss of each row, ``[rows]``."""

_HF_LOSS: Final = "ForCausalLMLoss"
_MASKED_LOGIT: Final = -1e30  # logit of padding; finite, because a rank may have only padding


def summed(logits: torch.Tensor, targets: torch.Tensor, losses: RowLosses, count: torch.Tensor | int) -> torch.Tensor:
    """Return the sum of ``losses(logits, targets)`` over ``count``. For tiled logits, it computes a tile at a time."""
    if has_torch_function_unary(logits):
        return handle_torch_function(summed, (logits,), logits, targets, losses, count)
    return losses(logits, targets).sum() / count


def gather(logits: torch.Tensor, group: Group, num_logits: int) -> torch.Tensor:
    """All-gather logits over the ranks that share the vocabulary. Tiled logits are computed whole first."""
    if has_torch_function_unary(logits):
        return handle_torch_function(gather, (logits,), logits, group, num_logits)
    return gather_last_dim(logits, group, num_logits)


def embed(module: nn.Module, shard: ParameterShard, group: Group) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of an embedding whose rows are sharded over the ranks.

    The first call checks that all ranks have the same batch. With different batches, training would silently give wrong
    results, because all-reduced sums are the same on all ranks.

    Raises:
        BindingError: the module is not a plain ``torch.nn.Embedding``.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        raise BindingError(
            f"{shard.name} belongs to a {type(module).__name__}, but tensor-parallel ranks can only share a "
            "plain torch.nn.Embedding; plan with --parallel tensor=1"
        )
    count = shard.shape[0]
    first = shard.mesh.tensor * count
    padding = module.padding_idx - first if module.padding_idx is not None else -1
    own_padding = padding if 0 <= padding < count else None

    compared = False

    def forward(ids: torch.Tensor) -> torch.Tensor:
        nonlocal compared
        if not compared:
            group.check_same("batch", ids.cpu().numpy().tobytes())
            compared = True
        rows = ids - first
        elsewhere = (rows < 0) | (rows >= count)
        values = functional.embedding(rows.masked_fill_(elsewhere, 0), module.weight, own_padding)
        return reduce_from_group(values.masked_fill_(elsewhere.unsqueeze(-1), 0), group)

    return forward


def bind_head(model: Any, head: nn.Module, weight: ParameterShard, group: Group) -> list[Callable[[], None]]:
    """Let a head whose vocabulary is sharded keep its logits where it can; return functions that undo this.

    If the model trains with labels and has the loss function of ``transformers`` for causal models, each rank keeps its
    shard of the logits, and the model returns that shard. If logits are float32, the loss sets logits of padding to
    :data:`_MASKED_LOGIT`. In all other cases the logits are all-gathered.
    """
    model_loss: Callable[..., torch.Tensor] | None = getattr(model, "loss_function", None)
    has_hf_loss = getattr(model_loss, "__name__", "") == _HF_LOSS
    signature = inspect.signature(model.forward)
    stay_sharded = False

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal stay_sharded
        labels = signature.bind_partial(*args, **kwargs).arguments.get("labels")
        stay_sharded = has_hf_loss and model.training and torch.is_grad_enabled() and labels is not None

    def after(_head: nn.Module, _args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits if stay_sharded else gather(logits, group, weight.whole_shape[0])

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the cross-entropy of the next token. It replaces ``ForCausalLMLoss`` of ``transformers``."""
        if not stay_sharded:
            assert model_loss is not None
            return model_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        counted = targets != ignore_index
        count = counted.sum() if num_items_in_batch is None else num_items_in_batch

        def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            of_all = _CrossEntropy.apply(logits, targets, weight, group)  # type: ignore[no-untyped-call]
            return torch.where(targets != ignore_index, of_all, 0.0)

        return summed(logits.flatten(0, -2), targets, losses, count)

    undo: list[Callable[[], None]] = [
        model.register_forward_pre_hook(before, with_kwargs=True).remove,
        head.register_forward_hook(after).remove,
    ]
    if has_hf_loss:
        model.loss_function = loss
        undo.append(lambda: setattr(model, "loss_function", model_loss))
    return undo


class _CrossEntropy(torch.autograd.Function):
    """Minus the logarithm of each target's probability, ``[rows]``, in float32."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, weight: ParameterShard, group: Group
    ) -> torch.Tensor:
        scores = logits.float()
        scores[:, weight.num_unpadded :] = _MASKED_LOGIT  # in place if logits are float32
        result = torch.log_softmax(scores, -1)
        most, at = scores.max(-1)
        own = most - result.gather(-1, at.unsqueeze(-1)).squeeze(-1)  # log-sum-exp of this rank's shard
        whole = own.clone()
        group.all_reduce(whole, dist.ReduceOp.MAX)
        sums = (own - whole).exp_()
        group.all_reduce(sums)
        whole += sums.log_()
        result -= (whole - own).unsqueeze(-1)
        columns = targets - weight.mesh.tensor * logits.shape[-1]
        mine = (columns >= 0) & (columns < weight.num_unpadded)
        columns.masked_fill_(~mine, 0)
        found = result.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0.0)
        group.all_reduce(found)
        ctx.save_for_backward(result, columns, mine)
        ctx.dtype = logits.dtype
        return found.neg_()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        result, columns, mine = ctx.saved_tensors
        probabilities = result.exp()
        probabilities.scatter_add_(-1, columns.unsqueeze(-1), -mine.to(probabilities.dtype).unsqueeze(-1))
        return probabilities.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None

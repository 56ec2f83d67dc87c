"""What ranks that share sequences do, each beside the whole model in its own memory."""

import collections
import contextlib

import torch
from training import CONFIGS, Task, make_model, make_optimizer, prepare
from transformers import LlamaForCausalLM

from executor.distributed.groups import Group
from planner.decisions import Decisions

TOKENS = 8


def _labels(batch, **more):
    return lambda model: model(**batch, **more).loss


def _own_loss(batch):
    def loss(model):
        logits = model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].flatten()
        )

    return loss


def _of_some_logits(batch):
    def loss(model):
        logits = model(input_ids=batch["input_ids"], logits_to_keep=3).logits
        assert logits.shape[1] == 3
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, -3:].flatten())

    return loss


def _of_rows_twice(batch):
    rows = torch.tensor([1, 5, 1, 6])

    def loss(model):
        logits = model(input_ids=batch["input_ids"]).logits[0, rows]
        return torch.nn.functional.cross_entropy(logits, batch["labels"][0, torch.tensor([2, 3, 7, 0])])

    return loss


def _of_all_logits(batch):
    return lambda model: model(input_ids=batch["input_ids"]).logits.softmax(-1).square().sum(-1).log().mean()


def _looked_at_before(batch):
    def loss(model):
        logits = model(input_ids=batch["input_ids"]).logits
        with torch.no_grad():
            confidence = logits.float().softmax(-1).amax(-1).mean()
        targets = batch["labels"].flatten()
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets) * confidence

    return loss


def _of_hidden_states(batch):
    return lambda model: model.model(input_ids=batch["input_ids"]).last_hidden_state[:, -1].square().mean()


def _batch(vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def losses(vocabulary: int):
    """Yield ways to a loss, each with a batch of its own. A model without tied weights stays far from diverging."""
    several = [_batch(vocabulary, seed) for seed in range(8)]
    left = several[0] | {"attention_mask": torch.tensor([[0, 0, 0] + [1] * 5, [1] * 8])}
    left["labels"] = left["labels"].masked_fill(left["attention_mask"] == 0, -100)
    yield "padded at the left", _labels(left)
    right = several[1] | {"attention_mask": torch.tensor([[1] * 8, [1] * 3 + [0] * 5])}
    right["labels"] = right["labels"].masked_fill(right["attention_mask"] == 0, -100)  # one rank has none of a sequence
    yield "padded at the right", _labels(right)
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    yield "packed", _labels(several[2] | {"position_ids": packed})
    yield "a sum over items", _labels(several[3], num_items_in_batch=5)
    yield "a loss of the loop's own", _own_loss(several[4])
    yield "some logits", _of_some_logits(several[5])
    yield "rows that are chosen twice", _of_rows_twice(several[6])
    yield "all logits", _of_all_logits(several[7])
    yield "hidden states", _of_hidden_states(several[0])
    yield "logits that are looked at first", _looked_at_before(several[4])
    yield "longer sequences", _labels({name: values.repeat(1, 2) for name, values in several[1].items()})
    yield "one sequence", _labels({name: values[:1] for name, values in several[2].items()})


def off_by(_rank: int, _size: int, task: Task, decisions: Decisions) -> dict[str, float]:
    """Train with each of :func:`losses`, also in memory; return how far off losses and weights are, and evaluations."""
    plain = make_model(task)
    reference = make_optimizer(task, plain)
    model, optimizer = prepare(task, decisions)
    found: dict[str, float] = {}
    with optimizer.session as session:
        for name, loss in losses(CONFIGS[task.family]().vocab_size):
            expected, seen = loss(plain), loss(model)
            expected.backward()
            seen.backward()
            reference.step()
            reference.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            whole = session.full_parameters()
            off = [float((whole[n] - p.detach()).abs().max()) for n, p in plain.named_parameters()]
            found[name] = max(abs(float(seen.detach() - expected.detach())), *off)
        ids = _batch(CONFIGS[task.family]().vocab_size, 9)["input_ids"][:, :7]  # which cannot be shared equally
        plain.eval()
        model.eval()
        with torch.no_grad():
            found["evaluated"] = float((model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max())
            made = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
            expected = plain.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
            found["generated"] = float((made != expected).sum())
    return found


def wrong_batches(rank: int, _size: int, task: Task, decisions: Decisions, kind: str) -> None:
    """Train with sequences that ranks cannot share, or with what they do not have of whole ones."""
    model, optimizer = prepare(task, decisions)
    if kind == "function":

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(_ctx, hidden):
                return hidden.sum()

            @staticmethod
            def backward(_ctx, gradient):
                return gradient.expand(2, TOKENS, 32)

        with optimizer.session:
            ids = _batch(CONFIGS[task.family]().vocab_size, 0)["input_ids"]
            Function.apply(model.model(input_ids=ids).last_hidden_state).backward()
    if kind == "second order":
        with optimizer.session:
            loss = model(**_batch(CONFIGS[task.family]().vocab_size, 0)).loss
            (gradient,) = torch.autograd.grad(loss, [model.model.norm.weight], create_graph=True)
            gradient.square().sum().backward()
    if kind == "outputs":
        with optimizer.session:
            model(**_batch(CONFIGS[task.family]().vocab_size, 0), output_hidden_states=True)
    tokens = _batch(CONFIGS[task.family]().vocab_size, rank if kind == "other" else 0)["input_ids"]
    tokens = tokens if kind == "other" else tokens[:, :7]
    with optimizer.session:
        model(input_ids=tokens, labels=tokens).loss.backward()


def exchanged(_rank: int, _size: int, task: Task, decisions: Decisions) -> tuple[dict[str, int], list[int]]:
    """Train two steps; return the bytes that ranks exchange in the second one, and what each layer saves first."""
    sent: collections.Counter[str] = collections.Counter()
    model, optimizer = prepare(task, decisions)
    group = optimizer.session._ranks.contexts
    tokens = _batch(CONFIGS[task.family]().vocab_size, 0)["input_ids"]
    at, seen = [-1], {}

    def counted(kind, call):
        def counting(self, received, given, *args, **kwargs):
            sent[kind] += max(received.nbytes, given.nbytes) if self is group else 0
            return call(self, received, given, *args, **kwargs)

        return counting

    def pack(tensor):
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), (at[0], storage))
        return tensor

    layers = model.model.layers if isinstance(model, LlamaForCausalLM) else model.transformer.h
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: at.__setitem__(0, number))
        layer.register_forward_hook(lambda *_: at.__setitem__(0, -1))
    with optimizer.session, contextlib.ExitStack() as stack:
        model(input_ids=tokens, labels=tokens).loss.backward()  # compares batches once
        optimizer.step()
        optimizer.zero_grad()
        for kind in ("all_to_all", "all_gather", "reduce_scatter"):
            stack.callback(setattr, Group, kind, call := getattr(Group, kind))
            setattr(Group, kind, counted(kind, call))
        keeps = all(unit.activations == "keep" for unit in decisions.units.values())
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks if keeps else contextlib.nullcontext():  # what hooks see is not recomputed
            loss = model(input_ids=tokens, labels=tokens).loss
        for parameter in model.parameters():
            seen.pop(parameter.untyped_storage().data_ptr(), None)
        loss.backward()
        optimizer.step()
    saved: collections.Counter[int] = collections.Counter()
    for number, storage in seen.values():
        saved[number] += storage.nbytes()
    return dict(sent), [saved[number] for number in range(len(layers))]


def attended(_rank: int, _size: int, task: Task, decisions: Decisions, attention: str, num_tokens: int) -> None:
    """Train with another implementation of attention, or with sequences of another length."""
    model, optimizer = prepare(task, decisions)
    with optimizer.session:
        model.set_attn_implementation(attention)
        tokens = _batch(CONFIGS[task.family]().vocab_size, 0)["input_ids"][:, :num_tokens]
        model(input_ids=tokens, labels=tokens).loss.backward()

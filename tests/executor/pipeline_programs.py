"""What the processes of a pipeline run."""

import functools
import threading
import time
import warnings
from collections import Counter
from unittest import mock

import pytest
import torch
import training
import transformers
from torch.nn import LayerNorm, Linear
from training import CONFIGS, Task, batches, grouped, make_model, make_optimizer, prepare, session_options
from virtual.watch import watched

import ullage
from executor.distributed.groups import Group
from executor.weights.loading import load
from executor.weights.saving import save
from planner.choices.request import Request
from planner.decisions import Decisions
from planner.schedule.tasks import Lane, Tier
from planner.schedule.timeline import memory_use
from ullage.this_machine.planning import plan_here


def steps(task: Task, reader: int):
    """Yield the micro-batches of each step, as the arguments of the model."""
    for micro_batches in grouped(task, batches(task, reader), reader):
        yield [{"input_ids": tokens, "labels": tokens} for tokens in micro_batches]


def penalized(model, factor: float):
    """Return the loss of an output, and a penalty that runs a layer's last product again."""

    def loss(output, _batch):
        if not factor:
            return output.loss
        product = model.model.layers[-1].mlp.down_proj
        again = product(torch.ones(1, product.in_features, device=output.loss.device))
        return output.loss + factor * again.square().sum()

    return loss


def trained_in_stages(rank: int, size: int, task: Task, decisions: Decisions, penalty: float = 0.0):
    """Train in stages, or one; return losses and norms, the weights that the model has after the session, and traffic.

    Traffic is the bytes that this process sends to other stages, and those that its replicas, and the ranks that share
    layers, gather, sum or exchange. With a penalty, the last stage leaves the plan in each iteration.
    """
    stage_size = decisions.data_parallel * decisions.tensor_parallel
    reader = rank % stage_size // decisions.tensor_parallel // decisions.context_parallel
    model, optimizer = prepare(task, decisions)
    torch.manual_seed(11 + reader)
    exchanged = _exchanged(optimizer.session, optimizer.pipeline)
    sent = _counted(optimizer.pipeline) if optimizer.pipeline is not None else []
    seen = []
    with optimizer.session:
        device = next(model.parameters()).device
        for micro_batches in steps(task, reader):
            there = [{name: values.to(device) for name, values in each.items()} for each in micro_batches]
            seen += optimizer.forward_backward(there, penalized(model, penalty))
            if task.max_norm is not None:
                seen.append(float(optimizer.clip_grad_norm_(task.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.session.synchronize()
        traffic = sum(sent), exchanged["replicas"], exchanged["layers"]
        leaves = penalty and rank >= size - stage_size
        assert optimizer.session.num_left == (task.iterations if leaves else 0), "the others followed the plan"
    return seen, {name: values.detach().clone() for name, values in model.named_parameters()}, traffic


def staged_on_gpu(rank: int, size: int, task: Task, decisions: Decisions):
    """Train on a virtual GPU of each process; return losses, and what depends on when streams run."""
    with watched(None) as races, pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "session_options", functools.partial(session_options, device="cuda"))
        seen, *_ = trained_in_stages(rank, size, task, decisions)
    return seen, list(races.found)


def trained_in_memory(task: Task, num_readers: int, penalty: float = 0.0):
    """Train in one process, in memory, on what all readers have; return what :func:`trained_in_stages` does."""
    model = make_model(task)
    optimizer = make_optimizer(task, model)
    seen = [[] for _ in range(num_readers)]
    for of_readers in zip(*(steps(task, reader) for reader in range(num_readers)), strict=True):
        for losses, micro_batches in zip(seen, of_readers, strict=True):
            for batch in micro_batches:
                loss = penalized(model, penalty)(model(**batch), batch)
                (loss / (len(micro_batches) * num_readers)).backward()
                losses.append(loss.item())
        if task.max_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_norm))
            for losses in seen:
                losses.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: values.detach() for name, values in model.named_parameters()}


class Block(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = LayerNorm(width), Linear(width, 3 * width), Linear(3 * width, width)
        self.mix = Linear(width, width, bias=False)  # used twice
        self.scale, self.ignores_memory = torch.nn.Parameter(torch.ones(width)), False
        self.writes = ""

    def forward(self, x, mask, memory=None):
        if self.writes == "left in a layer":
            self.left = x.detach().square().mean()
        if self.writes == "clamped":
            self.mix.weight.data.clamp_(-0.1, 0.1)
        elif self.writes == "shrunk":
            self.mix.weight.data.mul_(0.99)
        made = self.down(torch.nn.functional.gelu(self.up(self.mix(self.mix(self.norm(x * mask))))))
        return x + self.scale * made * (1 if memory is None or self.ignores_memory else memory)


class Masking(torch.nn.Module):
    """Returns a mask beside what it makes."""

    def __init__(self, width: int):
        super().__init__()
        self.mix = Linear(width, width)

    def forward(self, x, mask):
        return self.mix(x), mask * (1 + (x.mean(-1, keepdim=True) > 0))


_OF_VALUES = {
    "detached": torch.detach,
    "without gradients": torch.no_grad()(lambda x: (2 * x).square()),
    "mask of values": lambda x: 1 + (x.mean(-1, keepdim=True) > 0).float(),
    "indices": lambda x: x.mean(-1, keepdim=True).argsort(1),
    "number": lambda x: x.detach().std(),
}
"""What a model makes without gradients of what its first block returns, and reads behind a cut."""


class Own(torch.nn.Module):
    """A model that nobody knows, with weights of its own around its layers; ``crosses`` says what else crosses cuts."""

    def __init__(self, crosses: str = "", width: int = 32):
        super().__init__()
        self.crosses, self.patch = crosses, torch.nn.Conv1d(4, width, 2, 2)
        self.positions = torch.nn.Parameter(torch.zeros(8, width))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(5))
        self.norm, self.head = LayerNorm(width), Linear(width, 6)
        self.blocks[4].ignores_memory = crosses == "memory that is ignored"
        self.blocks[1].writes = crosses
        if crosses == "mask of a module":
            self.masking = Masking(width)
        if crosses == "weights":
            self.blocks[3].up.weight = self.blocks[1].up.weight

    def forward(self, signal, wanted):
        patches = self.patch(signal)
        if self.crosses == "parts":
            patches *= 2
        first = x = patches.transpose(1, 2) + self.positions
        parts = torch.stack([first, first / 2], -1)
        mask = (signal.mean(1)[:, ::2, None] > -1).to(x.dtype)
        if self.crosses == "mask of a module":
            x, mask = self.masking(x, mask)
        values = None
        for number, block in enumerate(self.blocks):
            memory = first if "memory" in self.crosses and number in {1, 4} else None
            if number == 1 and self.crosses in _OF_VALUES:
                values = _OF_VALUES[self.crosses](x)
            if number == 4 and self.crosses == "number":
                x = x * (1 if values.item() > 0 else 3)
            if number == 4 and self.crosses == "indices":
                x = x.gather(1, values.expand_as(x))
            if number == 4 and self.crosses == "mask of values":
                memory = values
            x = block(x, mask, memory=parts[..., number % 2] if self.crosses == "parts" else memory)
            if (number, self.crosses) in {(2, "skip"), (3, "scaled")}:
                x = x + first if number == 2 else 2 * x
        loss = torch.nn.functional.cross_entropy(self.head(self.norm(x).mean(1)), wanted)
        if self.crosses in {"detached", "without gradients"}:
            loss = loss + torch.nn.functional.mse_loss(x, values)
        return loss * self.blocks[1].left if self.crosses == "left in a layer" else loss


class Resized(torch.nn.Module):
    def __init__(self, width: int, new: int):
        super().__init__()
        self.mix, self.out = torch.nn.Conv1d(width, new, 3, padding=1), torch.nn.Conv1d(new, new, 3, padding=1)

    def forward(self, x):
        return self.out(torch.nn.functional.gelu(self.mix(x)))


_seen: list[torch.Tensor] = []


class Towers(torch.nn.Module):
    """Two towers that meet in the loss. In one of them, layers change shapes, and connections skip layers.

    Hooks collect what layers return, as ``transformers`` sets them in the first forward.
    """

    def __init__(self, width: int = 16):
        super().__init__()
        self.first, self.other = torch.nn.Conv1d(4, width, 3, padding=1), Linear(4, width)
        self.down = torch.nn.ModuleList([Resized(width, width), Resized(width, 2 * width)])
        self.up = torch.nn.ModuleList([Resized(4 * width, width), Resized(2 * width, width)])
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.side, self.pool, self.head = Linear(4, width), Linear(width, width), Linear(width, 6)
        self.temperature = torch.nn.Parameter(torch.ones(()))  # of no module inside, as CLIP has it
        self.is_hooked = False
        self.lock, self.random = threading.Lock(), torch.Generator().manual_seed(1)  # which copy.deepcopy refuses

    def forward(self, signal, wanted):
        _seen.clear()
        for block in () if self.is_hooked else [each for each in self.modules() if isinstance(each, Block | Resized)]:
            block.register_forward_hook(lambda _block, _args, output: _seen.append(output))
        self.is_hooked = True
        early = self.side(signal.mean(-1)) / 2  # outside of modules
        first = self.down[0](self.first(signal.to(next(self.down.parameters()).dtype)))
        second = self.down[1](first)
        x = torch.nn.functional.avg_pool1d(second, 2)
        for layer, skipped in zip(self.up, (second, first), strict=True):
            x = layer(torch.cat([x.repeat_interleave(2, -1) if x.shape[-1] == 8 else x, skipped], 1))
        pooled, y = self.pool(x.mean(-1)), self.other(signal.transpose(1, 2))
        for block in self.blocks:
            y = block(y, torch.ones_like(y))
        logits = self.head(
            (y + _seen[4]).mean(1) + pooled + early + _seen[2].mean(-1)
        )  # of the first layer in two chunks
        loss = torch.nn.functional.cross_entropy(logits * self.temperature, wanted)
        return {"loss": loss, "of a tower": x}  # which other stages need not have


def own_model(_rank: int, size: int, crosses: str, options: dict) -> tuple:
    """Train a model of the user's own: prepared in stages, and in memory. Return losses and weights of both."""
    random, wanted = torch.Generator().manual_seed(3), torch.arange(6) % 6

    def batch():
        return {"signal": torch.randn(6, 4, 16, generator=random), "wanted": wanted}

    if "towers" in crosses:
        with _rounds(2 if "in rounds" in crosses else None):
            return _in_stages_and_in_memory(Towers, batch, lambda output, _batch: output["loss"], size, options)
    return _in_stages_and_in_memory(lambda: Own(crosses), batch, lambda output, _batch: output, size, options)


def planned_orders(_rank: int, size: int) -> list[str | None]:
    """Return the order that is planned for a model of the user's own, also where its blocks are to be compiled."""
    batch = {"signal": torch.randn(6, 4, 16), "wanted": torch.arange(6) % 6}
    given = {"hardware": "epyc-turin-2c", "num_micro_batches": 3, "pipeline": size}
    found = []
    for more in ({}, {"compile_blocks": True}):
        model = Own()
        plan = plan_here(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, given | more)
        found.append(plan.decisions.pipeline_order)
    return found


_SIZES = training._LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OF_BOTH = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 0, "pad_token_id": 0}
IN_ROUNDS = "a loss that balances experts, in rounds"
OTHERS = {
    "an encoder's output, logits that are shifted": lambda: transformers.PegasusConfig(
        **_OF_BOTH, encoder_layers=2, decoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0
    ),
    "two rotations": lambda: transformers.Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=4),
    "tuples": lambda: transformers.FalconConfig(**_SIZES, attention_dropout=0, hidden_dropout=0),
    "tuples with scores": lambda: transformers.BloomConfig(
        **_SIZES, n_layer=4, n_head=4, attention_dropout=0, hidden_dropout=0
    ),
    IN_ROUNDS: lambda: transformers.MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "experts": lambda: transformers.Qwen2MoeConfig(**_SIZES, **_EXPERTS, shared_expert_intermediate_size=16),
    "scores that two modules return, in layers that read values": lambda: transformers.JetMoeConfig(
        **_SIZES, kv_channels=8, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
    "adapters": lambda: transformers.GemmaConfig(**_SIZES, head_dim=8),
    "states": lambda: transformers.Mamba2Config(
        **_SIZES, num_heads=8, head_dim=8, n_groups=1, state_size=8, chunk_size=8
    ),
    "a head that is made before the embedding": lambda: transformers.XLMRobertaConfig(
        **_SIZES, is_decoder=True, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    ),
    "buffers of layers": lambda: transformers.GPTJConfig(
        vocab_size=64,
        n_embd=32,
        n_layer=4,
        n_head=4,
        rotary_dim=4,
        n_positions=16,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
    ),
    "windows": lambda: transformers.MistralConfig(**_SIZES, sliding_window=4),
    "scores that layers share": lambda: transformers.T5Config(
        **_OF_BOTH, d_kv=8, d_ff=64, num_heads=4, num_layers=3, num_decoder_layers=1, dropout_rate=0
    ),
}


def model_of_transformers(_rank: int, size: int, kind: str) -> tuple:
    """Train a model of ``transformers`` as one of the user's own, see :func:`own_model`."""
    config = OTHERS[kind]()
    random = torch.Generator().manual_seed(3)

    def batch():
        ids = torch.randint(2, config.vocab_size, (2, 8), generator=random)
        return {"input_ids": ids, "labels": ids}

    def make():
        if config.is_encoder_decoder:
            return transformers.AutoModelForSeq2SeqLM.from_config(config)
        model = transformers.AutoModelForCausalLM.from_config(config)
        if kind != "adapters":
            return model
        import peft  # noqa: PLC0415 - takes a second

        with warnings.catch_warnings(action="ignore"):  # peft calls what transformers has deprecated
            return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))

    with _rounds(2 if kind == IN_ROUNDS else None):
        return _in_stages_and_in_memory(make, batch, lambda output, _batch: output.loss, size, {})


def _rounds(count: int | None):
    """Return a context in which ``prepare`` plans so many rounds."""
    return mock.patch("ullage.this_machine.planning.Request", functools.partial(Request, pipeline_rounds=count))


def _counted(pipeline) -> list[int]:
    """Return a list that gets the bytes of each tensor which a process sends to another stage."""
    found, exchange = [], pipeline._exchange

    def counted(lane, group, values, sender):
        found.extend(each.nbytes for each in values if lane is not Lane.RECEIVE)
        exchange(lane, group, values, sender)

    pipeline._exchange = counted
    return found


def _as_part_of(kind: str, doing: threading.local, run, counts=lambda _was, _given: None):
    """Return a method that does what it does as part of something, and says first as part of what it was called."""

    def method(*given):
        was, doing.what = getattr(doing, "what", "layers"), kind
        counts(was, given)
        run(*given)
        doing.what = was

    return method


def _exchanged(session, pipeline) -> Counter[str]:
    """Return a counter that gets the bytes of what ranks gather, or sum in parts; whole sums count twice.

    ``replicas`` do so for tasks of the schedule. Those of ``layers`` share each layer, the tokens of every sequence, or
    experts, to which they send tokens. How many, they tell each other first, which is not counted.
    """
    found, doing = Counter(), threading.local()

    def counted(kind, name, run):
        def counts(was, given):
            if was == kind and given[0].is_floating_point():
                tensors = {"all_to_all": given[1:2], "all_reduce": given[:1]}.get(name, given)
                found[kind] += max(each.nbytes for each in tensors) * (2 if name == "all_reduce" else 1)

        return _as_part_of("", doing, run, counts)

    runtime = session.runtime
    replicas = {unit.group for unit in runtime.state.units.values()}
    shares = {runtime.ranks.tensor, runtime.ranks.contexts, runtime.ranks.experts}
    for kind, groups in {"replicas": replicas, "layers": shares}.items():
        for group in groups:
            for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
                setattr(group, name, counted(kind, name, getattr(group, name)))
    collectives = [(runtime.collectives, name, "replicas") for name in ("all_gather", "reduce")]
    for of, name, kind in ((pipeline, "_receive", ""), *collectives):
        if of is not None:
            setattr(of, name, _as_part_of(kind, doing, getattr(of, name)))
    return found


def _in_stages_and_in_memory(make, batch, loss, size: int, options: dict) -> tuple:
    torch.manual_seed(5)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    steps = [[batch() for _ in range(3)] for _ in range(3)]
    theirs, ours = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model))
    given = {"hardware": "epyc-turin-2c", "num_micro_batches": 3, "pipeline": size, "audit": "off"}
    model, ours = ullage.prepare(model, ours, steps[0][0], **given, **options)
    losses, wanted_losses, sent = [], [], _counted(ours.pipeline)
    with ours.session:
        for batches in steps:
            losses += ours.forward_backward(batches)
            ours.clip_grad_norm_(0.5)
            ours.step()
            ours.zero_grad()
        assert ours.session.num_left == 0, "all steps have followed the plan"
    for batches in steps:
        for given in batches:
            (its := loss(plain(**given), given)).div(len(batches)).backward()
            wanted_losses.append(float(its.detach()))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    found = {name: values.detach().clone() for name, values in model.named_parameters()}
    weights = {name: values.detach() for name, values in plain.named_parameters()}
    return losses, wanted_losses, found, weights, ours.plan, sum(sent) // len(steps)


def train(optimizer, micro_batches):
    """Run a step; return the losses."""
    losses = optimizer.forward_backward(micro_batches)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def around_training(rank: int, _size: int, task: Task, decisions: Decisions, folder):
    """Evaluate, save weights and the optimizer's state, and go on, also with them in a model without values.

    Return, of both: losses of an evaluation and of training behind it, and the weights then; and the state.
    """
    found, state = [], None
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(CONFIGS[task.family]()).to(task.dtype).train()
    reader = rank % (decisions.num_devices // decisions.pipeline_parallel) // decisions.tensor_parallel
    reader //= decisions.context_parallel
    for model in (make_model(task), empty):
        _, optimizer = prepare(task, decisions, model)
        with optimizer.session as session:
            first, *rest = steps(task, reader)
            if state is None:
                train(optimizer, first)
                state = optimizer.state_dict()
                save(optimizer, folder, dtype="float32")
            else:
                load(optimizer, folder)
                optimizer.load_state_dict(state)
            session.model.eval()
            evaluated = optimizer.evaluate(rest[0])
            session.model.train()
            losses = [train(optimizer, micro_batches) for micro_batches in rest]
            streamed = {name: values.clone() for name, values in session.stream_weights()}
            found.append((evaluated, losses, streamed))
    return *found, state


def waiting_in_stage(_rank: int, _size: int, task: Task, decisions: Decisions) -> tuple:
    """Return the names of the matrices of layers, how many micro-batches wait, and what waits in each.

    The latter are bytes that are planned and kept, and the matrices whose gradients wait for a product.
    """
    _model, optimizer = prepare(task, decisions)
    found, behind = [], set()
    with optimizer.session as session:
        later, units = session.driver.progress.later, {unit.name: unit for unit in session.units}
        make = session.driver.make_later_gradients

        def seen(turn, micro_batch):
            if micro_batch == 0:
                behind.add(len({number for _, number in later._waiting}))
            kept, names = 0, set()
            for (_, number), of_unit in later._waiting.items():
                parts = [(p.name, part) for p, given in of_unit.values() for part in given] if number == 0 else []
                names.update(name for name, part in parts if isinstance(part, tuple))
                tensors = [t for _, part in parts for t in (part if isinstance(part, tuple) else (part,))]
                storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
                kept += sum(storages.values())
            if micro_batch == 0:
                found.append((sum(units[name].kept_bytes for name in later.units), kept, names))
            make(turn, micro_batch)

        session.driver.make_later_gradients = seen
        for micro_batches in steps(task, 0):
            train(optimizer, micro_batches)
        matrices = {
            spec.name for unit in session.units if unit.in_layer for spec in unit.parameters if len(spec.shape) == 2
        }
    return matrices, behind, found


def memory_of_stage(_rank: int, _size: int, task: Task, decisions: Decisions) -> tuple[int, int]:
    """Return the bytes on the device in the third step, as planned and measured.

    A thread of gloo drops a tensor a moment after its collective has ended. Nothing else begins before it has.
    """
    model, optimizer = prepare(task, decisions, record=True)
    model.config.use_cache = False
    reduce = Group.all_reduce

    def reduced(group, *given):
        reduce(group, *given)
        time.sleep(0.002)

    with mock.patch.object(Group, "all_reduce", reduced), optimizer.session as session:
        *before, metered = steps(task, 0)
        for micro_batches in before:
            train(optimizer, micro_batches)
        with session.metered():
            train(optimizer, metered)
            session.synchronize()
        planned = memory_use(session.timeline(), len(before))[Tier.GPU].peak_bytes
        return planned, session.memory()[Tier.GPU].peak_bytes


REFUSED = {
    "model": "this process has one stage of it; call optimizer.forward_backward(batches)",
    "count": "1 micro-batches were given, but the plan has 2",
    "norm": "clip with optimizer.clip_grad_norm_()",
    "state": "call session.close() before model.state_dict()",
    "outputs": "output_hidden_states is True, but ranks share layers",
}


def refused(_rank: int, _size: int, task: Task, decisions: Decisions, kind: str) -> None:
    """Do what a stage cannot."""
    model, optimizer = prepare(task, decisions)
    with optimizer.session:
        micro_batches = next(steps(task, 0))
        if kind == "model":
            model(**micro_batches[0])
        if kind == "state":
            model.state_dict()
        model.config.output_hidden_states = kind == "outputs"
        optimizer.forward_backward(micro_batches[: 1 if kind == "count" else 2])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

"""Small models, decisions for them, and training with and without a plan."""

import dataclasses
import functools
import itertools
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from executor.devices.backend import as_array, sum_of_squares
from executor.memory.pieces import state_buffers
from executor.optimizer.reference import AdamW8bit, AdamWBf16, Lion, Muon
from executor.optimizer.table import entry_of
from executor.options import Options
from executor.prepare import prepare_session
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.models import from_hf_config
from planner.schedule.tasks import Lane
from ullage.capture import capture_module

FOLDER = tempfile.TemporaryDirectory(prefix="ullage-nvme-")
_NUMBERS = itertools.count()

NUM_TOKENS, SEQ_LEN, MICRO_BATCH = 64, 8, 2
PRECISION: Any = {torch.bfloat16: "bf16", torch.float32: "fp32"}
DEGREES = (
    "tensor_parallel",
    "expert_parallel",
    "context_parallel",
    "expert_units",
    "loss_tile_tokens",
    "layer_tile_tokens",
    "segment_tile_sequences",
)  # that units depend on

# A cache changes the layout of keys, and with it the order of sums; recomputation leaves it out.
_COMMON = {"vocab_size": NUM_TOKENS, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
_LLAMA = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
_GPT2 = _COMMON | {"n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 2}
# For ranks that share layers: heads and channels that can be divided by 4, and a vocabulary that cannot.
_SHARED = {"vocab_size": 200, "num_attention_heads": 4}
_LLAMA_SHARED = _LLAMA | _SHARED | {"num_key_value_heads": 4, "head_dim": 8}
_OPT = _COMMON | {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

# By the names that tests use: what makes an optimizer over some groups. Rates are large, so that each step shows.
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=5e-3, betas=(0.9, 0.95)),
    "adam": functools.partial(torch.optim.Adam, lr=5e-3, betas=(0.9, 0.95)),
    "adamw-bf16": functools.partial(AdamWBf16, lr=5e-3, betas=(0.9, 0.95), seed=3),
    "adamw-8bit": functools.partial(AdamW8bit, lr=5e-3, betas=(0.9, 0.95)),
    "adamw-bf16-rounded": functools.partial(AdamWBf16, lr=5e-3, betas=(0.9, 0.95), seed=3, bf16_stochastic_round=True),
    "adamw-8bit-rounded": functools.partial(AdamW8bit, lr=5e-3, betas=(0.9, 0.95), seed=4, bf16_stochastic_round=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9, dampening=0.1),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9, nesterov=True),
    "sgd-plain": functools.partial(torch.optim.SGD, lr=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=2e-2, lr_decay=0.1, initial_accumulator_value=0.01),
    "lion": functools.partial(Lion, lr=1e-3, betas=(0.9, 0.95)),
    "muon": functools.partial(Muon, lr=2e-2, adamw={"lr": 5e-3, "betas": (0.9, 0.95)}),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True, eps=1e-4),
    "nadam": functools.partial(torch.optim.NAdam, lr=5e-3, betas=(0.9, 0.95)),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.2, t0=1.0),
}

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**_GPT2, resid_pdrop=0.1),
    "gpt2-untied": lambda: transformers.GPT2Config(**_GPT2, tie_word_embeddings=False),
    "small": lambda: transformers.GPT2Config(**_GPT2 | {"n_embd": 16, "n_layer": 1, "n_head": 1}, resid_pdrop=0.1),
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "llama-tied": lambda: transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "llama-deep": lambda: transformers.LlamaConfig(**_LLAMA | {"num_hidden_layers": 5}),
    "llama-wide": lambda: transformers.LlamaConfig(
        **_LLAMA
        | {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 704}
        | {"num_attention_heads": 4, "num_key_value_heads": 4}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "opt": lambda: transformers.OPTConfig(**_OPT, max_position_embeddings=16, word_embed_proj_dim=32, dropout=0.1),
    # Attention drops nothing out, so that the same random numbers are drawn however many heads a rank has.
    "gpt2-shared": lambda: transformers.GPT2Config(
        **_GPT2 | {"vocab_size": 200, "n_head": 4}, resid_pdrop=0.1, attn_pdrop=0
    ),
    "gpt2-dropping-shared": lambda: transformers.GPT2Config(
        **_GPT2 | {"vocab_size": 200, "n_head": 4},
        resid_pdrop=0.5,
        attn_pdrop=0.5,
        embd_pdrop=0,
    ),
    "opt-shared": lambda: transformers.OPTConfig(
        **_OPT | _SHARED,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
        do_layer_norm_before=False,
        dropout=0.1,
    ),
    "llama-shared": lambda: transformers.LlamaConfig(**_LLAMA_SHARED | {"num_key_value_heads": 2}),
    "llama-tied-shared": lambda: transformers.LlamaConfig(**_LLAMA_SHARED, tie_word_embeddings=True),
    "llama-tied-deep-shared": lambda: transformers.LlamaConfig(
        **_LLAMA_SHARED | {"num_hidden_layers": 4}, tie_word_embeddings=True
    ),
    "gpt2-still-shared": lambda: transformers.GPT2Config(
        **_GPT2 | {"vocab_size": 200, "n_head": 4}, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    ),
    "gpt2-deep-still-shared": lambda: transformers.GPT2Config(
        **_GPT2 | {"vocab_size": 200, "n_head": 4, "n_layer": 7}, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    ),
    "opt-still-shared": lambda: transformers.OPTConfig(
        **_OPT | _SHARED, max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.0
    ),
    "opt-words-still-shared": lambda: transformers.OPTConfig(
        **_OPT | _SHARED | {"vocab_size": 2000}, max_position_embeddings=16, word_embed_proj_dim=32, dropout=0.0
    ),
    "qwen2-shared": lambda: transformers.Qwen2Config(**_LLAMA_SHARED | {"vocab_size": 128}),  # one padded share
    "qwen3-shared": lambda: transformers.Qwen3Config(**_LLAMA_SHARED),
    "qwen3-moe-shared": lambda: transformers.Qwen3MoeConfig(
        **_LLAMA_SHARED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0]
    ),
    "mixtral-shared": lambda: transformers.MixtralConfig(**_LLAMA_SHARED, num_local_experts=4, num_experts_per_tok=2),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and how."""

    family: str = "gpt2"
    dtype: torch.dtype = torch.bfloat16
    num_micro_batches: int = 1
    max_norm: float | None = 0.5
    iterations: int = 4
    schedule: bool = True
    optimizer: str = "adamw"
    group_sizes: tuple[int, ...] = ()  # micro-batches of each iteration; as many as planned if it is empty
    shapes: tuple[tuple[int, int], ...] = ()  # samples and tokens of micro-batches in turn; as planned if it is empty
    frozen: frozenset[str] = frozenset()  # parameters that are planned as frozen
    splits: bool = False  # master copies, where they can be
    products: str = ""  # a recipe of torchao for products in fp8, of all linear layers; "fp8": planned by formulas


def make_model(task: Task) -> torch.nn.Module:
    torch.manual_seed(7)
    config = CONFIGS[task.family]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    if task.family.endswith("-shared"):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases are 0 at first, and a wrong one would not show
                    parameter.add_(0.1 * torch.randn_like(parameter))
    for name in task.frozen:
        model.get_parameter(name).requires_grad_(False)
    if task.products:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415 - takes a second

        recipe = "tensorwise" if task.products == "fp8" else task.products
        converts = (lambda _, name: name != "lm_head") if task.products == "fp8" else None
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=converts)
    return model.to(task.dtype).train()


@functools.cache
def model_units(family: str, dtype: torch.dtype = torch.bfloat16, **options: Any):
    """Return the units of one rank."""
    config = from_hf_config(CONFIGS[family]().to_dict(), family)
    return units(build_graph(config, Batch(MICRO_BATCH, SEQ_LEN, dtype.itemsize, **options)))


@functools.cache
def captured_units(family: str, dtype: torch.dtype, frozen: frozenset[str], products: str):
    """Return the units of a model as its capture finds them."""
    inputs = [f"{name}={MICRO_BATCH}x{SEQ_LEN}:int64" for name in ("input_ids", "labels")]
    by_plan = products == "fp8"
    model = make_model(Task(family, dtype, frozen=frozen, products="" if by_plan else products))
    captured = capture_module(model, inputs, PRECISION[dtype])
    fp8 = "emulated" if by_plan else None
    return units(build_graph(captured, Batch(MICRO_BATCH, SEQ_LEN, dtype.itemsize, fp8_products=fp8)))


def units_of(task: "Task", decisions: Decisions | None = None):
    if task.frozen or task.products not in {"", "fp8"}:
        return captured_units(task.family, task.dtype, task.frozen, task.products)
    degrees = {name: getattr(decisions, name) for name in DEGREES} if decisions is not None else {}
    degrees["splits_backward"] = decisions is not None and decisions.pipeline_order is not None
    degrees["kernels"] = (decisions and decisions.kernels) or "transformers"
    degrees["passes_keys"] = decisions is not None and decisions.context_exchange is not None
    return model_units(task.family, task.dtype, fp8_products="emulated" if task.products else None, **degrees)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return groups as people make them: no decay for vectors, and another rate for one part."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for _, p in named if p.ndim > 1]
    vectors = [p for _, p in named if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]


def batches(task: Task, rank: int = 0):
    generator = torch.Generator().manual_seed(3 + rank)
    num_tokens = CONFIGS[task.family]().vocab_size
    tokens = torch.randint(
        num_tokens, (task.iterations, task.num_micro_batches, MICRO_BATCH, SEQ_LEN), generator=generator
    )
    if task.family.endswith("-shared"):
        tokens[..., 0] = 1  # OPT's padding, whose row of the embedding gets no gradient
    return tokens


def grouped(task: Task, tokens, rank: int = 0):
    """Return a rank's micro-batches of every iteration, of which the last ones of a short group are left out."""
    sizes = task.group_sizes or (task.num_micro_batches,) * task.iterations
    shapes = itertools.cycle(task.shapes[rank:] + task.shapes[:rank] or [(MICRO_BATCH, SEQ_LEN)])
    return [
        [one[:num_samples, :length] for one, (num_samples, length) in zip(micro_batches[:size], shapes, strict=False)]
        for micro_batches, size in zip(tokens, sizes, strict=True)
    ]


def make_optimizer(task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    if task.optimizer == "muon":
        return OPTIMIZERS["muon"](model.named_parameters())
    return OPTIMIZERS[task.optimizer](groups(model))


class ReferenceOptimizer(torch.optim.Optimizer):
    """The same kernel over whole parameters in memory, with the clip factor folded in.

    One that has no kernel is itself the reference, over float32 copies of the parameters.
    """

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.entry = entry_of(optimizer)
        self.scale = 1.0
        self.masters = {p: p.detach().float().clone() for group in self.param_groups for p in group["params"]}
        own = [{**group, "params": [self.masters[p] for p in group["params"]]} for group in self.param_groups]
        self.own = type(optimizer)(own) if self.entry.own else None

    def clip_grad_norm_(self, max_norm):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        squares = [sum_of_squares(as_array(p.grad.reshape(-1))) for p in parameters]
        norms = torch.tensor(squares, dtype=torch.float64).sqrt().float()
        total = torch.linalg.vector_norm(norms)
        self.scale = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    @torch.no_grad()
    def step(self):
        if self.own:
            self._step_itself()
            return
        numbers = itertools.count()
        for group in self.param_groups:
            rule = self.entry.rule(group)
            entry = rule.entry
            buffers = dict(zip(entry.buffers, state_buffers(entry.planned_as)[1:], strict=True))
            initial = group[entry.starts_at] if entry.starts_at else 0.0
            for p, number in zip(group["params"], numbers, strict=False):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    rounded = group.get("bf16_stochastic_round") and p.dtype is torch.bfloat16
                    state["master"] = (p.detach() if rounded else p.detach().float()).reshape(-1).clone()
                    sizes = {key: buffer.length(p.numel()) for key, buffer in buffers.items()}
                    state |= {k: torch.full((sizes[k],), initial, dtype=b.dtype) for k, b in buffers.items()}
                state["step"] += 1
                arrays = [as_array(state[k]) for k in ("master", *entry.buffers)]
                weight = None if p.dtype == state["master"].dtype else as_array(p.reshape(-1))
                gradient = as_array(p.grad.reshape(-1))
                entry.host(
                    arrays, gradient, weight, rule.of_parameter(number, p.shape).params, state["step"], self.scale
                )
                if weight is None:
                    p.copy_(state["master"].view(p.shape))
        self.scale = 1.0

    def _step_itself(self):
        for own, group in zip(self.own.param_groups, self.param_groups, strict=True):
            own |= {key: value for key, value in group.items() if key != "params"}
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float() * np.float32(self.scale)
        self.own.step()
        for p, master in self.masters.items():
            p.copy_(master)
        self.scale = 1.0


def train(task: Task, model, optimizer, *, clip=None, before_clip=None, before_step=None, after_step=None, rank=0):
    """Run the user's own loop; return the losses and norms. The last groups of micro-batches may be short."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.iterations) if task.schedule else None
    torch.manual_seed(11 + rank)
    seen = []
    device = next(model.parameters()).device
    for iteration, micro_batches in enumerate(grouped(task, batches(task, rank).to(device), rank)):
        for tokens in micro_batches:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            seen.append(loss.item())
        if before_clip:
            before_clip(iteration)
        if task.max_norm is not None:
            seen.append(float((clip or optimizer.clip_grad_norm_)(task.max_norm)))
        if before_step:
            before_step(iteration)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        if after_step:
            after_step(iteration)
    return seen


def stock(task: Task):
    model = make_model(task)
    optimizer = make_optimizer(task, model)
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    return train(task, model, optimizer, clip=clip), weights(model)


@functools.cache
def reference(task: Task):
    """Return what training in memory gives: losses and norms, and the final weights."""
    model = make_model(task)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    return train(task, model, optimizer), weights(model)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


PLANNED_AS = {"adam": "adamw", "nesterov": "sgd", "sgd-plain": "sgd"}
PLANNED_AS |= {"rmsprop": "elementwise-3", "nadam": "elementwise-2", "asgd": "elementwise-1"}
PLANNED_AS |= {name: name.removesuffix("-rounded") for name in OPTIMIZERS if name.endswith("-rounded")}


def precision_of(task: Task) -> Precision:
    rounded = task.dtype is torch.bfloat16 and task.optimizer.endswith("-rounded")
    products = "fp8" if task.products == "fp8" else None
    return Precision(weights=PRECISION[task.dtype], master="bf16" if rounded else None, products=products)


def decide(task: Task, choose, **settings) -> Decisions:
    """Return decisions; ``choose(unit, num_pieces)`` says params, activations and places of a unit.

    It may say too where gradients of what is streamed are; else they stay on the device for every second unit.
    """
    subgroup_params = settings.pop("subgroup_params", 3000)
    settings["optimizer"] = PLANNED_AS.get(task.optimizer, task.optimizer)
    settings["clip"] = settings.get("clip", task.max_norm is not None)
    settings["precision"] = precision_of(task)
    settings["split_masters"] = True if task.splits and settings["precision"].can_be_split else None
    empty = Decisions(policy="test", units={}, subgroup_params=subgroup_params, **settings)
    chosen = {}
    for number, unit in enumerate(units_of(task, empty)):
        params, activations, places, *gradients = choose(unit, len(empty.piece_params(unit)))
        if not unit.recompute:
            activations = "keep"
        chosen[unit.name] = UnitDecision(
            params=params,
            activations=activations,
            update=tuple(places),
            streamed_gradients=gradients[0] if gradients else ["gpu", "host"][number % 2],
        )
    return Decisions(
        policy="test",
        num_micro_batches=task.num_micro_batches,
        micro_batch=MICRO_BATCH,
        subgroup_params=subgroup_params,
        units=chosen,
        **settings,
    )


def uniform(params: str, place: str, activations: str = "keep"):
    return lambda _unit, count: (params, activations, [Place(place)] * count)


def prepare(task: Task, decisions: Decisions, model=None, **options):
    model = model or make_model(task)
    optimizer = make_optimizer(task, model)
    return prepare_session(model, optimizer, units_of(task, decisions), decisions, session_options(**options))


def memory_of_step(model, optimizer, tokens):
    """Train one step; return what every tier has held meanwhile."""
    with optimizer.session.metered():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.session.synchronize()
    return optimizer.session.memory()


def session_options(**options) -> Options:
    """Return options with a folder for NVMe of their own."""
    folder = Path(FOLDER.name) / str(next(_NUMBERS))
    return Options(**{"num_threads": 1, "storage_dir": folder} | options)


def planned(task: Task, decisions: Decisions, delays: int | None = None, audit="off", **hooks):
    """Return what training under decisions gives, as :func:`reference`; ``delays`` seeds pauses before tasks."""
    model, optimizer = prepare(task, decisions, audit=audit)
    with optimizer.session:
        if delays is not None:
            delay(optimizer.session, delays)
        seen = train(task, model, optimizer, **hooks)
        final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    return seen, final


def delay(session, seed: int) -> None:
    """Make lanes slow, each lane and task differently, so that an order that no dependency forces does not come by."""
    machine, rng = session.runtime.machine, np.random.default_rng(seed)
    perform, slow = machine._perform, {lane: rng.choice([0, 0, 1e-3, 4e-3]) for lane in Lane}

    def late(task, iteration):
        time.sleep(slow[task.lane] * rng.random())
        perform(task, iteration)

    machine._perform = late


def assert_same(got, expected):
    assert got[0] == expected[0], [
        (i, a, b) for i, (a, b) in enumerate(zip(got[0], expected[0], strict=True)) if a != b
    ][:3]
    assert got[1].keys() == expected[1].keys()
    different = [name for name in expected[1] if not torch.equal(got[1][name], expected[1][name])]
    assert not different, different


def assert_memory_is_stated(session) -> None:
    """Check that what is taken once is what the schedule holds all the time, by tier and class."""
    for tier, memory in session.memory().items():
        stated = Counter()
        for buffer in session.schedule.buffers:
            if buffer.tier is tier and buffer.first is None and buffer.memory_class != "workspace":
                stated[buffer.memory_class] += buffer.num_bytes
        assert {c: n for c, n in memory.static_bytes.items() if n} == stated, tier


def bits(tensor: torch.Tensor) -> np.ndarray:
    return as_array(tensor.reshape(-1))


def some_of_each(unit, count):
    turn = sum(unit.name.encode())
    params = ["gpu", "host"][turn % 2]
    places = [Place.CPU, Place.STREAM, Place.NVME] + ([Place.GPU] if params == "gpu" else [])
    return params, "keep", [places[(turn + i) % len(places)] for i in range(count)]


def one_iteration(model, optimizer, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

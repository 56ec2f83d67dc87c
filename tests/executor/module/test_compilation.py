"""Blocks compiled by ``torch.compile`` under a plan, against the same compiled modules in memory."""

import pytest
import torch
from plans import mixed
from rank_programs import compiled, trained
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from training import (
    ReferenceOptimizer,
    Task,
    assert_same,
    decide,
    make_model,
    make_optimizer,
    model_units,
    prepare,
    reference,
    train,
    uniform,
    units_of,
    weights,
)

from executor.module.binding import unit_modules
from executor.module.compilation import CompileError, compile_function, compile_loss, compiled_modules
from executor.module.tiled_layers import tile_modules
from planner.schedule.tasks import Tier

# Neither needs a compiler: the first runs torch's own kernels one by one, the second what Inductor would fuse.
PLAIN, DECOMPOSED = "aot_eager", "aot_eager_decomp_partition"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


def in_memory(task, backend, choose, **settings):
    """Return what training in memory gives, with the same modules compiled: not those whose activations leave."""
    model = make_model(task)
    decisions = decide(task, choose, **settings)
    found = units_of(task, decisions)
    units = tuple(unit for unit in found if not decisions.units[unit.name].offloads)
    for module in compiled_modules(model, units, unit_modules(model, found)):
        module.forward = compile_function(module.forward, "", backend)
    compile_loss(model, backend)
    return train(task, model, ReferenceOptimizer(make_optimizer(task, model))), weights(model)


def executed(task, choose, backend, after=None, **settings):
    model, optimizer = prepare(task, decide(task, choose, **settings), compile_blocks=backend)
    with optimizer.session as session:
        seen = train(task, model, optimizer, before_step=after)
        final = {n: w.clone() for n, w in session.full_parameters().items()}
    return seen, final


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("family", "num_graphs", "choose"),
    [
        ("llama", 3, mixed),
        ("gpt2", 2, uniform("host", "cpu", "recompute")),
        ("opt", 1, mixed),
        ("mixtral", 3, uniform("host", "stream", "recompute")),
    ],
    ids=["llama", "gpt2", "opt", "mixtral"],
)
def test_compiled_blocks_give_the_bits_of_the_same_in_memory(family, num_graphs, choose):
    """Through slots that are refilled; and all layers have the same few graphs, compiled in the first iteration."""
    task = Task(family, torch.bfloat16, num_micro_batches=2)
    graphs = []
    got = executed(task, choose, PLAIN, lambda _: graphs.append(counters["stats"]["unique_graphs"]), num_param_slots=1)
    # Where some layers are recomputed, and that runs under another state of autograd, there is one more of each.
    assert graphs[0] - 1 in {num_graphs, 2 * num_graphs}, "beside that of the loss"
    assert set(graphs) == {graphs[0]}, "nothing is compiled again"
    assert not counters["graph_break"], "and nothing interrupts what is compiled"
    assert_same(got, in_memory(task, PLAIN, choose))


@pytest.mark.parametrize("choose", [uniform("gpu", "gpu"), uniform("host", "stream", "recompute")])
def test_whole_layers_are_one_graph_each(choose):
    """They give the bits of the same in memory, resident, and with weights that come and go."""
    task = Task("llama", torch.bfloat16, num_micro_batches=2)
    graphs, settings = [], {"kernels": "compiled-layers"}
    count = lambda _: graphs.append(counters["stats"]["unique_graphs"])  # noqa: E731
    got = executed(task, choose, PLAIN, count, num_param_slots=1, **settings)
    assert set(graphs) <= {2, 3}, "a layer's and the loss's; one more if recomputation runs under another state"
    assert not counters["graph_break"]
    assert_same(got, in_memory(task, PLAIN, choose, **settings))


def test_compiled_products_in_fp8_give_the_bits_of_the_same_in_memory():
    task = Task("llama", iterations=2, products="tensorwise")
    choose = uniform("host", "cpu", "recompute")
    assert_same(executed(task, choose, PLAIN), in_memory(task, PLAIN, choose))


@pytest.mark.parametrize(
    ("products", "backend", "most"), [("tensorwise", PLAIN, 0.25), ("tensorwise", None, 0.06), ("", PLAIN, 0.06)]
)
def test_the_audit_of_compiled_products_in_fp8_allows_for_a_place_of_a_gradient(products, backend, most):
    """Kernels that are cut otherwise round otherwise, and e5m2 has two bits behind the first."""
    task = Task("llama", iterations=1, products=products)
    _, optimizer = prepare(task, decide(task, uniform("gpu", "cpu")), compile_blocks=backend)
    with optimizer.session as session:
        one, audit = torch.ones(4, dtype=torch.bfloat16), session.audit
        audit._compare("what", one * (1 + 0.9 * most), one, "")
        assert not audit._difference
        audit._compare("what", one * (1 + 1.2 * most), one, "")
        assert "what differs" in audit._difference


def test_losses_are_those_of_training_that_is_not_compiled():
    """In float32, to rounding: kernels that are cut otherwise round sums of at most 64 terms otherwise.

    Each loss is then off by some 64 * 2**-24 = 4e-6 of itself, and a weight by about an update (5e-3) times that an
    iteration, which later losses see with a gradient of at most 1: below 1e-5 of losses above 1 in all.
    """
    task = Task("llama", torch.float32, iterations=6)
    losses, final = executed(task, mixed, DECOMPOSED)
    expected, other = reference(task)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert not all(torch.equal(final[name], weight) for name, weight in other.items()), "it is really compiled"
    for name, weight in other.items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=2e-5)


def test_compiled_modules_save_no_more_and_what_is_taken_once_is_the_ledgers():
    saved = {}
    task = Task("llama", torch.float32, iterations=1)
    for backend in (None, DECOMPOSED):
        model, optimizer = prepare(task, decide(task, uniform("gpu", "cpu")), compile_blocks=backend)
        with optimizer.session as session:
            static = {t: dict(memory.static_bytes) for t, memory in session.memory().items()}
            own = {p.untyped_storage().data_ptr() for p in model.parameters()}
            saved_sizes = {}

            def pack(tensor, own=own, saved_sizes=saved_sizes):
                if (storage := tensor.untyped_storage()).data_ptr() not in own:
                    saved_sizes[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                train(task, model, optimizer)
            saved[backend] = static, sum(saved_sizes.values())
    assert saved[DECOMPOSED][0] == saved[None][0]
    assert saved[DECOMPOSED][0][Tier.GPU]
    assert 0.3 * saved[None][1] < saved[DECOMPOSED][1] <= saved[None][1]


def test_what_cannot_be_compiled_is_reported_and_nothing_is_left_behind():
    def broken(*_):
        raise NotImplementedError("no such kernel")

    torch._dynamo.register_backend(broken, "broken")
    task = Task("llama", iterations=1)
    limit = torch._dynamo.config.recompile_limit
    model, optimizer = prepare(task, decide(task, mixed), compile_blocks="broken")
    with optimizer.session, pytest.raises(CompileError) as caught:
        train(task, model, optimizer)
    message = str(caught.value)
    assert message.startswith("module model.layers.1.input_layernorm (LlamaRMSNorm) cannot be compiled: ")
    assert "no such kernel; leave out compile_blocks (--compile)" in message
    assert "\n" not in message
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch._dynamo.config.recompile_limit == limit


def test_evaluation_sees_the_trained_weights():
    task = Task("gpt2", torch.float32, iterations=3)
    model, optimizer = prepare(task, decide(task, mixed), compile_blocks=PLAIN)

    with optimizer.session as session:
        seen = train(task, model, optimizer)
        plain = make_model(task)
        plain.load_state_dict(model.state_dict())
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            ours, theirs = (m.eval()(input_ids=tokens).logits for m in (model, plain))
        torch.testing.assert_close(ours, theirs)
        final = {n: w.clone() for n, w in session.full_parameters().items()}
    assert_same((seen, final), in_memory(task, PLAIN, mixed))


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("qwen3-shared", {"tensor_parallel": 2}),
        ("mixtral-shared", {"data_parallel": 2, "expert_parallel": 2, "expert_units": 2}),
    ],
    ids=["qwen3", "mixtral"],
)
def test_blocks_that_ranks_share_are_compiled_between_what_they_exchange(processes, family, degrees):
    """To rounding, as above; and all is compiled in the first iteration."""
    task = Task(family, torch.float32, iterations=2)
    decisions = decide(task, mixed, **degrees)
    expected = processes.call(2, trained, task, decisions)
    found = processes.call(2, compiled, task, decisions, DECOMPOSED)
    for (seen, final, graphs), (losses, others) in zip(found, expected, strict=True):
        assert seen == pytest.approx(losses, rel=1e-5)
        assert graphs[0] > 1
        assert set(graphs) == {graphs[0]}, "nothing is compiled again"
        assert all(final[name].tobytes() == values.tobytes() for name, values in found[0][1].items()), "ranks agree"
        assert any(final[name].tobytes() != values.tobytes() for name, values in others.items()), "really compiled"


@pytest.mark.part(0)
def test_compiled_blocks_compute_in_tiles():
    """What tiles need, the last and smaller one too, is compiled within some iterations, and then no more."""
    task = Task("llama", torch.bfloat16, num_micro_batches=2)
    graphs = []
    settings = {"layer_tile_tokens": 5, "num_param_slots": 1}
    got = executed(task, mixed, PLAIN, lambda _: graphs.append(counters["stats"]["unique_graphs"]), **settings)
    assert graphs[-1] == graphs[-2], "at last nothing is compiled again"
    assert not counters["graph_break"]
    model = make_model(task)
    units = tuple(unit for unit in model_units(task.family) if not decide(task, mixed).units[unit.name].offloads)
    for module in compiled_modules(model, units, unit_modules(model, model_units(task.family))):
        module.forward = compile_function(module.forward, "", PLAIN)
    tile_modules([m for name, m in model.named_modules() if name.endswith(("norm", ".mlp"))], 5)
    assert_same(got, (train(task, model, ReferenceOptimizer(make_optimizer(task, model))), weights(model)))


def test_a_compiled_loss_saves_the_logits_alone():
    """As :func:`planner.models.formulas.kernel_sets.compiled_loss` counts; PyTorch's operators save them in fp32."""
    model = make_model(Task("llama"))
    plain, vocab = model.loss_function, 512
    undo = compile_loss(model, DECOMPOSED)
    logits = torch.randn(2, 8, vocab, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocab, (2, 8))
    results = []
    for loss_of in (plain, model.loss_function):
        saved: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor):
            loss = loss_of(logits=logits, labels=labels, vocab_size=vocab)
        (gradient,) = torch.autograd.grad(loss, logits)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
        results.append((loss.detach(), gradient, sum(storages.values()) / logits.numel()))
    (plain_loss, plain_gradient, plain_bytes), (loss, gradient, num_bytes) = results
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-2, atol=1e-6)
    assert num_bytes == pytest.approx(2, rel=0.1)
    assert plain_bytes >= 4
    undo()
    assert model.loss_function is plain

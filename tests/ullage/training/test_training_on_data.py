"""Models trained on records: documents stay apart, and the gradient is that of one big batch."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from record_files import data_of, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "gpt2": transformers.GPT2Config,
    "opt": transformers.OPTConfig,
}


def model_of(family: str) -> torch.nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
    own = {
        "gpt2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        "opt": {"ffn_dim": 64, "dropout": 0, "word_embed_proj_dim": 32},
        "qwen3": {"head_dim": 16},
        "mistral": {"sliding_window": 6},
        "mixtral": {"num_local_experts": 2},
    }.get(family, {})
    if family not in {"gpt2", "opt"}:
        own = {"num_key_value_heads": 1, "intermediate_size": 64} | own
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[family](**sizes, **own)).train()


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "opt"])
@pytest.mark.filterwarnings("error:.*keep the documents:RuntimeWarning")
def test_packed_documents_do_not_see_each_other(tmp_path: Path, family: str) -> None:
    """Their loss is that of the same documents alone."""
    model = model_of(family)
    rows = records([3, 9, 1, 6, 4, 12, 7])
    sums = []
    for pack in (False, True):
        data = data_of(tmp_path, rows, 40, len(rows), pack=pack)
        (batches,) = data.steps()
        assert pack == (len(batches[0].inputs["input_ids"]) < len(rows))
        sums.append(sum(batch.loss(model).item() for batch in batches))
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def mamba() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 2}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=100, **sizes))


@pytest.mark.parametrize("make", [mamba, lambda: model_of("opt")], ids=["no positions", "positions alone"])
def test_a_model_that_mixes_documents_is_warned_of_once(
    tmp_path: Path, make: Callable[[], torch.nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    model = make()
    ((batch,),) = data_of(tmp_path, records([2, 3]), 40, 2, pack=True).steps()
    for _ in range(2):
        batch.loss(model).backward()
    assert model.training
    (warned,) = [warning for warning in recwarn if warning.category is RuntimeWarning]
    assert "does not keep the documents of a packed sequence apart: tokens attend to" in str(warned.message)
    assert warned.filename == __file__


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("num_micro_batches", "num_ranks"), [(3, 1), (1, 3), (2, 2)])
def test_the_gradient_is_that_of_one_big_batch(
    tmp_path: Path, pack: bool, num_micro_batches: int, num_ranks: int
) -> None:
    """The mean over all target tokens of a step, however it is divided, the last smaller one too."""
    model = model_of("llama")
    rows = records([1, 12, 3, 0, 7, 15, 2, 9, 4, 11, 5, 8, 1] * 2)
    data = data_of(tmp_path, rows, 32, 2, num_micro_batches, pack=pack, seed=3)
    big = data_of(tmp_path, rows, 32, 2 * num_micro_batches * num_ranks, pack=pack, seed=3)

    def gradient() -> torch.Tensor:
        found = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        model.zero_grad()
        return found

    position, num_steps = 0, 0
    for ((whole,),) in zip(big.steps(), strict=True):
        logits = model(**whole.inputs, use_cache=False).logits[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), whole.inputs["labels"][:, 1:])
        expected.backward()
        wanted = gradient()
        total = torch.zeros(())
        for rank in range(num_ranks):
            data.share(rank, num_ranks)
            data.position = position
            for batch in data.step():
                loss = batch.loss(model) / num_ranks  # ranks' gradients are averaged
                loss.backward()
                total += loss.detach()
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(gradient(), wanted, rtol=2e-4, atol=2e-6)
        position, num_steps = data.position, num_steps + 1
    assert position == big.position
    assert num_steps > 1


def test_a_loss_that_is_not_weighted_would_be_seen(tmp_path: Path) -> None:
    """The plain mean of micro-batches with different numbers of targets is another loss."""
    model = model_of("llama")
    (step,) = data_of(tmp_path, records([0, 25]), 40, 1, 2).steps()
    plain = sum(batch.mean_loss(model).item() for batch in step) / 2
    assert abs(plain - sum(batch.loss(model).item() for batch in step)) > 1e-3
    assert Counter(batch.num_targets for batch in step) == {3: 1, 28: 1}


def test_evaluation_is_the_mean_over_target_tokens_and_changes_nothing(tmp_path: Path) -> None:
    model = model_of("gpt2")
    data = data_of(tmp_path, records(range(12)), 40, 2, eval_split=0.5)
    before = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    loss = data.evaluate(model)
    whole = data_of(tmp_path, records(range(12)), 40, 6, eval_split=0.5)
    (batch,) = whole._batches(whole._eval_sequences, np.arange(6))
    assert loss == pytest.approx(batch.mean_loss(model.eval()).item(), rel=1e-6)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert data.position == 0
    with pytest.raises(ValueError, match="no data are held out for evaluation; give for example --eval-split"):
        data_of(tmp_path, records(range(4)), 40).evaluate(model)

"""Weights from files, under any plan, and back to files: the same bits as ``transformers`` and ``peft`` have."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from amount import examples
from forked import completed
from hypothesis import given, settings
from plans import mixed, plans
from rank_programs import loaded_and_saved, prompt_saved
from safetensors.torch import load_file, save_file
from training import CONFIGS, Task, decide, prepare, reference, train, uniform
from weights_objects import adapted, captured_units, made, made_of, on_meta, place_anywhere, print_peak

from executor.prepare import prepare_session
from executor.weights import files
from executor.weights.loading import load
from executor.weights.saving import save
from planner.schedule.loop import OutOfOrderError
from ullage.capture.recording import find_loss

AUTO = transformers.AutoModelForCausalLM
FAMILIES = ("gpt2", "llama-tied", "mixtral", "qwen3-moe-shared", "opt")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Pass every tensor in several parts."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 600)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    different = [name for name, values in wanted.items() if not torch.equal(found[name], values)]
    assert not different, different


@given(case=plans(families=FAMILIES))
@settings(max_examples=examples(30))
def test_weights_go_to_wherever_a_plan_keeps_them_and_come_back(case):
    task, decisions = case
    with tempfile.TemporaryDirectory() as folder:
        source = made(task.family, torch.float32, folder)
        model, optimizer = prepare(task, decisions, model=on_meta(task.family))
        with optimizer.session as session:
            load(optimizer, Path(folder) / "source")
            masters = {name: tensor.float() for name, tensor in source.items()}
            weights = {name: tensor.to(task.dtype) for name, tensor in source.items()}
            assert_same(session.full_parameters(), {n: weights[n] for n in session.full_parameters()})
            save(optimizer, Path(folder) / "planned", max_shard_bytes=9000)
            save(optimizer, Path(folder) / "masters", dtype="float32")
            assert_same(AUTO.from_pretrained(Path(folder) / "planned", dtype=task.dtype).state_dict(), weights)
            assert_same(AUTO.from_pretrained(Path(folder) / "masters", dtype=torch.float32).state_dict(), masters)
            train(task, model, optimizer)
            save(optimizer, Path(folder) / "trained")
            trained = AUTO.from_pretrained(Path(folder) / "trained", dtype=task.dtype).state_dict()
            assert_same({n: trained[n] for n in session.full_parameters()}, session.full_parameters())


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training_from_files_is_training_from_the_same_weights(dtype, tmp_path):
    task = Task("llama-tied", dtype)
    made(task.family, dtype, tmp_path, task=task)
    # As the reference has it, which rounds rotary frequencies too.
    model, optimizer = prepare(task, decide(task, mixed), model=on_meta(task.family).to(dtype))
    load(optimizer, tmp_path / "source")
    with optimizer.session as session:
        assert train(task, model, optimizer) == reference(task)[0]
        assert_same(session.full_parameters(), reference(task)[1])


def test_weights_that_are_loaded_later_replace_those_there_and_leave_the_state(tmp_path):
    task = Task("llama", torch.bfloat16)
    source = made(task.family, torch.bfloat16, tmp_path)
    model, optimizer = prepare(task, decide(task, mixed))
    with optimizer.session as session:
        train(task, model, optimizer)
        before = optimizer.state_dict()["state"]
        loaded = load(optimizer, tmp_path / "source")
        assert (loaded.kept, loaded.unused) == ((), ())
        assert_same(session.full_parameters(), source)
        for number, state in optimizer.state_dict()["state"].items():
            assert torch.equal(state["exp_avg_sq"], before[number]["exp_avg_sq"])
        assert any(state["exp_avg_sq"].any() for state in before.values())


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_files_of_other_types_become_the_plans(dtype, tmp_path):
    task = Task("gpt2", torch.bfloat16)
    source = made(task.family, getattr(torch, dtype), tmp_path)
    _, optimizer = prepare(task, decide(task, uniform("host", "cpu")), model=on_meta(task.family))
    with optimizer.session:
        load(optimizer, tmp_path / "source")
        save(optimizer, tmp_path / "saved", dtype="float32")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(values, source[name].float()) for name, values in found.items())


def test_files_of_the_model_without_its_head_and_of_tied_weights_twice(tmp_path):
    task = Task("llama-tied", torch.float32)
    source = made(task.family, torch.float32, tmp_path)
    path = tmp_path / "source" / "model.safetensors"
    bare = {name.removeprefix("model."): values for name, values in load_file(path).items()}
    save_file(bare, path)
    _, optimizer = prepare(task, decide(task, mixed), model=on_meta(task.family))
    with optimizer.session as session:
        load(optimizer, tmp_path / "source")
        assert_same(session.full_parameters(), {n: source[n] for n in session.full_parameters()})
        save_file(bare | {"lm_head.weight": bare["embed_tokens.weight"].clone()}, path)
        load(optimizer, tmp_path / "source")
        save_file(bare | {"lm_head.weight": bare["embed_tokens.weight"] + 1}, path)
        with pytest.raises(ValueError, match=r"different values for model\.embed_tokens.* and lm_head.*tie_word"):
            load(optimizer, tmp_path / "source")


RANKED = {
    "gpt2, ZeRO-3": ("gpt2", mixed, {"data_parallel": 2, "zero_stage": 3}),
    "llama, ZeRO-1": ("llama", uniform("gpu", "gpu"), {"data_parallel": 2, "zero_stage": 1}),
    "llama-tied-shared, tensors": ("llama-tied-shared", mixed, {"tensor_parallel": 2}),
    "gpt2-shared, tensors": ("gpt2-shared", uniform("host", "cpu"), {"tensor_parallel": 2}),
    "mixtral-shared, experts": (
        "mixtral-shared",
        uniform("host", "cpu"),
        {"data_parallel": 2, "expert_parallel": 2, "expert_units": 2, "zero_stage": 3},
    ),
}


@pytest.mark.part(4)
@pytest.mark.parametrize(("family", "choose", "degrees"), RANKED.values(), ids=RANKED)
def test_ranks_read_their_parts_and_rank_0_writes_the_whole(processes, family, choose, degrees, tmp_path):
    task = Task(family, torch.bfloat16, max_norm=None)
    source = made(family, torch.float32, tmp_path)
    decisions = decide(task, choose, **degrees)
    found = processes.call(2, loaded_and_saved, task, decisions, str(tmp_path))
    assert found == [found[0]] * 2
    assert_same(
        AUTO.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict(),
        {name: values.float() for name, values in source.items()},
    )
    assert not list(tmp_path.glob(".*"))


def test_a_failure_of_rank_0_is_reported_on_all(processes, tmp_path):
    task = Task("gpt2", torch.float32, max_norm=None)
    made(task.family, torch.float32, tmp_path)
    (tmp_path / "saved").mkdir()
    decisions = decide(task, mixed, data_parallel=2, zero_stage=3)
    processes.begin(2, loaded_and_saved, task, decisions, str(tmp_path))
    first, second = processes.results(2)
    assert "is there already" in str(first)
    assert "rank 0 could not write" in str(second)
    shutil.rmtree(tmp_path / "source")
    processes.begin(2, loaded_and_saved, task, decisions, str(tmp_path))
    assert all("there is no such folder" in str(error) for error in processes.results(2))


def test_a_model_with_a_decoder_of_its_own(tmp_path):
    """T5 has its embedding in encoder and decoder."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(2, 8, dtype=torch.long)}
    check_captured(lambda: transformers.AutoModelForSeq2SeqLM.from_config(config), inputs, tmp_path)


def test_a_model_whose_buffers_are_in_files(tmp_path):
    """A classifier of images has statistics."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    inputs = {"pixel_values": torch.ones(2, 3, 16, 16), "labels": torch.ones(2, dtype=torch.long)}
    check_captured(lambda: transformers.AutoModelForImageClassification.from_config(config), inputs, tmp_path)


def check_captured(make, inputs, folder):
    source = made_of(make, folder)
    with torch.device("meta"):
        model = make().train()
    units = captured_units(make, inputs)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = prepare_session(model, optimizer, units, place_anywhere(units))
    with optimizer.session as session:
        load(optimizer, folder / "source")
        assert_same(model.state_dict(), source)
        save(optimizer, folder / "saved")
        assert_same(type(model).from_pretrained(folder / "saved").state_dict(), source)
        find_loss(model(**inputs))[0].backward()
        optimizer.step()
        assert session.iteration == 1


@pytest.mark.parametrize("kind", ["lora", "dora", "with a head"])
def test_adapters_are_saved_as_peft_loads_them(kind, tmp_path):
    peft = pytest.importorskip("peft")
    source = made("llama", torch.float32, tmp_path)
    config = CONFIGS["llama"]()
    inputs = {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    units = captured_units(lambda: adapted(AUTO.from_config(config), kind), inputs)
    model = adapted(AUTO.from_config(config), kind).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = prepare_session(model, torch.optim.AdamW(trained, lr=1e-2), units, place_anywhere(units))
    with optimizer.session as session:
        load(optimizer, tmp_path / "source")
        own = session.full_parameters()
        prefix = "base_model.model."
        assert torch.equal(
            own[f"{prefix}model.layers.0.self_attn.q_proj.base_layer.weight"],
            source["model.layers.0.self_attn.q_proj.weight"],
        )
        for _ in range(2):
            model(**inputs).loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        save(optimizer, tmp_path / "adapter")
        wanted = {name: values.clone() for name, values in session.full_parameters().items()}
        assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        in_file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert_same(dict(session.stream_weights()), in_file)
        session.park()
        assert_same({name: values.clone() for name, values in session.stream_weights()}, in_file)
        session.unpark()
        again = peft.PeftModel.from_pretrained(AUTO.from_pretrained(tmp_path / "source"), tmp_path / "adapter")
        found = dict(again.named_parameters())
        assert_same({name: found[name] for name in wanted}, wanted)
        model(**inputs).loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        load(optimizer, tmp_path / "adapter")
        assert_same(session.full_parameters(), wanted)


@pytest.mark.part(3)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["prompt", "prefix", "encoded", "a head"])
def test_prompts_and_heads_are_saved_as_peft_loads_them(kind, num_ranks, processes, tmp_path):
    peft = pytest.importorskip("peft")
    config = {
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "encoded": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
        "a head": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    }[kind]
    made("llama", torch.float32, tmp_path)
    inputs = {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    units = captured_units(lambda: peft.get_peft_model(AUTO.from_config(CONFIGS["llama"]()), config), inputs)
    decisions = place_anywhere(units)
    if num_ranks == 1:
        wanted = prompt_saved(0, 1, config, units, decisions, str(tmp_path))
    else:
        shared = decisions.model_copy(update={"data_parallel": 2, "zero_stage": 3})
        wanted, other = processes.call(2, prompt_saved, config, units, shared, str(tmp_path))
        assert wanted == other
    source = AUTO.from_pretrained(tmp_path / "source")
    again = peft.PeftModel.from_pretrained(source, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert float(again(**inputs).loss) == wanted
    model = peft.get_peft_model(AUTO.from_pretrained(tmp_path / "source"), config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = prepare_session(model, torch.optim.AdamW(trained, lr=1e-2), units, decisions)
    in_file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    with optimizer.session as session:
        if kind == "encoded":
            with pytest.raises(ValueError, match="the prompt that an encoder made, but the model trains the encoder"):
                load(optimizer, tmp_path / "adapter")
            assert {name: values.shape for name, values in session.stream_weights()} == {
                name: values.shape for name, values in in_file.items()
            }
            session.park()
            with pytest.raises(OutOfOrderError, match="computed on the device from other weights; take it before"):
                next(session.stream_weights())
            return
        load(optimizer, tmp_path / "adapter")
        session.park()
        assert_same(dict(session.stream_weights()), in_file)
        session.unpark()
        model.eval()
        with torch.no_grad():
            assert float(model(**inputs).loss) == wanted


def test_an_adapter_of_a_model_without_memory_begins_as_peft_draws_it(tmp_path):
    pytest.importorskip("peft")
    source = made("llama", torch.float32, tmp_path)
    inputs = {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    units = captured_units(lambda: adapted(AUTO.from_config(CONFIGS["llama"]()), "lora"), inputs)
    with torch.device("meta"):
        model = adapted(on_meta("llama"), "lora").train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.is_meta for parameter in trained)
    model, optimizer = prepare_session(model, torch.optim.AdamW(trained), units, place_anywhere(units))
    with optimizer.session as session:
        load(optimizer, tmp_path / "source")
        own = session.full_parameters()
        assert not any(values.any() for name, values in own.items() if "lora_B" in name)
        assert all(values.any() and values.abs().max() < 1 for name, values in own.items() if "lora_A" in name)
        plain = AUTO.from_pretrained(tmp_path / "source")
        assert plain.state_dict().keys() == source.keys()
        assert torch.equal(model(**inputs).loss, plain(**inputs).loss)


def test_a_tokenizer_beside_the_weights_is_saved_too(tmp_path):
    task = Task("gpt2", torch.float32)
    made(task.family, torch.float32, tmp_path)
    (tmp_path / "source" / "tokenizer.json").write_text('{"model": 1}')
    (tmp_path / "source" / "notes.txt").write_text("mine")
    _, optimizer = prepare(task, decide(task, mixed), model=on_meta(task.family))
    with optimizer.session:
        load(optimizer, tmp_path / "source")
        save(optimizer, tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == '{"model": 1}'
    assert not (tmp_path / "saved" / "notes.txt").exists()


def test_host_memory_has_the_plans_own_and_one_chunk_while_weights_are_loaded_and_saved():
    done = completed(print_peak)
    assert not done.returncode, done.stderr
    ledger_bytes, grown_bytes, model_bytes, chunk_bytes = map(int, done.stdout.split())
    # One tensor as it is saved, and kernels that are compiled, and threads.
    constant_bytes = chunk_bytes + 4 * 4000 * 512 + (32 << 20)
    assert abs(grown_bytes - ledger_bytes) <= constant_bytes, done.stdout
    assert model_bytes > 3 * constant_bytes  # a second copy would be seen

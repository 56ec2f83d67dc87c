"""What tests of weights make: models in files, on the meta device, with adapters, and captured."""

import ctypes
import functools
import gc
import re
import tempfile
from pathlib import Path

import torch
import transformers
from training import CONFIGS, make_model

from executor.options import Options
from executor.prepare import prepare_session
from executor.weights import files
from executor.weights.loading import load
from executor.weights.saving import save
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, Unit, build_graph, units
from planner.models import from_hf_config
from planner.models.captured import CapturedInput
from planner.schedule.tasks import Tier
from ullage.capture import capture_module

SUBGROUP_PARAMS = 3000


def made(family, dtype, folder, task=None):
    """Save a random model as ``transformers`` does; return its tensors by name."""
    torch.manual_seed(5)
    make = functools.partial(transformers.AutoModelForCausalLM.from_config, CONFIGS[family]())
    return made_of((lambda: make_model(task)) if task else lambda: make().to(dtype), folder)


def made_of(make, folder):
    model = make()
    model.save_pretrained(Path(folder) / "source")
    return {name: values.clone() for name, values in model.state_dict().items()}


def on_meta(family):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).train()


def adapted(model, kind):
    import peft  # noqa: PLC0415

    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        use_dora=kind == "dora",
        modules_to_save=["lm_head"] if kind == "with a head" else None,
    )
    return peft.get_peft_model(model, config)


def captured_units(make, inputs) -> tuple[Unit, ...]:
    specs = [
        CapturedInput(name=name, shape=tuple(t.shape), dtype="int64" if t.dtype is torch.int64 else "float")
        for name, t in inputs.items()
    ]
    model = capture_module(make, specs, "fp32", as_on_gpu=False)
    return units(build_graph(model, Batch(model.micro_batch, model.seq_len, 4)))


def place_anywhere(found: tuple[Unit, ...]) -> Decisions:
    chosen = {}
    for number, unit in enumerate(found):
        count = -(-unit.num_params // SUBGROUP_PARAMS)
        places = [[Place.GPU, Place.CPU, Place.STREAM][(number + i) % 3] for i in range(count)]
        params = "host" if count and Place.GPU not in places else "gpu"
        chosen[unit.name] = UnitDecision(params=params, activations="keep", update=tuple(places))
    return Decisions(
        policy="test",
        precision=Precision(weights="fp32"),
        micro_batch=2,
        subgroup_params=SUBGROUP_PARAMS,
        clip=True,
        units=chosen,
    )


def print_peak():
    """Print bytes of a plan's ledger, by how much the process's peak grows by loading, of the model, and of a chunk."""
    config = transformers.LlamaConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, max_shard_size="20MB")
        model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config).train()
        planned = from_hf_config(config.to_dict(), "llama")
        found = units(build_graph(planned, Batch(1, 8, 4)))
        chosen = {
            unit.name: UnitDecision(
                params=["host", "nvme", "gpu"][i % 3],
                activations="keep",
                update=(([Place.CPU, Place.NVME, Place.GPU])[i % 3],),
            )
            for i, unit in enumerate(found)
            if unit.num_params
        }
        decisions = Decisions(
            policy="test",
            optimizer="sgd",
            precision=Precision(weights="fp32"),
            micro_batch=1,
            subgroup_params=1 << 30,
            units=chosen,
        )
        files.CHUNK_BYTES = 2 << 20
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = peak_bytes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = Options(storage_dir=Path(folder), num_threads=1)
        model, optimizer = prepare_session(model, optimizer, found, decisions, options)
        with optimizer.session as session:
            for arena in (session.runtime.gpu, session.runtime.host):
                for _, block in arena._blocks.values():
                    block.zero_()  # else pages that loading does not touch are not there yet
            load(optimizer, folder)
            save(optimizer, Path(folder) / "saved")
            ledger_bytes = sum(session.memory()[tier].peak_bytes for tier in (Tier.GPU, Tier.HOST))
            print(ledger_bytes, peak_bytes() - before, model_bytes, files.CHUNK_BYTES)  # noqa: T201


def peak_bytes():
    """Return the peak without pages of libraries, which a forked process has once it reads them."""
    found = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8")))
    return int(found["VmHWM"]) - int(found["RssFile"]) << 10

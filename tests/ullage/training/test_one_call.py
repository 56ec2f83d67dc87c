"""``ullage.prepare`` from a batch instead of a plan: profile, capture of a live model, plan, training."""

import contextlib
import copy
import gc
import io
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import ullage
from hwprofiles import registry
from hwprofiles.machine import this_machine
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile, local_profile_path, save_profile
from ullage.calibrate import CalibrationOptions
from ullage.main import main
from ullage.this_machine import profile as measuring
from ullage.this_machine.planning import capture_live
from ullage.training.models import planned_model

BATCH = (torch.ones(8, 16), torch.zeros(8, dtype=torch.long))
MEMORY = 60_000


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.seen = x  # what a forward leaves behind
        x = torch.relu(self.inner(torch.relu(self.first(x)))) * self.scale
        return nn.functional.cross_entropy(self.last(self.drop(x)), labels)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, where this machine has a profile."""
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    keep()
    return tmp_path / "home"


def keep(**changes: object) -> ullage.HardwareProfile:
    measured_on = this_machine().model_copy(update=changes)
    profile = load_profile("epyc-turin-2c").model_copy(update={"name": "mine", "measured_on": measured_on})
    save_profile(profile, local_profile_path())
    return profile


def made(**options: object):
    torch.manual_seed(0)
    net = Net()
    return ullage.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), **options)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, num: int = 4) -> list[float]:
    torch.manual_seed(1)
    result = []
    with optimizer.session:
        for size in (8, 8, 5, 8)[:num]:  # the last batch of an epoch is smaller
            loss = model(torch.randn(size, 16), torch.randint(4, (size,)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
    return result


def test_a_batch_is_enough_and_its_plan_is_one_like_any_other(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    torch.manual_seed(0)
    net = Net()
    drawn = torch.get_rng_state()
    model, optimizer = ullage.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), BATCH, device_memory=MEMORY)
    assert torch.equal(drawn, torch.get_rng_state())  # training draws what it would have drawn
    torch.set_rng_state(before)
    plan = optimizer.plan
    assert plan.prediction.fits
    assert (plan.hardware.name, plan.model.name) == ("mine", "Net")
    assert plan.gpu_memory.capacity_bytes == MEMORY
    assert any(unit.params == "host" for unit in plan.decisions.units.values())  # it does not fit otherwise
    assert str(plan).startswith("Net on 1 device(s) of mine: ")
    assert plan.engines == ()  # nobody who trains waits for a comparison
    assert "of 0.06 MB on the device" in str(plan)
    ours = losses(model, optimizer)
    plan.save(tmp_path / "plan.json")
    again = ullage.load_plan(tmp_path / "plan.json")
    assert again == plan
    assert losses(*made(plan=again)) == ours
    roomy = made(plan=BATCH)[1]
    assert roomy.plan.gpu_memory.capacity_bytes > MEMORY
    assert roomy.plan.prediction.iteration_s <= plan.prediction.iteration_s
    roomy.session.close()
    assert losses(*made(plan=BATCH, device_memory="1MB", num_micro_batches=1, storage="never")) == ours


def test_plans_share_the_device() -> None:
    """The second one has what the first one leaves; if that is too little, it says what to change."""
    _, first = made(plan=BATCH)
    peak = first.plan.gpu_memory.peak_bytes
    whole = first.plan.gpu_memory.capacity_bytes
    _, second = made(plan=BATCH)
    assert second.plan.gpu_memory.capacity_bytes == whole - peak
    first.session.park()
    _, third = made(plan=BATCH)
    assert third.plan.gpu_memory.capacity_bytes == whole - second.plan.gpu_memory.peak_bytes
    first.session.unpark()
    for optimizer in (second, third):
        optimizer.session.close()
    small = load_profile("epyc-turin-2c")
    for left, message in (
        (40_000, r"the plan of Net takes .* of the device: prepare Net with device_memory=(\d+)"),
        (0, "none|no "),
    ):
        size = small.device.memory_bytes.model_copy(update={"value": float(peak + left)})
        machine = small.model_copy(update={"device": small.device.model_copy(update={"memory_bytes": size})})
        with pytest.raises(ValueError, match=message) as refused:
            made(plan=BATCH, hardware=machine)
        if left:
            less = int(re.search(r"device_memory=(\d+)", str(refused.value))[1])
            assert 0 < less < peak
    first.session.close()
    closed = made(plan=BATCH, hardware=machine)[1]
    assert closed.plan.gpu_memory.capacity_bytes == peak
    closed.session.close()


def test_gradients_reach_a_batch_through_layers_that_the_plan_does_not_go_back_through() -> None:
    """Only the last layer is trained, so the plan ends backward there; the batch of another model needs more."""

    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
        layers[:-2].requires_grad_(False)
        return layers

    batch, expected = torch.randn(4, 64), torch.randn(4, 64)
    plain, model = stack(), stack()
    model, optimizer = ullage.prepare(model, torch.optim.SGD(model[-2].parameters()), batch, device_memory="57kB")
    assert all(unit.params == "host" for unit in optimizer.plan.decisions.units.values())
    with optimizer.session as session:
        for number in (1, 2):
            inputs = [batch.clone().requires_grad_(True) for _ in range(2)]
            for network, given in zip((plain, model), inputs, strict=True):
                nn.functional.mse_loss(network(given), expected).backward()
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
            optimizer.zero_grad()
            optimizer.step()
            assert session.num_left == number


def test_a_model_that_is_never_trained_is_prepared_without_an_optimizer() -> None:
    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))

    plain, batch = stack().requires_grad_(False), torch.randn(4, 64)
    with pytest.raises(ValueError, match=r"0\.weight requires gradients, but no optimizer is given"):
        ullage.prepare(stack(), None, batch)
    teacher, held = ullage.prepare(stack().requires_grad_(False), None, batch, device_memory="60kB")
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    with held.session as session:
        for mode in (True, False, True):
            inputs = [batch.clone().requires_grad_(True) for _ in range(2)]
            for network, given in zip((plain, teacher), inputs, strict=True):
                network.train(mode)(given).square().sum().backward()
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
            with torch.no_grad():
                torch.testing.assert_close(teacher(batch), plain(batch))
            values = zip(teacher.state_dict().values(), plain.state_dict().values(), strict=True)
            assert all(torch.equal(own, other) for own, other in values)
        session.runtime.check_idle()
    assert all(torch.equal(own, other) for own, other in zip(teacher.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("make", [ullage.AdamWBf16, ullage.AdamW8bit])
def test_an_optimizer_that_rounds_weights_is_planned_without_an_fp32_copy_of_them(make: type) -> None:
    def train(*, plans: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net().to(torch.bfloat16)
        model, optimizer = net, make(net.parameters(), lr=1e-2, bf16_stochastic_round=True)
        batch = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in BATCH)
        with contextlib.ExitStack() as stack:
            if plans:
                model, optimizer = ullage.prepare(net, optimizer, batch, device_memory=MEMORY, clip=False)
                stack.enter_context(optimizer.session)
                assert optimizer.plan.decisions.precision == ullage.Precision(weights="bf16", master="bf16")
            for _ in range(3):
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [weight.detach().clone() for weight in net.parameters()]

    assert all(torch.equal(mine, whole) for mine, whole in zip(train(plans=True), train(plans=False), strict=True))


def test_options_decide(tmp_path: Path) -> None:
    options = {"num_micro_batches": 2, "clip": False, "storage_dir": tmp_path, "hardware": load_profile("local")}
    optimizer = made(plan=BATCH, **options)[1]
    optimizer.session.close()
    plan = optimizer.plan
    assert (plan.decisions.num_micro_batches, plan.decisions.clip) == (2, False)
    with pytest.raises(ValueError, match="clip is already decided by the given plan; leave it out, or give a batch"):
        made(plan=plan, clip=False)
    with pytest.raises(TypeError, match="no option seq_len; use one of hardware, device_memory, "):
        made(plan=plan, seq_len=5)


def test_capturing_a_live_model_leaves_it_as_it_is() -> None:
    net = Net().eval()
    called: list[object] = []
    handle = net.first.register_forward_hook(lambda *_: called.append(1))
    before = {name: (id(tensor), tensor.clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    names = {id(module): set(vars(module)) for module in net.modules()}
    captured = capture_live(net, BATCH)
    assert captured.num_params == sum(parameter.numel() for parameter in net.parameters())
    assert not net.training
    assert net.seen is None
    assert names == {id(module): set(vars(module)) for module in net.modules()}
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
    handle.remove()
    called.clear()
    net(*BATCH)
    assert not called
    with pytest.raises(ullage.CaptureError):
        capture_live(net, (torch.ones(8, 15), BATCH[1]))
    net(*BATCH)  # after an error too


def test_a_capture_keeps_nothing_that_has_the_memory_of_weights() -> None:
    """Else a session follows it like a tensor of the user's, and the weights that were given stay in memory."""
    net, count = Net(), torch._C._storage_Use_Count
    storages = [parameter.untyped_storage()._cdata for parameter in net.parameters()]
    before = [count(storage) for storage in storages]
    gc.disable()  # what only cycles hold stays for long, too
    try:
        capture_live(net, BATCH)
        assert [count(storage) for storage in storages] == before
    finally:
        gc.enable()


def test_weights_are_neither_copied_nor_read() -> None:
    net = Net()
    net.inner.weight = nn.Parameter(torch.zeros(1).expand(10**6, 10**6))  # 4 TB
    net.first, net.last = (nn.Linear(16, 1), nn.Linear(1, 4))
    net.first.weight, net.last.weight = (
        nn.Parameter(torch.zeros(1).expand(*shape)) for shape in ((10**6, 16), (4, 10**6))
    )
    net.first.bias = net.inner.bias = nn.Parameter(torch.zeros(1).expand(10**6))
    assert capture_live(net, BATCH).num_params > 10**12


def test_a_model_without_weights_is_planned_and_takes_them_later(tiny_model: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**json.loads(tiny_model.read_text()))
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(64).view(2, 32)
    batch = {"input_ids": tokens, "labels": tokens}
    model, optimizer = ullage.prepare(empty, torch.optim.SGD(empty.parameters()), batch, device_memory="1.5MB")
    with optimizer.session:
        ullage.load(optimizer, tmp_path / "base")
        assert model(**batch).loss.item() == plain(**batch).loss.item()


def test_a_factory_and_its_module_are_captured_alike() -> None:
    specs = ["8x16", "8:int64"]
    live = ullage.capture_module(Net(), specs, "fp32", as_on_gpu=False)
    assert live == ullage.capture_module(Net, specs, "fp32", as_on_gpu=False, name="Net")
    with pytest.raises(ullage.CaptureError, match=r"captured from a model in memory.*give ullage.prepare such a model"):
        planned_model(ullage.plan(live, hardware="epyc-turin-2c"))


def net_with(**changes: object) -> nn.Module:
    net = Net()
    for name, value in changes.items():
        setattr(net, name, value)
    return net


class AsDouble(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


@pytest.mark.parametrize(
    ("model", "batch", "options", "message"),
    [
        (
            net_with(drop=AsDouble(), last=nn.Linear(64, 4).double()),
            BATCH,
            {},
            r"all trained weights in torch.float32, but last.weight is torch.float64: if that is why, convert it$",
        ),
        (Net(), (torch.ones(8, 15), BATCH[1]), {}, r"Net, in module first: .*; make it run with these inputs first"),
        (nn.ReLU(), (BATCH[0],), {}, "ReLU has no parameters; give the model that is trained"),
        (Net().half(), BATCH, {}, r"weights are torch.float16, which cannot be planned.*model.to\(torch.bfloat16\)"),
        (Net(), {"x": BATCH[0], "labels": None}, {}, r"Net: .*must be Tensor, not NoneType; make it run"),
        (Net(), (BATCH[0].to(torch.cfloat), BATCH[1]), {}, "input 1 of the example batch is torch.complex64, but"),
        (
            Net(),
            (torch.nested.nested_tensor(list(BATCH[0].split(4)), layout=torch.jagged), BATCH[1]),
            {},
            "input 1 of the example batch is a nested tensor, which has no shape to plan for; give .* a padded tensor",
        ),
        (Net(), (BATCH[0], BATCH[1][:4]), {}, r"Net: .*batch_size \(8\).*; make it run with these inputs first"),
        (Net(), "plan.json", {}, "the third argument is str; give a plan .*or an example batch"),
        (Net(), 5, {}, "the third argument is int; give a plan .*or an example batch"),
        (Net(), BATCH, {"device_memory": 100}, "Net does not fit on 1 device.*lacks"),
        (Net(), BATCH, {"device_memory": "900TB"}, "device_memory is .* B, but .* B are free for each device"),
        (Net(), BATCH, {"device_memory": "much"}, "'much' is not a size; give bytes with an optional unit"),
        (
            Net(),
            BATCH,
            {"device_memory": 0.5},
            "device_memory is 0.5, but must be a number of bytes of at least 1, or a text like",
        ),
        (
            Net(),
            BATCH,
            {"device_memory": -1},
            "device_memory is -1, but must be a number of bytes of at least 1, or a text like",
        ),
        (Net(), BATCH, {"storage": "disk"}, "storage is 'disk', but must be one of never, activations, nvme"),
        (Net(), BATCH, {"storage_dir": __file__}, "storage_dir is '.*', but must be a folder"),
        (Net(), BATCH, {"clip": 1.0}, "clip is 1.0, but must be True or False: whether your loop clips"),
        (Net(), BATCH, {"hardware": 5}, "hardware is 5, but must be the name or path of a profile, or a profile"),
        (Net(), BATCH, {"cores": "all"}, "cores is 'all', but must be 'auto', 'free', or a tuple of the numbers"),
        (Net(), BATCH, {"compile_blocks": "no"}, "compile_blocks is 'no', but must be True or False"),
        (Net(), BATCH, {"checkpoint_buffer_bytes": -1}, "checkpoint_buffer_bytes is -1, but must be a whole"),
        (
            net_with(config=types.SimpleNamespace(vocab_size=100)),
            {"input_ids": torch.tensor([[3, 100]])},
            {},
            "input_ids of the example batch has 100, but the model knows tokens 0 to 99; give the tokens of its own",
        ),
        (Net(), {}, {}, "the example batch is empty; give one batch of your loop"),
        (Net(), None, {}, "the third argument is NoneType; give a plan .*or an example batch"),
        (Net(), {"x": ["text"]}, {}, "Net: TypeError.*; make it run with these inputs first"),
        (Net(), BATCH, {"precision": "fp8"}, "precision is 'fp8', which cannot be planned; give one of bf16, fp32"),
        (Net(), {1: BATCH[0]}, {}, "the example batch has a key 1; name each input as the model's forward does"),
        (
            Net().requires_grad_(False),
            BATCH,
            {},
            r"all \d parameters of the Net are frozen; call requires_grad_\(True\)",
        ),
        (
            nn.DataParallel(Net()),
            BATCH,
            {},
            r"the model is in a DataParallel, but .*give the model without it \(model.module",
        ),
        (
            nn.Sequential(Net(), type("DistributedDataParallel", (nn.Identity,), {})()),
            BATCH,
            {},
            "1 is in a DistributedDataParallel, but the plan itself divides work",
        ),
        (Net(), BATCH, {"hardware": "a100-80"}, "a100-80 is of a gpu device, but this machine computes on a host"),
        (
            Net(),
            BATCH,
            {"num_micro_batches": "2"},
            "num_micro_batches is '2', but must be a whole number of at least 1",
        ),
        (Net(), BATCH, {"pipeline": "2"}, "pipeline is '2', but must be a whole number of at least 1"),
        (
            Net(),
            BATCH,
            {"pipeline": 2},
            r"pipeline is 2, but 1 process\(es\) were started; start .*torchrun --nproc-per-node 2",
        ),
        (Net(), BATCH, {"collectives": "ring"}, "collectives is 'ring', but must be 'fabric' or 'host'"),
        (Net(), BATCH, {"num_micro_batches": 0}, "num_micro_batches is 0, but must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_the_model_alone(model, batch, options, message) -> None:
    parameters = list(model.parameters()) or [torch.zeros(1)]
    optimizer = torch.optim.AdamW(parameters)
    with pytest.raises((ValueError, TypeError), match=message) as refused:
        ullage.prepare(model, optimizer, batch, **options)
    assert "\n" not in str(refused.value)
    if type(model) is Net and model.inner.weight.dtype is torch.float32 and model.inner.weight.requires_grad:
        model(*BATCH).backward()


def test_an_optimizer_that_steps_one_prepared_model_is_refused_for_another() -> None:
    models = Net(), Net()
    given = torch.optim.AdamW([*models[0].parameters(), *models[1].parameters()])
    _, optimizer = ullage.prepare(models[0], given, BATCH)
    with optimizer.session, pytest.raises(ValueError, match=r"under the plan of a model already; give each model that"):
        ullage.prepare(models[1], optimizer, BATCH)
    ullage.prepare(models[1], optimizer, BATCH)[1].session.close()  # after the session


@pytest.mark.parametrize("part", ["inner", "inner.weight"])
def test_a_part_that_two_models_share_is_in_one_plan_only(part: str) -> None:
    models, (module, _, parameter) = (Net(), Net()), part.partition(".")
    shared = models[0].get_submodule(module)
    if parameter:
        models[1].get_submodule(module).register_parameter(parameter, shared.get_parameter(parameter))
    else:
        models[1].register_module(module, shared)
    _, optimizer = ullage.prepare(models[0], torch.optim.AdamW(models[0].parameters()), BATCH)
    with (
        optimizer.session,
        pytest.raises(ValueError, match=f"^{part} of the model is also that of a model that is prep"),
    ):
        ullage.prepare(models[1], torch.optim.AdamW(models[1].parameters()), BATCH)
    ullage.prepare(models[1], torch.optim.AdamW(models[1].parameters()), BATCH)[1].session.close()


@pytest.mark.parametrize("part", ["", "inner"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_compiled_before_it_is_planned_runs_as_it_is_until_the_end(part: str, in_place: bool) -> None:
    alone = Net()
    net: torch.nn.Module = copy.deepcopy(alone)
    if in_place:
        net.get_submodule(part).compile(backend="eager")
    elif part:
        net.inner = torch.compile(net.inner, backend="eager")
    else:
        net = torch.compile(net, backend="eager")
    before = [(module, dict(vars(module))) for module in net.modules()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="that torch.compile has compiled run as they are until"):
        net, optimizer = ullage.prepare(net, optimizer, BATCH)
    with optimizer.session as session:
        for model, steps in ((alone, torch.optim.SGD(alone.parameters(), lr=0.1)), (net, optimizer)):
            torch.manual_seed(0)
            for _ in range(2):
                model(*BATCH).backward()
                steps.step()
                steps.zero_grad()
        assert session.num_left == 0
    for trained, expected in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(trained, expected)
    for module, own in before:
        for name in ("forward", "_compiled_call_impl"):
            assert vars(module).get(name) is own.get(name)


def test_more_micro_batches_than_planned_are_told_with_how_to_plan_them() -> None:
    net = Net()
    with stderr() as said:
        net, optimizer = ullage.prepare(net, torch.optim.AdamW(net.parameters()), BATCH)
        with optimizer.session as session:
            for _ in range(2):
                net(*BATCH).backward()
                net(*BATCH).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert session.num_left == 2
    assert said.getvalue().count("left the plan: the model reached forward") == 1


def test_an_unknown_optimizer_is_named() -> None:
    net = Net()
    of_another_library = type("AdamW", (torch.optim.Adafactor,), {"__module__": "bitsandbytes.optim"})
    with pytest.raises(ValueError, match=r"bitsandbytes.optim.AdamW, whose kernels do not see weights .*; use one of"):
        ullage.prepare(net, of_another_library(net.parameters()), BATCH)


@contextlib.contextmanager
def stderr() -> Iterator[io.StringIO]:
    with contextlib.redirect_stderr(io.StringIO()) as written:
        yield written


def test_a_machine_without_a_profile_is_measured_once_and_it_is_the_default_from_then_on(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = load_profile("local")

    def calibrate(options: CalibrationOptions, *_: object) -> tuple[HardwareProfile, tuple[()]]:
        assert options.quick
        torch.rand(3)  # as measurements may
        return here, ()

    monkeypatch.setattr(measuring, "calibrate", calibrate)
    keep(cpu="another")
    drawn = torch.get_rng_state()
    found = measuring.profile_here()
    assert found == here
    assert torch.equal(drawn, torch.get_rng_state())
    warned = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2][:30] for line in warned] == [
        f" {local_profile_path()}"[:30],
        " profile written to " + str(home)[:10],
    ]
    assert "was measured on another machine (its CPU is 'another'" in warned[0]
    assert sorted(path.suffix for path in home.iterdir()) == [".json", ".old"]  # the other one is not lost
    assert measuring.profile_here() == found == load_profile("local")
    assert capsys.readouterr().err == ""
    assert main(["plan", "--model", "demo-llama", "--seq-len", "64", "--output", str(home / "p"), "--json"]) == 0
    assert ullage.load_plan(home / "p").hardware == found


def test_a_profile_that_cannot_be_kept_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile("local")
    local_profile_path().unlink()
    monkeypatch.setattr(measuring, "calibrate", lambda *_: (profile, SimpleNamespace()))
    monkeypatch.setattr(registry, "write_whole", lambda *_: (_ for _ in ()).throw(PermissionError("no room")))
    assert measuring.profile_here() == profile
    assert "the profile cannot be saved (no room), so the next call measures again" in capsys.readouterr().err


def test_a_plan_can_be_for_the_memory_that_is_free(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ["--seq-len", "32", "--memory", "free,device=1.5MB", "--precision", "fp32", "--output", str(path)]
    assert main(["plan", "--model", str(tiny_model), *options]) == 0
    plan = ullage.load_plan(path)
    assert (plan.hardware.name, plan.seq_len, plan.gpu_memory.capacity_bytes) == ("mine", 32, 1_500_000)
    same = ullage.plan(tiny_model, seq_len=32, memory="free", device_memory=1_500_000, precision="fp32")
    assert (same.decisions, same.gpu_memory) == (plan.decisions, plan.gpu_memory)
    assert main(["execute", str(path), "--iterations", "6", "--output-dir", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt3-xx"], "no model or file is called 'gpt3-xx'"),
        (
            ["--model", "gpt2", "--hardware", "a100-80"],
            "a100-80 is of a gpu device, but this machine computes on a host",
        ),
        (["--model", "gpt2", "--memory", "device=1000TB"], "device_memory is "),
    ],
)
def test_what_cannot_be_planned_here_is_one_line(arguments, message, tmp_path, capsys) -> None:
    assert main(["plan", *arguments, "--memory", "free", "--output", str(tmp_path / "p.json")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1

"""A ``LightningModule`` under a plan: accumulating, clipping, resuming, and two models that it steps itself."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from forked import Forked, environments
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ullage
from hwprofiles.machine import this_machine
from hwprofiles.registry import load_profile, local_profile_path, save_profile

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler
LightningStrategy = pytest.importorskip("ullage.integrations.lightning").LightningStrategy


@pytest.fixture(autouse=True)
def _profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    profile = load_profile("epyc-turin-2c").model_copy(update={"name": "mine", "measured_on": this_machine()})
    save_profile(profile, local_profile_path())
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Rows(Dataset[Any]):
    """Rows as people have them: nested."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> dict[str, Any]:
        torch_row = torch.full((16,), row / 32).sin()
        return {"x": torch_row, "more": (torch.tensor(row % 4),)}


def network(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class Classifier(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch["x"]), batch["more"][0])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch["x"]), batch["more"][0])
        self.log("validated", loss)
        self.seen.append(loss.item())

    def on_train_batch_end(self, outputs: Any, *_args: object) -> None:
        self.seen.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Adversaries(Classifier):
    """A generator and a discriminator."""

    def __init__(self, *, is_planned: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.judge, self.is_planned = network(16), network(1), is_planned

    def training_step(self, batch: Any, _batch_idx: int) -> None:
        of_net, of_judge = self.optimizers()
        made = self.net(batch["x"])
        loss = self.judge(torch.cat([batch["x"], made.detach()])).sigmoid().mean()
        self.manual_backward(loss)
        of_judge.step()
        of_judge.zero_grad()
        judged = -self.judge(made).sigmoid().mean()
        self.manual_backward(judged)
        of_net.step()
        for optimizer in (of_net, of_judge):
            optimizer.zero_grad()
        self.seen += [loss.item(), judged.item()]

    def on_train_batch_end(self, *_args: object) -> None:
        """See the losses above."""

    def configure_optimizers(self) -> Any:
        found = []
        for model, rows in ((self.net, 8), (self.judge, 16)):
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if self.is_planned:
                _, optimizer = ullage.prepare(model, optimizer, torch.ones(rows, 16), device_memory="80kB")
            found.append(optimizer)
        return found


def fitted(module: Any, folder: Path, strategy: Any = "auto", resume: Path | None = None, **options: Any) -> Any:
    """Fit; return what the module has seen, and its weights afterwards."""
    pl.seed_everything(3, verbose=False)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    warnings.filterwarnings("ignore", module="lightning.*")
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, "devices": 1} | options
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", default_root_dir=folder, **quiet, **options)
    trainer.fit(module, DataLoader(Rows(), 8, shuffle=True), DataLoader(Rows(), 16), ckpt_path=resume)
    return module.seen, dict(module.state_dict()), trainer


def assert_as(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight)


@pytest.mark.filterwarnings("ignore")
def test_a_module_trains_as_with_lightning_alone(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    expected = fitted(Classifier(), tmp_path / "plain", **options)
    strategy = LightningStrategy(device_memory="80kB")
    found = fitted(Classifier(), tmp_path / "planned", strategy, **options)
    assert_as(found, expected)
    assert strategy.plan is not None
    assert strategy.plan.decisions.num_micro_batches == 2
    assert strategy._offloaded.session.num_left == 0
    assert strategy._offloaded.session.closed
    losses = [
        trainer.validate(verbose=False, dataloaders=DataLoader(Rows(), 16))[0] for *_, trainer in (expected, found)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    saved = found[2].checkpoint_callback.best_model_path
    more = [
        fitted(Classifier(), tmp_path, other, resume=saved, max_epochs=3, **options) for other in ("auto", "ullage")
    ]
    assert_as(more[1], more[0])


class Logging(Classifier):
    """Logs norms of gradients where Lightning's documentation does."""

    def on_before_optimizer_step(self, _optimizer: Any) -> None:
        self.seen += [parameter.grad.norm().item() for parameter in self.parameters()]


class Searching(Classifier):
    """Its optimizer runs forward and backward several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class LoggingCallback(pl.Callback):  # type: ignore[misc, name-defined]
    def on_after_backward(self, _trainer: Any, module: Any) -> None:
        module.seen.append(module.net[0].weight.grad.abs().sum().item())


class Thawing(pl.callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
    """Trains the head alone in the first epoch, as Lightning's documentation shows it."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[:4])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[2:4], optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        (Logging, []),
        (Classifier, [LoggingCallback()]),
        (Classifier, [GradientAccumulationScheduler({0: 1, 1: 2})]),
        (Searching, []),
        (Classifier, [Thawing()]),
    ],
    ids=["module sees gradients", "callback sees gradients", "more micro-batches in epoch 2", "closure", "thawing"],
)
def test_updates_wait_where_they_must_without_clipping(tmp_path: Path, kind: Any, callbacks: list[Any]) -> None:
    expected = fitted(kind(), tmp_path / "plain", callbacks=callbacks)
    assert_as(fitted(kind(), tmp_path / "planned", "ullage", callbacks=callbacks), expected)


@pytest.mark.filterwarnings("ignore")
def test_two_models_that_a_module_prepares_train_as_with_lightning_alone(tmp_path: Path) -> None:
    expected = fitted(Adversaries(is_planned=False), tmp_path, max_epochs=1)
    assert_as(fitted(Adversaries(is_planned=True), tmp_path, "ullage", max_epochs=1), expected)
    with pytest.raises(ValueError, match=r"^Adversaries has 2 optimizers and steps them itself, .*ullage\.prepare"):
        fitted(Adversaries(is_planned=False), tmp_path, "ullage")


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import test_lightning as t

class Contrasting(t.Classifier):
    def training_step(self, batch, batch_idx):
        made = self(batch["x"])
        every = self.all_gather(made, sync_grads=True).flatten(0, 1)
        return torch.nn.functional.cross_entropy(made, batch["more"][0]) + (every @ every.T).logsumexp(1).mean()

options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "devices": 2}
strategies = "ddp", t.LightningStrategy(device_memory="70kB", collectives="host")
found = [t.fitted(Contrasting(), Path(sys.argv[2]) / str(i), way, **options) for i, way in enumerate(strategies)]
saved = found[1][2].strategy.broadcast(found[1][2].checkpoint_callback.best_model_path)
options["max_epochs"] = 3
ways = "ddp", t.LightningStrategy(device_memory="70kB", collectives="fabric")
found += [t.fitted(Contrasting(), Path(sys.argv[2]), way, resume=saved, **options) for way in ways]
for i in (1, 3):
    t.assert_as(found[i], found[i - 1])
decided = [each.plan.decisions for each in (strategies[1], ways[1])]
print(json.dumps([found[1][0], *((d.data_parallel, d.num_micro_batches, d.collectives) for d in decided)]))
"""


@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_as_with_ddp(tmp_path: Path) -> None:
    """Each reads its own rows, and what a step gathers from both has gradients. Either resumes from a checkpoint."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = (str(tmp_path / "script.py"), str(Path(__file__).parent), str(tmp_path))
    both = [Forked(forked.script, *words, env=each) for each in environments(2)]
    lines = []
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        lines.append(json.loads(out.splitlines()[-1]))
    assert lines[0][0] != lines[1][0]
    assert lines[0][1:] == lines[1][1:] == [[2, 2, "host"], [2, 2, None]]


@pytest.mark.filterwarnings("ignore")
def test_what_a_plan_cannot_do_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give 'bf16-true'"):
        fitted(Classifier(), tmp_path, LightningStrategy(), precision="bf16-mixed")
    with pytest.raises(TypeError, match="no option device_memroy"):
        LightningStrategy(device_memroy="1GB")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"2 processes were started, but the trainer has 1 node\(s\) of 1 device\(s\); give"
    ):
        fitted(Classifier(), tmp_path, LightningStrategy())

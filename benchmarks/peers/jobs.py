"""What is trained, by which engine, and what came of it: plain data, so that every engine can have its own process."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal, Self

from planner.models import ModelConfig, from_hf_config, resolve_model

LR = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
WARM_UP_ITERATIONS = 5
COSINE_ITERATIONS = 40  # of the schedule, however few are run: every run of a cell then has the same curve

_LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "tie_word_embeddings": True}
# Sizes that no preset has: for two cores, and for tests.
MODELS: dict[str, dict[str, Any]] = {
    **{
        f"llama-{millions}m": _LLAMA
        | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": num_layers, "vocab_size": 4096}
        | {"num_attention_heads": 12, "num_key_value_heads": 4}
        for millions, num_layers in ((22, 3), (41, 6), (79, 12))
    },
    "llama-tiny": _LLAMA
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}


def model_config(name: str) -> ModelConfig:
    """Return one of :data:`MODELS`, or what ``ullage plan --model`` would take.

    Raises:
        ValueError: there is no such model.
    """
    return from_hf_config(MODELS[name], name) if name in MODELS else resolve_model(name)


def lr_factor(iteration: int) -> float:
    """Return what the learning rate is multiplied by: warm-up, then a cosine down to a tenth."""
    warm_up = min((iteration + 1) / WARM_UP_ITERATIONS, 1.0)
    progress = min(iteration / COSINE_ITERATIONS, 1.0)
    return warm_up * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting of the comparison, equal for all engines.

    Attributes:
        model: see :func:`model_config`.
        dtype: in which forward and backward compute.
        state: type of the master copy of weights and of the moments. ``bf16``, where that computes: the weights are the
            master copy, so nothing else is kept, 8 bytes a parameter with gradients.
        micro_batch: sequences per forward.
        seq_len: tokens of each.
        num_micro_batches: forwards per optimizer step.
        max_norm: gradients are clipped to this norm; 0: they are not.
        device_memory_bytes: most that our plan may use of the device; ``None``: all it has. On a CPU only our plan
            knows such a limit: for the peers, host and device are the same memory.
        compute_threads: of the CPU, that stand in for a device, for every engine; updates may use all cores. 0 where
            a GPU computes.
        recompute: whether peers recompute activations; our plan decides by itself.
    """

    model: str
    dtype: Literal["bf16", "fp32"] = "bf16"
    micro_batch: int = 1
    seq_len: int = 256
    num_micro_batches: int = 1
    max_norm: float = 1.0
    device_memory_bytes: int | None = None
    compute_threads: int = 0
    recompute: bool = False
    state: Literal["bf16", "fp32"] = "fp32"

    @property
    def name(self) -> str:
        """A short name, unique among cells of one run."""
        threads = f"-{self.compute_threads}t" if self.compute_threads else ""
        batch = f"{self.micro_batch}x{self.seq_len}-acc{self.num_micro_batches}"
        state = "-bf16state" if self.state == "bf16" else ""
        return f"{self.model}-{self.dtype}-{batch}-clip{self.max_norm:g}{threads}{state}"

    def like(self, other: "Cell") -> bool:
        """Return whether what is the best setting for another cell is taken as the best for this one too."""
        mine, theirs = ((c.model, c.dtype, c.compute_threads, c.recompute, c.state) for c in (self, other))
        return mine == theirs

    @property
    def weights_are_masters(self) -> bool:
        """Whether the optimizer updates the weights themselves, and keeps no copy in another type."""
        return self.dtype == self.state

    @property
    def num_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.micro_batch * self.seq_len * self.num_micro_batches


@dataclasses.dataclass(frozen=True)
class Job:
    """One process: an engine with its settings trains a cell.

    Attributes:
        cell: what it trains.
        engine: see :data:`benchmarks.peers.engines.ENGINES`.
        settings: of the engine, as its docstring names them; ``lr_factor`` of any engine falsifies the learning rate,
            which the gate must see, and ``step_threads`` sets those of a peer's optimizer, ``spin`` lets
            threads of OpenMP that wait for others keep their cores.
        device: what computes.
        num_threads: of torch in forward and backward.
        num_cores: threads of torch in the optimizer's step, and OMP_NUM_THREADS, which engines with kernels of their
            own read; unless the settings have ``step_threads``.
        num_warm_up, num_timed: iterations.
        plan: file of our plan.
        started_s: seconds since the epoch at which the process was started.
    """

    cell: Cell
    engine: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int = 1
    num_cores: int = 1
    num_warm_up: int = 3
    num_timed: int = 5
    plan: str | None = None
    started_s: float = 0.0

    @property
    def num_iterations(self) -> int:
        """All iterations."""
        return self.num_warm_up + self.num_timed

    @property
    def lr(self) -> float:
        """Peak of the learning rate."""
        return LR * float(self.settings.get("lr_factor", 1.0))

    @property
    def step_threads(self) -> int:
        """Threads of a peer's optimizer."""
        return int(self.settings.get("step_threads", self.num_cores))

    def setting(self, name: str, default: Any) -> Any:
        """Return one of the engine's settings."""
        return self.settings.get(name, default)

    def save(self, path: Path) -> None:
        """Write it for another process."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(cell=Cell(**data.pop("cell")), **data)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one process found.

    Attributes:
        error: why there is nothing else; ``None`` if there is.
        losses: mean loss of every iteration, warm-up included.
        iteration_s: wall seconds of every timed iteration.
        total_s: wall seconds of all timed iterations, until the last update has ended.
        start_up_s: from the start of the process to the first iteration.
        first_iteration_s: what that took: engines that allocate late pay for it here.
        peak_rss_bytes: most resident memory of the process, on the host.
        peak_device_bytes: most that PyTorch's allocator has reserved on a GPU; ``None`` on a CPU.
        detail: what only this engine has to tell.
    """

    error: str | None = None
    losses: tuple[float, ...] = ()
    iteration_s: tuple[float, ...] = ()
    total_s: float = 0.0
    start_up_s: float = 0.0
    first_iteration_s: float = 0.0
    peak_rss_bytes: int = 0
    peak_device_bytes: int | None = None
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it for the driver."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        data |= {key: tuple(data[key]) for key in ("losses", "iteration_s")}
        return cls(**data)

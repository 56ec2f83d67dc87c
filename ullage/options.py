"""What `ullage execute` is asked."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ExecuteOptions:
    """How to run a plan.

    Attributes:
        num_iterations: how many optimizer steps.
        text: what to train on; ``None``: the built-in English text.
        seed: of the weights and of the order of the text.
        lr: learning rate.
        output_dir: where results go; made if it does not exist.
        storage_dir: where what the plan keeps on NVMe is while it trains; ``None``: in ``output_dir``.
        json: print JSON instead of tables.
        device: ``host`` (threads), ``cuda``, or ``auto``: what the plan was made for.
    """

    num_iterations: int = 30
    text: Path | None = None
    seed: int = 0
    lr: float = 1e-3
    output_dir: Path = Path("out")
    storage_dir: Path | None = None
    json: bool = False
    device: Literal["auto", "host", "cuda"] = "auto"

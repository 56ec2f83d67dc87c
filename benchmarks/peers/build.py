"""Compile DeepSpeed's optimizer for the host before anything is timed: ``python -m benchmarks.peers.build``."""

import os
import sys
from pathlib import Path


def compiled(peers: Path) -> bool:
    """Return whether DeepSpeed's optimizer for the host is there: in its wheel, or compiled by an earlier run."""
    return any(next(peers.glob(name), None) for name in ("deepspeed/ops/adam/cpu_adam_op*.so", "**/cpu_adam.so"))


def main() -> None:
    """Compile it, where the engines will look for it."""
    from benchmarks.peers.zero import find_toolkit  # noqa: PLC0415 - imports torch, which who asks above may not have

    peers = Path(os.environ["ULLAGE_PEERS"]).absolute()
    sys.path.append(str(peers))
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(peers / "bin")])  # ninja
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(peers / "extensions"))
    find_toolkit("cuda")
    from deepspeed.ops.op_builder import CPUAdamBuilder  # noqa: PLC0415 - optional

    CPUAdamBuilder().load()


if __name__ == "__main__":
    main()

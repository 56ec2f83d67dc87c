"""Compile DeepSpeed's optimizer for the host before anything is timed: ``python -m benchmarks.peers.build``."""

import os
import sys
from pathlib import Path

from benchmarks.peers.zero import find_toolkit


def main() -> None:
    """Compile it, where the engines will look for it."""
    peers = Path(os.environ["ULLAGE_PEERS"]).absolute()
    sys.path.append(str(peers))
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(peers / "bin")])  # ninja
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(peers / "extensions"))
    find_toolkit("cuda")
    from deepspeed.ops.op_builder import CPUAdamBuilder  # noqa: PLC0415 - optional

    CPUAdamBuilder().load()


if __name__ == "__main__":
    main()

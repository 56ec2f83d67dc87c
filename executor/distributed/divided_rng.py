"""Random numbers of tensor-parallel ranks inside the operators that they divide.

[Note: Divided RNG] Tensor-parallel ranks have the same RNG state, so that dropout of whole activations is the same on
them. Between a column-parallel and a row-parallel module each rank has heads or channels of its own, and the same state
would drop the same values of head i and of head i + n/2. So there each rank draws from a state of its own, as with
Megatron-LM's tracker. It is not kept anywhere: it is a hash of the shared state and the rank. So it is the same when a
segment is recomputed, where the shared state is that of the first pass, and a checkpoint holds it with the shared
state. If anything was drawn, the shared state advances by one number. If nothing was, ranks draw what one process does.
"""

import hashlib
from typing import Any, final

import torch
from torch import nn


@final
class DividedRng:
    """Switches between the RNG state that tensor-parallel ranks share, and one of this rank's own.

    Args:
        rank: number within the tensor-parallel group.
        device: device on which the model draws.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        on_gpu = device.type == "cuda"
        self._rng: Any = torch.cuda if on_gpu else torch.random
        # torch.random's own seeds all devices.
        self._seed: Any = torch.cuda.manual_seed if on_gpu else torch.default_generator.manual_seed
        self._shared: torch.Tensor | None = None
        self._own = torch.empty(0)  # as it began

    def enter(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Begin to draw from this rank's own state: a forward hook of the last column-parallel module."""
        self._shared = None  # a recomputation may have ended before it left, and an error too
        if module.training:
            self._shared = self._rng.get_rng_state()
            digest = hashlib.blake2b(self._shared.numpy().tobytes(), digest_size=8, salt=bytes([self._rank % 256]))
            self._seed(int.from_bytes(digest.digest(), "little") >> 1)
            self._own = self._rng.get_rng_state()

    def leave(self) -> None:
        """Draw from the shared state again, before the row-parallel module."""
        if self._shared is not None:
            has_drawn = not torch.equal(self._own, self._rng.get_rng_state())
            self._rng.set_rng_state(self._shared)
            self._shared = None
            if has_drawn:
                torch.rand((), device=self._device)

"""Time a head with its loss in tiles, beside whole logits: ``python benchmarks/cpu/loss_tiles.py``.

Forward and backward of a head and its cross-entropy, on this machine's CPU. All ways run in one process and take turns;
ratios are medians of the rounds' ratios to whole logits. *in tiles* is what plans do: each tile makes its gradients at
once. *again in backward* is what losses of rows have, where each tile's logits are made twice.
"""

import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.origin import origin, write_result
from executor.module.tiled_logits import tile_head

OUTPUT = Path(__file__).parents[1] / "results" / "cpu_loss_tiles.json"
SIZES: Final = ((896, 65_536, 1024, 256), (2048, 65_536, 1024, 256))
"""Width of the hidden state, vocabulary, tokens, tokens of a tile."""
NUM_ROUNDS: Final = 7
WAYS: Final = {"whole logits": (False, "mean"), "in tiles": (True, "mean"), "again in backward": (True, "none")}


class _Model(nn.Module):
    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, vocab, bias=False, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits


def time_s(model: nn.Module, hidden: Tensor, targets: Tensor, reduction: str) -> float:
    """Return the seconds of one forward and backward."""
    hidden.grad = None
    model.zero_grad()
    begin_s = time.perf_counter()
    functional.cross_entropy(model(hidden).float(), targets, reduction=reduction).mean().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin_s


def row(width: int, vocab: int, num_tokens: int, tile: int) -> dict[str, Any]:
    """Return the times of all ways, each a median, and their ratios."""
    model = _Model(width, vocab)
    hidden = torch.randn(num_tokens, width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab, (num_tokens,))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in track(range(NUM_ROUNDS + 1), description=f"{width} wide"):
        for way, (in_tiles, reduction) in WAYS.items():
            restore = tile_head(model, tile) if in_tiles else None
            times[way].append(time_s(model, hidden, targets, reduction))
            if restore is not None:
                restore()
    rounds = {way: found[1:] for way, found in times.items()}  # the first one warms up
    whole = rounds["whole logits"]
    return {
        "width": width,
        "vocabulary": vocab,
        "tokens": num_tokens,
        "tile": tile,
        "median_s": {way: statistics.median(found) for way, found in rounds.items()},
        "over_whole": {
            way: statistics.median(each / of for each, of in zip(found, whole, strict=True))
            for way, found in rounds.items()
        },
    }


def main() -> None:
    """Time all, and write."""
    begun = origin("torch")
    rows = [row(*sizes) for sizes in SIZES]
    write_result(OUTPUT, begun | {"num_rounds": NUM_ROUNDS, "rows": rows})
    for each in rows:
        print(each["width"], each["over_whole"])


if __name__ == "__main__":
    main()

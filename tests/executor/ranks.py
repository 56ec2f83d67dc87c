"""What tests of several ranks compare."""

import torch


def assert_same_bits(results, expected):
    losses, weights = expected
    for rank, (seen, final) in enumerate(results):
        assert seen == losses[rank], rank
        different = [n for n, w in weights.items() if final[n].tobytes() != w.view(torch.uint8).numpy().tobytes()]
        assert not different, (rank, different)

"""Shards that are put together again."""

import pytest
import torch

from executor.distributed.shards import assemble


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_a_checkpoint_need_not_have_what_has_no_elements(shape: tuple[int, ...]) -> None:
    assemble("empty", {}, torch.empty(shape))
    assemble("empty", {"empty": torch.empty(shape)}, torch.empty(shape))
    with pytest.raises(ValueError, match="shards of full are missing"):
        assemble("full", {}, torch.empty(2, 2))

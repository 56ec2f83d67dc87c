"""Which arguments of a layer are caches of keys and values."""

import torch
import transformers

from executor.module.caches import copy_caches, drop_caches


def test_a_cache_is_known_by_its_class_whatever_its_name():
    filled, mask = transformers.DynamicCache(), torch.ones(1)
    filled.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    arguments = {"cache": filled, "mask": mask, "more": {"of_encoder": transformers.DynamicCache(), "layer": {"a": 1}}}
    assert drop_caches(arguments, 0), "what holds keys of the layer already stays"
    assert arguments == {"cache": filled, "mask": mask, "more": {"of_encoder": None, "layer": {"a": 1}}}
    copy_caches(arguments)
    arguments["cache"].update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert filled.get_seq_length(0) == 2

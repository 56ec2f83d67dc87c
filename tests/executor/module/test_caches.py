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


def test_a_copy_of_an_encoders_and_decoders_cache_shares_neither_of_its_caches():
    filled = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    parts = filled.self_attention_cache, filled.cross_attention_cache
    for part in parts:
        part.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    arguments = {"past_key_values": filled}
    copy_caches(arguments)
    copy = arguments["past_key_values"]
    for part in (copy.self_attention_cache, copy.cross_attention_cache):
        part.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
        assert part.get_seq_length(0) == 5
    assert [part.get_seq_length(0) for part in parts] == [2, 2]


def test_a_layer_of_a_hybrid_model_has_states_in_place_of_keys():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mamba_n_heads": 4}
    config = transformers.GraniteMoeHybridConfig(**sizes, mamba_d_head=16, layer_types=["attention", "mamba"])
    cache = transformers.DynamicCache(config=config)
    assert not drop_caches({"past_key_values": cache}, 1)
    cache.update_conv_state(torch.ones(1, 2, 4), 1)
    assert drop_caches({"past_key_values": cache}, 1)
    assert not drop_caches({"past_key_values": cache}, 0)


def test_what_layers_share_is_no_cache_to_drop():
    shared = transformers.cache_utils.KVSharingDict(full=(torch.ones(1), torch.ones(1)))
    arguments = {"past_key_values": transformers.DynamicCache(), "shared_kv_states": shared}
    assert not drop_caches(arguments, 0)
    assert arguments == {"past_key_values": None, "shared_kv_states": shared}

"""A tenth of the programs train as in memory; ``python tests/programs/run_programs.py`` tries all, also with little."""

import pytest
from amount import ALL
from program_catalogue import IN_MEMORY, Program, programs
from run_programs import CPU, outcome, trained

# fmt: off
TRIED = {
    "loops": ("r_drop", "gradual_unfreezing", "batches_without_backward", "closures"),
    "edits": (
        "last_layer_in_the_loss", "loss_scaling", "gradients_of_rows", "gradient_surgery",
        "gradients_from_autograd_grad", "hooks_on_accumulated_gradients", "sharpness_aware",
        "distance_to_initial_weights", "planned_penalty",
        "lookahead", "weights_made_again", "optimizer_of_ones_own", "checkpoints_between_blocks",
        "weights_kept_by_a_function", "derivatives_in_the_loss", "parts_without_gradients",
        "weights_given_by_functional_call",
        "derivatives_along_a_direction", "gradients_of_zero", "norms_after_the_step",
        "thawed_before_backward", "averages_put_in_for_evaluation", "masked_gradients", "clipped_by_row",
        "penalty_on_gradients", "curvature_from_gradients", "parts_evaluated_and_written", "compiled_later",
        "forwards_replaced_later", "nodes_that_accumulate", "moments_before_the_step", "autocast_around_forward",
    ),
    "state": (
        "global_centre", "closures", "inputs_that_advance", "context_variable", "attention_chosen_around_forward",
        "features_in_the_loss", "numpy_counts", "helper_object", "cache_under_another_name",
        "weights_made_once", "momentum_encoder", "codebook_in_a_frozen_parameter",
        "bounded_by_other_data", "hooks_added_later", "hooks_around_forward", "counting_hooks_on_gradients",
        "counts_in_a_counter", "counts_in_many_places", "counts_in_slots",
        "fields_that_blocks_change", "tables_in_a_cache",
    ),
    "modules": ("layer_scale", "pruned", "parts_that_do_not_run", "routed_experts"),
    "models": ("t5", "llava_with_text_alone", "tokens_ahead", "tables_before_blocks"),
    "operators": (
        "complex_parameters", "embeddings_of_bounded_norm", "outputs_that_nothing_uses", "weights_that_forward_makes",
    ),
    "adapters": (
        "trained_tokens", "prefix_tuning", "lora_on_parameters", "adalora", "shira", "context_prompt_tuning",
    ),
    "trainers": ("online_preferences", "cross_encoder_with_cached_gradients", "resumed_by_accelerate"),
    "optimizers": (
        "rmsprop_lr_eps_momentum_centered", "own_class", "projected_in_some_cases", "state_by_size",
        "sharpness_aware_class", "parameters_of_the_loss", "group_added_later",
    ),
}
# fmt: on


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "program", [p for kind, names in TRIED.items() for p in programs(kind) if p.name in names], ids=lambda p: p.name
)
def test_programs_train_as_in_memory(program: Program) -> None:
    found = outcome(program, trained(program, IN_MEMORY), tight=ALL or program.kind in ("edits", "state"))
    assert (found.refused, found.failed) == ("", "")
    assert found.off is not None
    assert found.off <= CPU.bound

"""Figures of a point that nobody has planned."""

from ullage.whatif.study import Figures


def figures(tokens_per_s: float, num_devices: int = 8, num_nodes: int = 1) -> Figures:
    numbers = dict.fromkeys(("forward_s", "backward_s", "update_s", "loop_s", "model_flop_per_s"), 0.0)
    return Figures(
        **numbers,
        iteration_s=1.0,
        tokens_per_iteration=1,
        tokens_per_s=tokens_per_s,
        num_devices=num_devices,
        num_nodes=num_nodes,
        critical_s={"compute": 1.0},
        busy_s={},
        converged=True,
        memory={},
        choice="",
        placement="",
        engines={},
        num_simulations=1,
    )

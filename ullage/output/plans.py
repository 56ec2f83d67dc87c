"""Lines about a plan that screens and reports share."""

from planner.bounds.proof import Certificate
from planner.models.captured import CapturedModel, Model
from planner.models.parameters import num_parameters
from planner.plan.document import Plan
from ullage.output.formatting import percent, si

_REACH = {
    "never": "on device and host",
    "activations": "that also offloads activations",
    "nvme": "that also uses NVMe and offloads activations",
}


def model_line(model: Model) -> str:
    """Return a model's sizes and number of parameters; for a captured one, its function and its loss."""
    if isinstance(model, CapturedModel):
        num_repeated = sum(bool(segment.path) for segment in model.segments)
        return (
            f"{model.name}({', '.join(map(str, model.inputs))}): captured, {num_repeated} repeated blocks, "
            f"{si(model.forward_flop, 'FLOP')} forward, the loss is {model.loss}; {model.num_params:,} parameters"
        )
    experts = f", {model.experts_per_token} of {model.num_experts} experts" if model.num_experts else ""
    return (
        f"{model.name}: {model.family}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"MLP {model.expert_ffn_hidden_size or model.ffn_hidden_size}{experts}, {model.num_attention_heads} heads, "
        f"{model.num_key_value_heads} key/value heads, vocabulary {model.vocab_size}; "
        f"{num_parameters(model):,} parameters"
    )


def mfu(plan: Plan) -> float:
    """Return model FLOP/s over the best rate that the profile has for one matrix product."""
    best = plan.hardware.device.gemm[plan.decisions.precision.weights].best_rate_per_s()
    return plan.prediction.model_flop_per_s / best


def gap_line(plan: Plan) -> str:
    """Return how far from the best schedule a plan is at most, and the parts of that gap."""
    certificate, iteration_s = plan.certificate, plan.prediction.iteration_s
    return (
        f"within {percent(certificate.gap(iteration_s))}: every schedule {_REACH[plan.asked.storage]} provably "
        f"takes at least {si(certificate.bound_s, 's')} ({gap_parts_words(certificate, iteration_s)})"
    )


def gap_parts_words(certificate: Certificate, iteration_s: float) -> str:
    """Return the parts of the gap, in words."""
    return ", ".join(f"{percent(part)} {name}" for name, part in certificate.gap_parts(iteration_s).items())

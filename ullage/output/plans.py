"""Text about a plan that several results share."""

from planner.bounds.proof import Certificate
from planner.models.captured import CapturedModel, Model, counted
from planner.models.parameters import num_parameters
from planner.optimizers import OPTIMIZERS
from planner.plan.document import EngineRow, Plan
from ullage.output.formatting import percent, si
from ullage.rivals.decisions import LAYERS_IN_TURN

_REACH = {
    "never": "that offloads no activations",
    "activations": "that may offload activations",
    "nvme": "that may use NVMe and offload activations",
}


def model_line(model: Model) -> str:
    """Return a model's sizes and number of parameters; for a captured model, its function and its loss."""
    if isinstance(model, CapturedModel):
        num_repeated = sum(bool(segment.path) for segment in model.segments)
        trained = f", {model.num_trained:,} of them trained" if model.num_trained < model.num_params else ""
        return (
            f"{model.name}({', '.join(map(str, model.inputs))}): captured, {num_repeated} repeated blocks, "
            f"{si(model.forward_flop, 'FLOP')} forward, the loss is {model.loss}; {model.num_params:,} parameters"
            f"{trained}"
        )
    experts = f", {model.experts_per_token} of {model.num_experts} experts" if model.num_experts else ""
    return (
        f"{model.name}: {model.family}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"MLP {model.expert_ffn_hidden_size or model.ffn_hidden_size}{experts}, {model.num_attention_heads} heads, "
        f"{model.num_key_value_heads} key/value heads, vocabulary {model.vocab_size}; "
        f"{num_parameters(model):,} parameters"
    )


def engine_fits(row: EngineRow) -> str:
    """Return whether an engine fits; if not, its missing memory and the nearest set-up in which it fits."""
    if row.fits:
        return "yes"
    lacking = " and ".join(f"{si(n, 'B')} of {tier} memory" for tier, n in row.missing_bytes.items())
    nearest = f"; fits with {row.nearest} ({si(row.nearest_iteration_s, 's')})" if row.nearest_iteration_s else ""
    return f"lacks {lacking}{nearest}"


def engine_line(row: EngineRow) -> str:
    """Return in one line whether an engine fits, and its iteration time."""
    time = f" ({si(row.iteration_s, 's')} per iteration; {engine_setting(row)})" if row.fits and row.iteration_s else ""
    return f"engine {row.name} {'fits' if row.fits else engine_fits(row)}{time}"


def engine_setting(row: EngineRow) -> str:
    """Return an engine's settings, and its change of numerics if it has one."""
    return row.setting + (f"; changes numerics: {row.numerics}" if row.numerics else "")


def tokens_per_iteration(plan: Plan) -> int:
    """Return the tokens of one iteration over all ranks; for a captured model, the samples."""
    return plan.decisions.num_sequences * plan.seq_len


def batch_line(plan: Plan) -> str:
    """Return the batch of one iteration, the data types, and the optimizer."""
    decided, items = plan.decisions, counted(plan.model)
    sequences = f"{plan.seq_len} tokens x {decided.micro_batch} sequences"
    accumulated = f" x {decided.num_micro_batches} micro-batches" if decided.num_micro_batches > 1 else ""
    products = f" with products in {decided.precision.products}" if decided.precision.products else ""
    ranks = "device(s)" if decided.num_devices == decided.data_parallel else "data-parallel rank(s)"
    ranks = f"groups of {decided.context_parallel} {ranks}" if decided.context_parallel > 1 else ranks
    master = " (also the master copy)" if decided.precision.rounds else ""
    per_rank = f"{sequences if items == 'tokens' else f'{decided.micro_batch} samples'}{accumulated}"
    return (
        f"{per_rank} x {decided.num_readers} {ranks} = {tokens_per_iteration(plan):,} {items}, "
        f"{decided.precision.weights}{master}{products}, "
        f"{OPTIMIZERS[decided.optimizer].words}, gradients {'clipped' if decided.clip else 'not clipped'}"
    )


def mfu(plan: Plan) -> float:
    """Return the model's FLOP/s over the profile's best rate of a matrix product."""
    precision = plan.decisions.precision
    best = plan.hardware.device.gemm[precision.products or precision.weights].best_rate_per_s()
    return plan.prediction.model_flop_per_s / best


def gap_words(plan: Plan) -> tuple[str, str]:
    """Return the maximum gap between a plan and the best schedule, and the bound with the parts of that gap."""
    certificate, iteration_s = plan.certificate, plan.prediction.iteration_s
    return (
        f"within {percent(certificate.gap(iteration_s))}",
        (
            f"every schedule {_REACH[plan.constraints.storage]} provably takes at least "
            f"{si(certificate.bound_s, 's')} ({gap_parts_words(certificate, iteration_s)})"
        ),
    )


def faster_line(plan: Plan) -> str:
    """Return the engines that are faster with the same numerics, and the reason; empty if there are none."""
    ours_s = plan.prediction.iteration_s
    rows = [row for row in plan.engines if row.fits and row.iteration_s and row.numerics is None]
    names: dict[str, list[str]] = {}
    for row in rows:
        if (row.iteration_s or ours_s) < ours_s:
            names.setdefault(_reason_words(row, plan), []).append(row.name)
    return "; ".join(f"{', '.join(engines)}: {way}" for way, engines in names.items())


def _reason_words(row: EngineRow, plan: Plan) -> str:
    """Return why an engine is faster than a plan, and the option with which plans do the same, if there is one."""
    if LAYERS_IN_TURN in row.setting:
        moves = "by moving layers from device to device instead of gathering them"
        return f"{moves}, which plans cannot do; the bound above does not cover it"
    if "offloaded" in row.setting and plan.constraints.storage == "never":
        return "by offloading activations, which plans do with --storage activations"
    return "by moving data in a way that plans cannot; the bound above does not cover it"


def gap_parts_words(certificate: Certificate, iteration_s: float) -> str:
    """Return the parts of the gap, in words."""
    return ", ".join(f"{percent(part)} {name}" for name, part in certificate.gap_parts(iteration_s).items())

"""The configuration of DeepSpeed nearest to a plan, and the parts of the plan that it cannot express."""

from typing import Any, Final

from planner.decisions import Decisions, Place
from planner.plan.document import Plan

_TYPES: Final = {"adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion"}
_LR: Final = 1e-3  # the default of `ullage execute`


def export_config(plan: Plan, nvme_path: str = "/local_nvme") -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of DeepSpeed nearest to a plan, and the parts of the plan that it cannot express.

    Twin-Flow's ``ratio`` is the fraction of parameters whose optimizer state the plan keeps off the device. If the plan
    streams state through the device for updates, DeepSpeed updates it on the CPU.

    Args:
        plan: any plan whose optimizer DeepSpeed has, so not Muon.
        nvme_path: a folder on the drives, for a plan that uses NVMe.

    Raises:
        ValueError: DeepSpeed does not have the plan's optimizer.
    """
    decided = plan.decisions
    placed = decided.params_by_place(plan.units())
    total = sum(placed.values())
    away = total - placed[Place.GPU]
    fetched = any(unit.fetched for unit in decided.units.values())
    zero: dict[str, Any] = {"stage": 3 if away or fetched else decided.zero_stage}
    if placed[Place.NVME]:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": nvme_path, "pin_memory": True}
        if decided.num_nvme_slots > 1:
            zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": decided.num_nvme_slots > 2}
    elif away:
        # Round up, because more state on the device than planned may not fit.
        ratio = min(-(-away * 1000 // total) / 1000, 1.0)
        zero["offload_optimizer"] = {"device": "cpu", "ratio": ratio, "pin_memory": True}
    if fetched:
        on_nvme = any(unit.params == "nvme" for unit in decided.units.values())
        zero["offload_param"] = {"device": "nvme" if on_nvme else "cpu", "pin_memory": True}
        if on_nvme:
            zero["offload_param"]["nvme_path"] = nvme_path
    if zero["stage"]:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if zero["stage"] == 3:
        zero["sub_group_size"] = decided.subgroup_params
    config = {
        "train_batch_size": decided.num_sequences,
        "train_micro_batch_size_per_gpu": decided.micro_batch,
        "gradient_accumulation_steps": decided.num_micro_batches,
        "gradient_clipping": 1.0 if decided.clip else 0.0,
        "bf16": {"enabled": decided.precision.weights == "bf16"},
        "optimizer": {"type": _type_of(decided), "params": {"lr": _LR}},
        "zero_optimization": zero,
    }
    return config, [*_lost_of_ranks(decided), *_lost_of_updates(decided, placed), *_lost_of_units(plan)]


def _type_of(decided: Decisions) -> str:
    if decided.optimizer not in _TYPES:
        raise ValueError(
            f"the plan is for {decided.optimizer}, which is not exported to DeepSpeed; plan with --optimizer "
            f"{' or '.join(_TYPES)}"
        )
    return _TYPES[decided.optimizer]


def _lost_of_ranks(decided: Decisions) -> list[str]:
    lost = []
    if decided.tensor_parallel > 1:
        lost.append(f"layers are shared by {decided.tensor_parallel} ranks: give DeepSpeed a model that does so (mpu)")
    if decided.pipeline_parallel > 1:
        lost.append(f"{decided.pipeline_parallel} pipeline stages: write the model as a PipelineModule")
    if decided.expert_parallel > 1:
        lost.append(f"experts are shared by {decided.expert_parallel} ranks: use DeepSpeed's own MoE layers")
    if decided.context_parallel > 1:
        lost.append(f"sequences are shared by {decided.context_parallel} ranks: use DeepSpeed's Ulysses")
    return lost


def _lost_of_updates(decided: Decisions, placed: dict[Place, int]) -> list[str]:
    lost, total = [], sum(placed.values())
    if placed[Place.STREAM]:
        lost.append(
            f"{100 * placed[Place.STREAM] / total:.1f} % of the updates are streamed through the device; DeepSpeed "
            "makes them on the CPU"
        )
    if 0 < placed[Place.NVME] < total:
        lost.append("only part of the optimizer state is on NVMe; DeepSpeed puts all of it there")
    if placed[Place.GPU] < total and decided.overlap_next_forward:
        lost.append("updates overlap with the next forward; DeepSpeed begins the next iteration after all updates")
    if 0 < placed[Place.GPU] < total:
        lost.append("the plan chooses which parameters stay on the device; DeepSpeed takes the first ones")
    return lost


def _lost_of_units(plan: Plan) -> list[str]:
    lost, decided, units = [], plan.decisions, plan.units()
    stay = {name for unit in units for name in (*unit.shared_units, *([unit.name] if unit.shared_units else []))}
    movable = [unit for unit in units if unit.num_params and unit.name not in stay]
    num_fetched = sum(decided.units[unit.name].fetched for unit in movable)
    if 0 < num_fetched < len(movable):
        lost.append(
            f"parameters of {num_fetched} of {len(movable)} units leave the device; in DeepSpeed all parameters do"
        )
    again = {unit.segment: decided.units[unit.name].activations for unit in units if unit.can_swap}
    ways = set(again.values())
    if ways == {"recompute"}:
        lost.append("activations are recomputed: call model.gradient_checkpointing_enable()")
    elif ways & {"offload", "offload-nvme"}:
        lost.append("activations are offloaded; DeepSpeed can only recompute them (gradient_checkpointing_enable)")
    elif "recompute" in ways:
        count = sum(way == "recompute" for way in again.values())
        lost.append(f"activations of {count} of {len(again)} layers are recomputed; DeepSpeed recomputes all or none")
    return lost

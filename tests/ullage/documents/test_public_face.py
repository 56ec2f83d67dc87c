"""What ``ullage`` exports is a list, and a new name on it is a decision; all that a user needs is on it."""

import ast
import importlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import ullage
from executor.checkpoint.files.system_calls import Files

ROOT = Path(__file__).parents[3]
FUNCTIONS = {
    "bound_tokens_per_s",
    "details",
    "example_prices",
    "explain",
    "from_hf_config",
    "list_models",
    "list_profiles",
    "packaged_names",
    "page_assets",
    "page_data",
    "profile_of",
    "report_html",
    "study",
    "summary",
    "to_hf_config_dict",
    "what_would_fit",
    "capture_module",
    "checkpoint_at",
    "load",
    "load_plan",
    "load_profile",
    "memory_folder",
    "offloaded",
    "plan",
    "prepare",
    "replan",
    "resolve_model",
    "restore",
    "save",
    "simulate",
}
CLASSES = {
    "Part",
    "Prices",
    "Remedy",
    "Study",
    "AdamW8bit",
    "AdamWBf16",
    "CapturedInput",
    "CapturedModel",
    "Checkpoint",
    "Checkpoints",
    "Decisions",
    "Level",
    "Lion",
    "Muon",
    "Loaded",
    "ModelConfig",
    "OffloadedOptimizer",
    "Options",
    "Outcome",
    "Plan",
    "Precision",
    "Prediction",
    "Replanned",
    "HardwareProfile",
    "Request",
    "Resumed",
    "Session",
    "Simulation",
    "Timeline",
}
ERRORS = {
    "ActivationError",
    "AuditError",
    "BindingError",
    "CaptureError",
    "CheckpointError",
    "CompileError",
    "DamagedError",
    "DeviceMemoryError",
    "GradientError",
    "InfeasibleError",
    "LaneError",
    "ModelConfigError",
    "NoFormulasError",
    "OutOfOrderError",
    "PlanError",
    "ProfileError",
    "RankError",
    "OutOfMemoryError",
    "StorageError",
    "UnknownModelError",
}
# Raised by commands, or caught before they reach who calls a public function.
OF_COMMANDS = {
    "CaseError",
    "CheckpointsError",
    "SignalledError",
    "UnequalError",  # never leaves a capture
    "LongLoopError",  # likewise
    "LeftOutError",  # never leaves `ullage validate`
}


def test_public_names() -> None:
    assert set(ullage.__all__) == FUNCTIONS | CLASSES | ERRORS
    assert ullage.__all__ == sorted(ullage.__all__, key=lambda name: (name.lower(), name))
    assert set(ullage.__all__) <= set(dir(ullage))
    assert all(inspect.isfunction(getattr(ullage, name)) for name in FUNCTIONS)
    assert all(issubclass(getattr(ullage, name), Exception) for name in ERRORS)
    assert all(inspect.isclass(getattr(ullage, name)) for name in CLASSES)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        ullage.plam  # noqa: B018


def test_public_names_are_documented_and_typed() -> None:
    stated = {
        alias.asname
        for node in ast.walk(ast.parse((ROOT / "ullage" / "__init__.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert stated - {None} == set(ullage.__all__)  # what a type checker sees
    assert [name for name in ullage.__all__ if not inspect.getdoc(getattr(ullage, name))] == []


def test_every_error_is_public_or_of_commands_alone() -> None:
    defined = {
        node.name
        for package in ("hwprofiles", "planner", "executor", "ullage")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }
    assert defined == ERRORS | OF_COMMANDS


@pytest.mark.parametrize("name", sorted(FUNCTIONS | {"Checkpoints"}))
def test_classes_in_public_signatures_are_public(name: str) -> None:
    public = getattr(ullage, name)
    hints = typing.get_type_hints(public.__init__ if inspect.isclass(public) else public)
    found: set[type] = set()
    waiting = list(hints.values())
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        if inspect.isclass(hint) and hint.__module__.partition(".")[0] in {
            "hwprofiles",
            "planner",
            "executor",
            "ullage",
        }:
            found.add(hint)
    found.discard(Files)  # only tests replace them
    assert found <= {getattr(ullage, public) for public in ullage.__all__}


def test_a_star_imports_all_and_planning_loads_no_torch() -> None:
    code = "import sys; import ullage; ullage.Request, ullage.InfeasibleError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    module = importlib.import_module("ullage")
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_a_precision_has_a_name() -> None:
    model, machine = ullage.resolve_model("opt-125m"), ullage.load_profile("h100")
    assert ullage.Request(model, machine, precision="fp32") == ullage.Request(
        model, machine, precision=ullage.Precision(weights="fp32")
    )
    with pytest.raises(ValueError, match="precision is 'fp16', which cannot be planned; give one of bf16, fp32"):
        ullage.Request(model, machine, precision="fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision is 'fp16', which cannot be planned; give one of bf16, fp32"):
        ullage.plan("opt-125m", precision="fp16")  # type: ignore[arg-type]

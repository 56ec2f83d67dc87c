"""Versions of other packages: bounds are versions that were tried, and what may change without notice is listed."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BOUND = re.compile(r"([\w-]+)[^;>]*>=([\d.]+)")
TABLE = re.compile(r"^\| `([\w-]+)` \| (\d+\.[\d.]+)", re.MULTILINE)
OF_USERS = ("execute", "finetune", "report", "remote", "completion", "parquet", "lightning")
LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "numba", "peft", "torch", "torchao", "transformers", "trl")
UNDOCUMENTED = (
    "numba.core",
    "torchao.float8.float8_",
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.integrations.bitsandbytes",
    "transformers.quantizers.base",
)
"""Modules whose names have no underscore, but that have no documentation either."""
INTERNALS = {
    "numba.core.cgutils.get_or_insert_function",
    "numba.core.config",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey.ADInplaceOrView",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._storage_Use_Count",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C._current_autograd_node",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._functorch.TransformType.Grad",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._will_engine_execute_node",
    "torch._C._current_graph_task_id",
    "torch._VF",
    "torch._dynamo.allow_in_graph",
    "torch._dynamo.config.recompile_limit",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._functorch.eager_transforms",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._functorch.vmap",
    "torch._fused_adam_",
    "torch._fused_adamw_",
    "torch._fused_sgd_",
    "torch._meta_registrations._create_grouped_mm_output_tensor",
    "torch._scaled_mm",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor.numpy",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._set_pg_timeout",
    "torch.distributed.distributed_c10d._world.group_count",
    "torch.nn.Module._call_impl.__code__",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.conv._ConvNd",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
    "torch.nn.utils.parametrize._cache",
    "torch.nn.utils.stateless._reparametrize_module",
    "torch.nn.utils.parametrize._cache_enabled",
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.ops.aten._scaled_mm",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils.checkpoint._StopRecomputationError",
    "torchao.float8.float8_linear.Float8Linear",
    "torchao.float8.float8_utils.tensor_to_scale",
    "torchao.float8.float8_utils.to_fp8_saturated",
    "transformers.conversion_mapping.get_model_conversion_mapping",
    "transformers.core_model_loading.PrefixChange",
    "transformers.core_model_loading.dot_natural_key",
    "transformers.core_model_loading.rename_source_key",
    "transformers.integrations.bitsandbytes.replace_with_bnb_linear",
    "transformers.quantizers.base.get_keys_to_not_convert",
}


def test_lower_bounds_are_versions_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tried = dict(TABLE.findall((ROOT / "docs/versions.md").read_text(encoding="utf-8")))
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    bounds = dict(match.groups() for match in map(BOUND.match, needed) if match)
    bounds["python"] = project["requires-python"].removeprefix(">=")
    assert {name: bounds.get(name) for name in tried} == {
        name: ".".join(version.split(".")[: bounds[name].count(".") + 1]) for name, version in tried.items()
    }
    for_users = [*project["dependencies"], *(each for extra in OF_USERS for each in extras[extra])]
    assert {re.match(r"[\w-]+", each)[0] for each in for_users} <= tried.keys()


def internals(source: str) -> Iterator[str]:
    """Yield what a module uses of other packages that may change without notice."""
    names: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            names |= {root: root for alias in node.names for root in alias.name.split(".")[:1] if not alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= found
            yield from filter(is_internal, found.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := dotted(node)):
            root, _, rest = path.partition(".")
            if is_internal(full := f"{names.get(root, '')}.{rest}"):
                yield full


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c``, or nothing if the expression is not of names alone."""
    if isinstance(node, ast.Name):
        return node.id
    below = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{below}.{node.attr}" if below else ""


def is_internal(path: str) -> bool:
    library, *parts = path.split(".")
    if library not in LIBRARIES:
        return False
    return path.startswith(UNDOCUMENTED) or any(re.match(r"_(?!_)", part) for part in parts)


def test_internals_of_other_packages_are_these_and_are_there() -> None:
    files = [
        file for package in ("hwprofiles", "planner", "executor", "ullage") for file in (ROOT / package).rglob("*.py")
    ]
    used = {path for file in files for path in internals(file.read_text(encoding="utf-8"))}
    whole = {path for path in used if not any(other.startswith(f"{path}.") for other in used)}
    assert whole == INTERNALS, "try the oldest and the newest versions of docs/versions.md, then list it here"
    assert [path for path in INTERNALS if not is_there(path)] == []


def is_there(path: str) -> bool:
    found: Any = None
    parts = path.split(".")
    for i, part in enumerate(parts):
        found = getattr(found, part, None) if i else None
        if found is None:
            try:
                found = importlib.import_module(".".join(parts[: i + 1]))
            except ImportError:
                return False
    return True

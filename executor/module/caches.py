"""Key-value caches among the arguments of a layer that runs again, or once for each tile."""

from typing import Any, Final

from executor.callbacks import copied_cache

# Names of the key-value cache among arguments of layers of ``transformers``.
_CACHES: Final = ("past_key_values", "past_key_value", "layer_past")


def drop_caches(arguments: dict[str, Any], layer: int | None) -> bool:
    """Remove key-value caches, which another run would fill a second time. ``transformers`` does the same.

    Return whether a cache stays, because it already holds keys and values of the layer (prefix tuning).
    """
    stays = False
    for scope in _scopes(arguments):
        for name in _CACHES:
            cache: Any = scope.get(name)
            if layer is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length(layer):
                stays = True
            elif cache is not None:
                scope[name] = None
        if scope.get("use_cache"):
            scope["use_cache"] = False
    return stays


def copy_caches(arguments: dict[str, Any]) -> None:
    """Let a layer add its keys and values to a copy of the cache, so that recomputation starts from the same cache."""
    for scope in _scopes(arguments):
        for name in _CACHES:
            if scope.get(name) is not None:
                scope[name] = copied_cache(scope[name])


def _scopes(arguments: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return (arguments, *(value for value in arguments.values() if type(value) is dict))

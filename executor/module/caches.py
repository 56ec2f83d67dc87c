"""Key-value caches among the arguments of a layer that runs again, or once for each tile."""

from typing import Any, Final

from torch import nn

from executor.callbacks import copied_cache, is_cache

# Names of the key-value cache among arguments of layers of ``transformers``, whose older ones are tuples.
_CACHES: Final = ("past_key_values", "past_key_value", "layer_past")


def layer_number(module: nn.Module) -> int | None:
    """Return the number by which a layer of ``transformers`` finds its part of a cache; ``None`` if it has none."""
    numbers = (vars(inner).get("layer_idx") for inner in module.modules())
    return next((number for number in numbers if isinstance(number, int)), None)


def drop_caches(arguments: dict[str, Any], layer: int | None) -> bool:
    """Remove key-value caches, which another run would fill a second time. ``transformers`` does the same.

    Return whether a cache stays, because it already holds keys and values of the layer (prefix tuning).
    """
    stays = False
    for scope in _scopes(arguments):
        for name, cache in _caches(scope):
            if layer is not None and is_cache(cache) and _holds(cache, layer):
                stays = True
            else:
                scope[name] = None
        if scope.get("use_cache"):
            scope["use_cache"] = False
    return stays


def _holds(cache: Any, layer: int) -> bool:
    """Return whether a cache has keys and values of a layer, or states, as linear attention has, without a length."""
    own: Any = dict(enumerate(getattr(cache, "layers", ()))).get(layer)
    states = getattr(own, "has_previous_state", {})
    if states and not is_cache(own):
        return any(states.values())
    return any(states.values()) or bool(cache.get_seq_length(layer))


def copy_caches(arguments: dict[str, Any]) -> None:
    """Let a layer add its keys and values to a copy of the cache, so that recomputation starts from the same cache."""
    for scope in _scopes(arguments):
        for name, cache in _caches(scope):
            scope[name] = copied_cache(cache)


def _caches(scope: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, value) for name, value in scope.items() if value is not None and (name in _CACHES or is_cache(value))
    ]


def _scopes(arguments: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return (arguments, *(value for value in arguments.values() if type(value) is dict))

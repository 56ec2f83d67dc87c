"""``optimizer.state``, whose tensors are elsewhere."""

import collections
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, final

import torch

_Entry = dict[str, Any]


def _reading(name: str) -> Callable[..., Any]:
    method = getattr(collections.defaultdict, name)

    @functools.wraps(method)
    def call(self: "HeldState", *args: Any, **kwargs: Any) -> Any:
        self.read()
        return method(self, *args, **kwargs)

    return call


@final
class HeldState(collections.defaultdict[torch.Tensor, _Entry]):
    """State of all parameters: copies on the host, which are read at the first use and kept until :meth:`settle`.

    Which parameters have state (``len``, ``in``, loops over them) can be asked for without copies. Ranks use it
    together. What was taken from it is a copy once the next iteration begins: take it anew.

    Args:
        held: returns the parameters that have state.
        read: returns each parameter's state.
        write: sets the state of parameters; ``{}`` is none.
    """

    def __init__(
        self,
        held: Callable[[], Collection[torch.Tensor]],
        read: Callable[[], Mapping[torch.Tensor, _Entry]],
        write: Callable[[Mapping[torch.Tensor, _Entry]], None],
    ) -> None:
        super().__init__(dict)
        self._held, self._read, self._write = held, read, write
        self._seen: dict[torch.Tensor, dict[str, tuple[Any, int]]] | None = None

    def __len__(self) -> int:
        """Return the number of parameters that have state."""
        return len(self._held()) if self._seen is None else super().__len__()

    def __contains__(self, parameter: object) -> bool:
        """Return whether a parameter has state."""
        return any(parameter is one for one in self._held()) if self._seen is None else super().__contains__(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return the parameters that have state, one after another."""
        return iter(self._held()) if self._seen is None else super().__iter__()

    def read(self) -> None:
        """Read the state, if it is not there."""
        if self._seen is None:
            found = self._read()
            self._seen = {parameter: _marks(entry) for parameter, entry in found.items()}
            self.update(found)

    def settle(self) -> None:
        """Write what has changed since it was read, and forget all of it. Raises ValueError if it cannot be written."""
        if (seen := self._seen) is None:
            return
        now = dict(self)
        self.clear()
        self._seen = None
        changed = {p: now.get(p, {}) for p in now | seen if _differs(seen.get(p, {}), _marks(now.get(p, {})))}
        if changed:
            self._write(changed)


_METHODS: Final = (
    *(f"__{name}__" for name in ("getitem", "setitem", "delitem")),
    *("get", "setdefault", "pop", "popitem", "update", "clear", "keys", "values", "items", "copy"),
)
for _name in _METHODS:
    setattr(HeldState, _name, _reading(_name))


def _marks(entry: Mapping[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return an entry's values, each with the number that writes to a tensor change."""
    return {key: (value, getattr(value, "_version", 0)) for key, value in entry.items()}


def _differs(seen: Mapping[str, tuple[Any, int]], now: Mapping[str, tuple[Any, int]]) -> bool:
    return seen.keys() != now.keys() or any(
        value is not now[key][0] or version != now[key][1] for key, (value, version) in seen.items()
    )

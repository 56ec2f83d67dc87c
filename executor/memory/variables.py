"""The variables that the methods, hooks and functions of modules use, and that are no attribute of a module.

They are global variables, variables around a function, attributes of classes, and values that a function is made with:
defaults of its arguments, arguments of a ``functools.partial``, and the object whose method it is.
"""

import contextlib
import dis
import functools
import inspect
import logging
import sys
import types
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

_OUR_OWN: Final = frozenset({"executor", "planner", "ullage"})
_CONSTANT: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger, nn.Module)
_GLOBAL: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_NO_METHODS: Final = frozenset({"__class__", "__doc__", "__dict__", "__weakref__", "__module__"})
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@final
class Variables(MutableMapping[str, Any]):
    """Variables of one scope, by name, as far as they exist: of a file, a class, an object, or around a function."""

    def __init__(self, scope: Any, names: Iterable[str]) -> None:
        """Take some names of a dictionary, class or object with slots, or of a dictionary of cells."""
        self._scope, self._names = scope, tuple(names)

    def __getitem__(self, name: str) -> Any:
        if isinstance(self._scope, type):
            return vars(self._scope)[name]
        if not isinstance(self._scope, dict):
            try:
                return getattr(self._scope, name)
            except AttributeError:  # an empty slot
                raise KeyError(name) from None
        value = self._scope[name]
        if not isinstance(value, types.CellType):
            return value
        try:
            return value.cell_contents
        except ValueError:  # an empty cell
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(self._scope, dict):
            setattr(self._scope, name, value)
        elif isinstance(cell := self._scope.get(name), types.CellType):
            cell.cell_contents = value
        else:
            self._scope[name] = value

    def __delitem__(self, name: str) -> None:
        if not isinstance(self._scope, dict):
            delattr(self._scope, name)
        elif isinstance(cell := self._scope[name], types.CellType):
            del cell.cell_contents
        else:
            del self._scope[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def slots_of(value: object) -> Variables:
    """Return what an object holds in slots (``__slots__``)."""
    held = [each for base in type(value).__mro__ for each in vars(base).items()]
    return Variables(value, [name for name, each in held if inspect.ismemberdescriptor(each)])


class Used:
    """What the functions of modules use: methods, hooks, functions in attributes, and functions and classes of these.

    So does a ``step``, if there is one: a function that calls the modules.

    Attributes:
        values: what functions are made with.
        codes: the code of all these functions.
    """

    def __init__(self, modules: Iterable[nn.Module], step: Any = None) -> None:
        self.values: list[Any] = []
        self.codes: set[types.CodeType] = set()
        self._classes: set[type] = set()
        self._functions: dict[int, types.FunctionType] = {}
        self._names: dict[int, tuple[Any, dict[str, None]]] = {}  # by ``id`` of the scope or cell
        self._left: list[Any] = [step]
        if isinstance(step, types.FunctionType) and _package(step) in _OUR_OWN:  # of a trainer, which is the user's
            self._made_with([cell.cell_contents for cell in step.__closure__ or ()])
        modules = list(modules)
        self._left += hooks_of(modules)
        for module in modules:
            self._left += [type(module), *vars(module).values()]
        while self._left:
            self._follow(self._left.pop())

    @property
    def variables(self) -> list[Variables]:
        """Variables, by scope."""
        return [Variables(scope, names) for scope, names in self._names.values() if names]

    def _follow(self, value: Any) -> None:
        if isinstance(value, type):
            for each in set(_own_classes(value)) - self._classes:
                self._follow_class(each)
        elif isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif isinstance(value, functools.partial | types.MethodType):
            if _package(_innermost(value)) in _OUR_OWN:
                return
            if isinstance(value, types.MethodType):
                self._made_with((value.__func__, value.__self__))
            else:
                self._made_with((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, staticmethod | classmethod | property):
            self._left.append(value.fget if isinstance(value, property) else value.__func__)
        elif not isinstance(value, _CONSTANT):
            self._left.append(type(value))

    def _follow_class(self, each: type) -> None:
        self._classes.add(each)
        constant = {name for name, value in vars(each).items() if _is_constant(name, value)}
        self._use(each, vars(each).keys() - constant)
        self._left += [vars(each)[name] for name in constant if name not in _NO_METHODS]

    def _follow_function(self, function: types.FunctionType) -> None:
        if id(function) in self._functions:  # several may share their code, each with variables of its own
            return
        self._functions[id(function)] = function
        self._left.append(getattr(function, "__wrapped__", None))
        if _package(function) in _OUR_OWN | {"torch"}:
            return
        self.codes.add(function.__code__)
        self._made_with(function.__defaults__ or ())
        files: list[Any] = []  # whose variables it uses as attributes: settings.scale
        if _is_of_user(function):
            self.values.append(vars(function))
            read, stored = _global_names(function.__code__)
            files += self._use_file(function.__globals__, read)
            self._use(function.__globals__, stored)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                if not isinstance(cell.cell_contents, _CONSTANT):
                    self._names.setdefault(id(cell), ({name: cell}, {name: None}))
                self._left.append(cell.cell_contents)
                files.append(cell.cell_contents)
        scopes = [function.__globals__]
        for file in files:
            is_file = isinstance(file, types.ModuleType) and _is_users(file.__name__.partition(".")[0])
            if is_file and not any(vars(file) is scope for scope in scopes):
                scopes.append(vars(file))
                files += self._use_file(vars(file), _all_names(function.__code__))

    def _use_file(self, found: dict[str, Any], names: Iterable[str]) -> list[Any]:
        """Use variables of a file, and its functions and classes; return the values."""
        there = {name: found[name] for name in names if name in found}
        self._left += [value for value in there.values() if isinstance(value, types.FunctionType | type)]
        self._use(found, [name for name, value in there.items() if not isinstance(value, _CONSTANT)])
        return list(there.values())

    def _use(self, scope: Any, names: Iterable[str]) -> None:
        self._names.setdefault(id(scope), (scope, {}))[1].update(dict.fromkeys(names))

    def _made_with(self, values: Iterable[Any]) -> None:
        self._left += values
        self.values += [value for value in values if not isinstance(value, _CONSTANT)]


def hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the hooks that run with modules: those of all modules, and their own."""
    found = [hook for name in _HOOKS for hook in getattr(torch.nn.modules.module, f"_global{name}").values()]
    for module in modules:
        own = vars(module)
        found += [hook for name in _HOOKS for hook in own.get(name, {}).values()]
    return found


def _own_classes(kind: type) -> Iterator[type]:
    """Yield a class and those it is derived from, as far as they are the user's."""
    return (each for each in inspect.getmro(kind) if _is_of_user(each))


def _is_constant(name: str, value: Any) -> bool:
    """Return whether an attribute of a class is a method, or what Python itself sets."""
    is_method = callable(value) or isinstance(value, property | staticmethod | classmethod)
    return is_method or inspect.isdatadescriptor(value) or (name.startswith("__") and name.endswith("__"))


def _innermost(function: Any) -> Any:
    """Return the function inside partial calls and methods of objects."""
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def _is_of_user(of: Any) -> bool:
    """Return whether a function or class is in a file of the user's, and not in an installed package."""
    return _is_users(_package(of))


@functools.cache
def _is_users(package: str) -> bool:
    if package in sys.stdlib_module_names or package in _OUR_OWN:
        return package == "__main__"
    parts = Path(getattr(sys.modules.get(package), "__file__", None) or "").parts
    return not {"site-packages", "dist-packages"} & set(parts)


def _package(of: Any) -> str:
    """Return the package of a function or class; not of what a function wraps, which sets its ``__module__``."""
    name = of.__globals__.get("__name__") if isinstance(of, types.FunctionType) else getattr(of, "__module__", None)
    return (name or "").partition(".")[0]


@functools.cache
def _global_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global variables that code reads or sets, and those that it sets, functions inside it too."""
    found = [(each.opname, each.argval) for each in dis.get_instructions(code) if each.opname in _GLOBAL]
    inside = [_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    read = frozenset(name for _, name in found).union(*(names for names, _ in inside))
    stored = frozenset(name for kind, name in found if kind == "STORE_GLOBAL")
    return read, stored.union(*(names for _, names in inside))


@functools.cache
def _all_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the global variables and attributes of code, and of functions inside it."""
    return frozenset(code.co_names).union(*(_all_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))

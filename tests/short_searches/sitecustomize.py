"""Programs that tests start search as shortly as the tests that start them: see ``short_searches`` of ``amount.py``.

Python imports this file first, because its folder is on ``PYTHONPATH``. What a program does not import stays so.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

SHORT = {"_SIMULATIONS": 20, "_TIDY_SIMULATIONS": 8, "_TASKS": 0}  # as in amount.py, which takes long to import


class _Shortener(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "planner.search" else None
        if spec:
            executed = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                executed(module)
                vars(module).update(SHORT)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Shortener())

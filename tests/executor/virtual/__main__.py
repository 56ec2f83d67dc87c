"""Run a script, or a module, where ``torch.cuda`` finds the virtual device."""

import runpy
import sys

from virtual import present

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with present():
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")

"""For all tests: their examples, the same everywhere in ``make test`` and new in ``make fuzz``, and Ctrl-C."""

import signal
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # special_files.py

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A change is judged by the same examples on every machine; what nobody thought of is looked for at leisure.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same")

"""Exit codes of commands other than 0 (success)."""

from typing import Final

CHECK_FAILED: Final = 1
BAD_INPUT: Final = 2
SIGNALLED: Final = 128
"""Plus the number of the signal."""
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE

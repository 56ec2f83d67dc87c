"""``python -m ullage``."""

import sys

from ullage.cli import main

sys.exit(main())

"""``python -m ullage``."""

import sys

from ullage.main import main

sys.exit(main())

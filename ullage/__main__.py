"""``python -m ullage``."""

from ullage.main import run

run()

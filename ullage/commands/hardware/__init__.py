"""``ullage hardware``."""

from ullage.commands.hardware.command import add_parser as add_parser

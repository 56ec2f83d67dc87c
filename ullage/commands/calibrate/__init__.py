"""``ullage calibrate``."""

from ullage.commands.calibrate.command import add_parser as add_parser

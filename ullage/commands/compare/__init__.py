"""``ullage compare``."""

from ullage.commands.compare.command import add_parser as add_parser

"""``ullage execute``."""

from ullage.commands.execute.command import add_parser as add_parser

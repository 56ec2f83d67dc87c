"""``ullage explain``."""

from ullage.commands.explain.command import add_parser as add_parser

"""``ullage simulate``."""

from ullage.commands.simulate.command import add_parser as add_parser

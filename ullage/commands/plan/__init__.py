"""``ullage plan``."""

from ullage.commands.plan.command import add_parser as add_parser

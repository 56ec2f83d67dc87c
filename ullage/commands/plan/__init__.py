"""``ullage plan``."""

from ullage.commands.plan.command import DESCRIPTION as DESCRIPTION
from ullage.commands.plan.command import EXAMPLES as EXAMPLES
from ullage.commands.plan.command import add_arguments as add_arguments
from ullage.commands.plan.command import run as run

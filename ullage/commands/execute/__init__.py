"""``ullage execute``."""

from ullage.commands.execute.command import DESCRIPTION as DESCRIPTION
from ullage.commands.execute.command import EXAMPLES as EXAMPLES
from ullage.commands.execute.command import add_arguments as add_arguments
from ullage.commands.execute.command import run as run

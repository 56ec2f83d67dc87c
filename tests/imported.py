"""What processes find imported that are forked, see ``forked.py``: all that training takes and imports late.

Nothing here begins a thread, which a fork would not have.
"""

# ruff: noqa: E402, F401 - imported for others, while no garbage is looked for
import gc

gc.disable()

import accelerate
import amount
import fsspec
import matplotlib.pyplot as plt
import pytest
import rich.live
import torch._dynamo
import torch.distributed.tensor
import transformers.trainer
from numba.core.registry import cpu_target
from transformers.models.llama import modeling_llama

import executor.prepare
import planner.plan.planning
import ullage.commands.execute.run
import ullage.report.answers
import ullage.this_machine.planning
import ullage.whatif.questions

_short = amount.short_searches()  # kept: it would end with the object
_short.__enter__()
cpu_target.target_context.refresh()  # what the first compiled function that is loaded would wait for
gc.freeze()  # so that no process searches these millions of objects for cycles
gc.enable()
gc.set_threshold(200_000, 20, 100)  # nor its own as often, of which few are garbage

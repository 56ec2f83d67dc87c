"""Compiles what the first plan and the first update on the host would wait for, as it is imported.

The server that stages are forked from imports it last, so sixteen processes do not each compile the same.
"""

import numpy as np

from executor.optimizer.adamw import AdamWParams, adamw_step
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models import resolve_model
from planner.placements import resident
from planner.search.scoring import Scorer

_request = Request(resolve_model("demo-llama"), load_profile("h100"), seq_len=64, micro_batch=1)
_variant = variants(_request)[0]
Scorer.of(_variant).predict(next(resident(_variant.setup)))
for _grad in (np.zeros(1, np.uint16), np.zeros(1, np.float32)):
    _state = tuple(np.zeros(1, np.float32) for _ in range(3))
    adamw_step(_state, _grad, np.zeros(1, np.uint16), AdamWParams(), step=1)

"""What jobs are forked with: everything that planning imports, and torch if it is installed, which takes seconds.

Nothing here leaves a thread running, which a fork would not have.
"""

import contextlib
import gc
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the page, which ends this too
# One thread in each job: there are as many jobs as cores.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
)
os.environ["HF_HUB_OFFLINE"] = "1"  # a question fetches nothing

import ullage  # noqa: E402 - it reads these

ullage.report_html, ullage.study, ullage.what_would_fit, ullage.explain  # noqa: B018 - a public name is imported when it is first looked at
ullage.plan("opt-125m", hardware="h100")  # which loads compiled functions
with contextlib.suppress(ImportError):  # adapters need torch
    ullage.plan("opt-125m", hardware="h100", lora="rank=8", quantize="nf4")
gc.collect()
gc.freeze()  # so that jobs share these pages

"""``ullage execute``: run a plan."""

import argparse
import os
from pathlib import Path

from planner.plan.document import load_plan
from planner.terms import MIN_CHECKPOINTS
from ullage.cli.arguments import (
    audit,
    cores,
    data,
    non_negative_int,
    parts,
    positive_float,
    positive_int,
    saved_weights,
)

DESCRIPTION = """\
Train the plan's model exactly as planned, from random weights or from yours. Measure every task, and
compare the run with the prediction. The data is your text or tokens, or a built-in text. Files are
memory-mapped; the order of sequences depends only on the seed. For a captured model, the function that the
plan names makes the model; it trains on one random batch. For chats, instructions, epochs, evaluation and
loggers, use `ullage.offloaded(SFTTrainer)` in Python. A plan for several devices needs one process per
device: `torchrun --nproc-per-node 8 -m ullage execute plan.json`."""
EXAMPLES = """
    ullage execute plan.json
    ullage execute plan.json --iterations 100 --data corpus.txt --lr 3e-4 --output-dir runs/1
    ullage execute plan.json --iterations 1000 --replan --compile
    ullage execute plan.json --iterations 1000 --checkpoint-dir checkpoints,every=10
    ullage execute plan.json --iterations 1000 --checkpoint-dir checkpoints --resume
    ullage execute plan.json --checkpoint-dir memory,every=10 --checkpoint-dir s3://bucket/run,every=100
    ullage execute plan.json --elastic --checkpoint-dir checkpoints,every=10
    ullage execute plan.json --weights models/llama --data corpus.txt --save models/mine
    ullage execute plan.json --data corpus.bin,dtype=uint16,skip=8000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="file that `ullage plan` wrote")
    parser.add_argument(
        "--iterations",
        dest="num_iterations",
        type=positive_int,
        metavar="N",
        default=30,
        help="optimizer steps (30); fewer than 6 are not compared with the prediction",
    )
    parser.add_argument(
        "--data",
        type=data,
        default={},
        metavar="PATH[,dtype=TYPE][,skip=N]",
        help="train on tokens, a .npy file or a raw file with dtype=uint16 or dtype=uint32 (little-endian); or on any "
        "other file as text, one token per byte (default: a built-in English text). skip: sequences to skip, such as "
        "the data_position in the run.json of an earlier run",
    )
    parser.add_argument(
        "--seed",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="seed of weights and data (0)",
    )
    parser.add_argument(
        "--lr",
        type=positive_float,
        default=1e-3,
        metavar="X",
        help="learning rate at its highest (0.001); it rises for 5 iterations, then falls as a cosine",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("out"), metavar="DIR", help="folder for results (out/)")
    parser.add_argument(
        "--weights",
        metavar="DIR|NAME",
        help="begin with the safetensors files of a folder, or of a hub's model on this machine. They are read "
        "directly to where the plan keeps weights",
    )
    parser.add_argument(
        "--save",
        type=saved_weights,
        default={},
        metavar="DIR[,dtype=TYPE]",
        help="at the end, save the model in a new folder, in the format of from_pretrained(). dtype: type of its "
        "weights, bfloat16, float16 or float32, the master copies (default: the plan's)",
    )
    parser.add_argument(
        "--storage-dir",
        type=Path,
        metavar="DIR",
        help="folder on the planned drives for state and parameters that the plan keeps on NVMe. It needs space for "
        "twice their size (default: --output-dir)",
    )
    parser.add_argument(
        "--cores",
        type=cores,
        default="auto",
        metavar="LIST|auto|free",
        help="CPU cores to use, as in 0-31,64-95. The ranks of a machine divide them, and each rank is bound to its "
        "share. auto: all cores of the process, bound if there are several ranks (the default); free: no binding",
    )
    parser.add_argument(
        "--compile",
        dest="compile_blocks",
        action=argparse.BooleanOptionalAction,
        help="compile the repeated blocks with torch.compile, or not (default: as the plan's --kernels says; only then "
        "does the prediction include it)",
    )
    parser.add_argument(
        "--audit",
        type=audit,
        default="first",
        metavar="first|off|N",
        help="compare outputs and gradients of one module of each kind with plain PyTorch, and stop before the step if "
        "they differ: in the first iterations (the default), never, or again after every N iterations",
    )
    parser.add_argument(
        "--replan",
        action="store_true",
        help="after 10 iterations, fit the profile to the measured times and plan again. If the new plan is predicted "
        "to be more than 5 %% faster, training continues under it; the training state passes through a file in "
        "--storage-dir",
    )
    parser.add_argument(
        "--checkpoint-dir",
        dest="checkpoint_dirs",
        action="append",
        type=lambda text: parts(text, {"": str, "every": positive_int, "keep": positive_int}),
        default=[],
        metavar="PLACE[,every=N][,keep=N]",
        help="save checkpoints there during training, at its end, and if it is interrupted. PLACE is a folder, or "
        "`memory` (host memory of this node, which outlives the process). May be repeated, fastest first. Each further "
        "place is a folder or a URL of fsspec; checkpoints are copied to it from the place before, in the background. "
        "All nodes share the last place. Those before may be folders of each node, of which the next node has copies. "
        "every: iterations between checkpoints, a multiple of those of the place before (default: those of the plan if "
        "`ullage plan --mtbf` chose them; else 100). keep: newest checkpoints to keep, at least "
        f"{MIN_CHECKPOINTS} ({MIN_CHECKPOINTS})",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint in any --checkpoint-dir, up to --iterations. The checkpoint "
        "may come from another plan",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on with the processes that are there, where torchrun has started more or fewer than planned: resume, "
        "plan again for them, and read the same sequences an iteration. What each loss of processes cost is told. "
        "Start it with `torchrun --nnodes 1:4 --max-restarts 100`",
    )
    parser.add_argument(
        "--allow-other-machine",
        action="store_true",
        help="execute the plan even if its profile was measured on another machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Execute the plan."""
    plan = load_plan(args.plan)
    if plan.decisions.pipeline_parallel > 1:
        # A kernel that is loaded when it is first launched may wait for all that runs: so for a stage that waits for us
        # (CUDA Programming Guide, "Lazy Loading", potential hazards).
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # importing torch takes seconds, so check the plan first
    from ullage.commands.execute.run import execute  # noqa: PLC0415
    from ullage.report.run import out_of_memory  # noqa: PLC0415
    from ullage.report.terminal import show  # noqa: PLC0415
    from ullage.training.out_of_memory import OutOfMemoryError  # noqa: PLC0415

    try:
        execute(plan, args)
    except OutOfMemoryError as error:
        show(*out_of_memory(error), stderr=True)
        return 1
    return 0

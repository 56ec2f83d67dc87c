"""``ullage execute``: run a plan."""

import argparse
from pathlib import Path

from planner.plan.document import load_plan
from ullage.cli.arguments import cores, non_negative_int, positive_float, positive_int, positive_ints
from ullage.commands import Subparsers, command_parser
from ullage.training.options import DEFAULT_KEPT, LEAST_KEPT, TOKEN_DTYPES, ExecuteOptions


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    defaults = ExecuteOptions()
    parser = command_parser(
        subparsers,
        "execute",
        run,
        "Train the plan's model, from random weights, on a text or tokens of yours or on the built-in text, exactly\n"
        "as planned; measure every task, and compare that with the prediction. Files are mapped, never read whole;\n"
        "their order depends on the seed alone. A captured model is made by the function that the plan\n"
        "names, imported as `ullage plan` did, and trained on one random batch of its inputs. A plan for several\n"
        "devices is executed by one process for each: `torchrun --nproc-per-node 8 -m ullage execute plan.json`.",
        """
        ullage execute plan.json
        ullage execute plan.json --iterations 100 --text corpus.txt --lr 3e-4 --output-dir runs/1
        ullage execute plan.json --iterations 1000 --replan --compile
        ullage execute plan.json --iterations 1000 --checkpoint-dir checkpoints --checkpoint-every 10
        ullage execute plan.json --iterations 1000 --checkpoint-dir checkpoints --resume
        ullage execute plan.json --checkpoint-dir memory --checkpoint-dir s3://bucket/run --checkpoint-every 10,100
        ullage execute plan.json --tensorboard runs/1 --metrics-file /var/lib/node_exporter/ullage.prom
        ullage execute plan.json --tokens corpus.bin --token-dtype uint16 --data-position 8000
        """,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="what `ullage plan` wrote")
    parser.add_argument(
        "--iterations",
        type=positive_int,
        default=defaults.num_iterations,
        metavar="N",
        help=f"optimizer steps, at least 6 ({defaults.num_iterations})",
    )
    parser.add_argument(
        "--text", type=Path, metavar="PATH", help="train on a text, one token per byte (default: built-in English)"
    )
    parser.add_argument("--tokens", type=Path, metavar="PATH", help="train on tokens: a .npy file, or a raw one")
    parser.add_argument("--token-dtype", choices=TOKEN_DTYPES, help="what a raw file of tokens holds, little-endian")
    parser.add_argument(
        "--data-position",
        type=non_negative_int,
        default=defaults.data_position,
        metavar="N",
        help="sequences to skip: the data_position of another run.json, to go on in its data (0)",
    )
    parser.add_argument(
        "--seed",
        type=non_negative_int,
        default=defaults.seed,
        metavar="N",
        help=f"of all chance ({defaults.seed})",
    )
    parser.add_argument(
        "--lr",
        type=positive_float,
        default=defaults.lr,
        metavar="X",
        help=f"learning rate ({defaults.lr:g})",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=defaults.output_dir, metavar="DIR", help="where results go (out/)"
    )
    parser.add_argument(
        "--storage-dir",
        type=Path,
        metavar="DIR",
        help="a folder on the planned drives, for what the plan has on NVMe while it trains: state and parameters take "
        "twice their size (default: --output-dir)",
    )
    parser.add_argument(
        "--cores",
        type=cores,
        default=defaults.cores,
        metavar="LIST|auto|free",
        help="CPU cores of this machine, as in 0-31,64-95: its ranks divide them and are bound to their shares, some "
        "cores of which are left to what issues work for the GPU (auto: those open to the process, bound if there are "
        "several ranks; free: nothing is bound)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="let torch.compile fuse kernels of the repeated blocks, when they first run; predictions are without",
    )
    parser.add_argument(
        "--replan",
        action="store_true",
        help="after 10 iterations, fit the profile to the measured times of all tasks, plan again, and change to the "
        "new plan if it is predicted more than 5 %% faster; training goes on from its very state, which passes through "
        "a file in --storage-dir",
    )
    parser.add_argument(
        "--checkpoint-dir",
        action="append",
        default=[],
        metavar="PLACE",
        help="make checkpoints there beside training, and one at the end or when interrupted: a folder that all ranks "
        "share, or memory (of this node, which outlives the process). May be repeated, fastest first: each further "
        "place, a folder or a URL of fsspec, gets its checkpoints from the one before, in the background",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=positive_ints,
        default=defaults.checkpoint_every,
        metavar="N[,N...]",
        help="iterations from one checkpoint to the next, for each place a multiple of the one before, or one for all "
        "(the plan's, by ullage plan --mtbf; or 100)",
    )
    parser.add_argument(
        "--keep",
        type=positive_ints,
        default=defaults.keep,
        metavar="N[,N...]",
        help=f"the newest checkpoints that stay, at least {LEAST_KEPT}, for each place or one for all ({DEFAULT_KEPT})",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest whole checkpoint in any --checkpoint-dir, made under whatever plan, up to "
        "--iterations",
    )
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="write loss, rate and times of every iteration for TensorBoard"
    )
    parser.add_argument(
        "--metrics-file",
        type=Path,
        metavar="PATH",
        help="keep the latest metrics in a file in Prometheus' text format, for the textfile collector of its node "
        "exporter: a name that ends in .prom",
    )
    parser.add_argument(
        "--allow-other-machine",
        action="store_true",
        help="run here what was planned for a profile that was measured on another machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--device",
        choices=("auto", "host", "cuda"),
        default=defaults.device,
        help="what to run on (auto: what the plan was made for)",
    )


def run(args: argparse.Namespace) -> int:
    """Execute the plan."""
    options = ExecuteOptions(
        num_iterations=args.iterations,
        text=args.text,
        tokens=args.tokens,
        token_dtype=args.token_dtype,
        data_position=args.data_position,
        seed=args.seed,
        lr=args.lr,
        output_dir=args.output_dir,
        storage_dir=args.storage_dir,
        compile_blocks=args.compile,
        cores=args.cores,
        replan=args.replan,
        checkpoint_places=tuple(args.checkpoint_dir),
        checkpoint_every=args.checkpoint_every,
        keep=args.keep,
        resume=args.resume,
        tensorboard=args.tensorboard,
        metrics_file=args.metrics_file,
        allow_other_machine=args.allow_other_machine,
        json=args.json,
        device=args.device,
    )
    plan = load_plan(args.plan)
    # torch takes seconds: not before the plan is known to be good
    from ullage.cli.interruption import InterruptedTrainingError  # noqa: PLC0415
    from ullage.commands.execute.run import execute  # noqa: PLC0415
    from ullage.training.shortage import ShortageError, render_shortage  # noqa: PLC0415

    try:
        execute(plan, options)
    except ShortageError as error:
        from ullage.output.console import console  # noqa: PLC0415 - slow to import

        console(stderr=True).print(render_shortage(error.shortage))
        return 1
    except InterruptedTrainingError as error:
        from ullage.output.console import console  # noqa: PLC0415 - slow to import

        console(stderr=True).print(str(error), markup=False, soft_wrap=True)
        return 128 + error.signal
    return 0

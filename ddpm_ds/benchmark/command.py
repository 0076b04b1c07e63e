"""The command line of ``launch/bench.py``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpm_ds.benchmark.choice import ROWS, why_not
from ddpm_ds.command_line import OneLineParser, check_writable, say_once, set_environment
from ddpm_ds.errors import BadNumbersError, LayoutError, UserError
from ddpm_ds.option_types import positive
from ddpm_ds.train.command import add_run_options
from ddpm_ds.train.plan import OUTPUT_ROOT, RunPlan, plan_run

DESCRIPTION = """\
Ways of training one U-Net side by side: the same images, noise, batch, micro-batches and learning rates on the
processes that were started, under this project's engines, DeepSpeed's own, PyTorch's own, and without a pipeline.

First all rows take a few steps and their losses are compared; rows that do not train the same are not timed. Then they
take turns, round after round, so that what else the machine does touches all. A ratio of 1.1 says that a row's step
takes 1.1 times the first row's, as the median over the rounds, with quartiles in brackets. At last each row takes a
step in which what it sends is counted, and some in which its processes' idle time is.
"""

EXAMPLES = """\
examples
  deepspeed --num_gpus 1 launch/bench.py --deepspeed_config ds_configs/zero2_fp16.json --rows plain,1f1b
      what the engine costs beside a plain loop: the main job's U-Net, about a minute on two cores
  OMP_NUM_THREADS=1 deepspeed --num_gpus 4 launch/bench.py -p 4 --deepspeed_config ds_configs/zero1_fp32.json \\
      --spec launch/specs/cifar10.yaml --set data.source=digits --set data.workers=0 \\
      --set train.batch_images=32 --set train.accumulation=16 --rounds 5 --steps-per-round 2 --compared-steps 3
      the U-Net of DDPM in 4 stages, on digits made larger, so that nothing is downloaded
  ... --rows 1f1b,folded --memory --mlflow --json folded.json
      two rows, with their peak memory; in MLflow, and every number in a file

on a shared machine
  OMP_NUM_THREADS=1 deepspeed ... keeps a neighbour from stalling all threads; wide quartiles say: measure again

exit codes
  0 done   2 bad input, nothing was started   3 the losses differ   1 a bug
"""


def row_names(text: str) -> list[str]:
    """Names of rows, in the table's order.

    Raises:
        argparse.ArgumentTypeError: a row has another name.
    """
    asked = [name.strip() for name in text.split(",")]
    for name in asked:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"{name!r} is no row; rows are {', '.join(ROWS)}")
    return [name for name in ROWS if name in asked]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a benchmark.

    Raises:
        SpecError: an option is unknown or has a wrong value.
    """
    parser = OneLineParser(
        prog="deepspeed [launcher options] launch/bench.py",
        description=DESCRIPTION,
        epilog="rows\n" + "".join(f"  {name:14}{meaning}\n" for name, meaning in ROWS.items()) + "\n" + EXAMPLES,
    )
    add_run_options(parser)
    parser.add_argument(
        "--rows",
        type=row_names,
        default=list(ROWS),
        metavar="ROW,ROW,...",
        help="which rows, see below (default: all that can run)",
    )
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="turns of each row (default 15)")
    parser.add_argument(
        "--steps-per-round", type=positive, default=20, metavar="N", help="steps of each row in a round (default 20)"
    )
    parser.add_argument(
        "--compared-steps", type=positive, default=50, metavar="N", help="first steps, losses compared (default 50)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure the peak memory of each row, in processes that train it alone"
    )
    parser.add_argument("--memory-of", choices=tuple(ROWS), default=None, help=argparse.SUPPRESS)  # of --memory
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write every number here")
    parser.add_argument(
        "--mlflow",
        action="store_true",
        help=f"log a run with the table and one for each row (store: MLFLOW_TRACKING_URI, else in {OUTPUT_ROOT})",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        set_environment()
        options = parse(arguments)
        plan = plan_run(
            options.spec,
            options.overrides,
            options.deepspeed_config,
            world_size=int(os.environ["WORLD_SIZE"]),
            stages=options.pipeline_stages,
            device=options.device,
        )
        names, not_run = _choose(options.rows, plan)
        if options.json is not None:
            check_writable("--json", options.json)
        from ddpm_ds.device import choose_device  # torch, now that everything cheap is checked

        device = choose_device(options.device)
        from ddpm_ds.benchmark import session  # deepspeed, which asks for its device then

        if options.memory_of is not None:
            session.measure_memory(plan, device, options.memory_of, verbose=options.verbose)
            return 0
        session.run_benchmark(
            plan,
            device,
            names,
            not_run,
            session.Effort(options.rounds, options.steps_per_round, options.compared_steps, options.memory),
            session.Outputs(
                command=_command(),
                overrides=options.overrides,
                json_path=options.json,
                mlflow=options.mlflow,
            ),
            verbose=options.verbose,
        )
    except (UserError, BadNumbersError) as error:
        say_once(f"ddpm_ds: error: {error}")
        return error.exit_code
    return 0


def _choose(asked: Sequence[str], plan: RunPlan) -> tuple[list[str], dict[str, str]]:
    """The rows that run, and those that can't with the reasons.

    Raises:
        LayoutError: none can.
    """
    reasons = {name: why_not(name, plan) for name in asked}
    names = [name for name, reason in reasons.items() if reason is None]
    not_run = {name: reason for name, reason in reasons.items() if reason is not None}
    if not names:
        said = "; ".join(f"{name} {reason}" for name, reason in not_run.items())
        raise LayoutError(f"--rows {','.join(asked)} leaves nothing to run: {said}")
    return names, not_run


def _command() -> str:
    """What was typed, as far as a process can know it."""
    words = [word for word in sys.argv if not word.startswith("--local_rank")]
    return shlex.join(["deepspeed", "--num_gpus", os.environ["LOCAL_WORLD_SIZE"], *words])

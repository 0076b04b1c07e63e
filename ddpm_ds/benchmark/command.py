"""The command line of ``launch/bench.py``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpm_ds.errors import BadNumbersError, LayoutError, OutputError, UserError
from ddpm_ds.option_types import positive
from ddpm_ds.train.command import OneLineParser, add_run_options, say_once, set_environment
from ddpm_ds.train.plan import plan_run

DESCRIPTION = """\
What DeepSpeed's pipeline engine costs: the same U-Net, batch, noise and learning rates trained by a plain PyTorch
loop in fp32 and by this project's engine with the given DeepSpeed JSON, in one process.

First both take a few steps and their losses are compared; rows that do not train the same are not timed. Then they
take turns, round after round, so that what else the machine does touches both. A ratio of 1.1 says that the engine's
step takes 1.1 times the plain loop's, as the median over the rounds, with quartiles in brackets.
"""

EXAMPLES = """\
examples
  deepspeed --num_gpus 1 launch/bench.py --deepspeed_config ds_configs/zero2_fp16.json
      the main job's U-Net, about a minute on two cores
  deepspeed --num_gpus 1 launch/bench.py --deepspeed_config ds_configs/zero0_fp32.json --json engine.json
      the engine alone, in the plain loop's precision and without ZeRO; keep every number
  deepspeed --num_gpus 1 launch/bench.py --deepspeed_config ds_configs/zero2_fp16.json \\
      --spec launch/specs/cifar10.yaml --set data.source=digits --set train.batch_images=8 \\
      --rounds 5 --steps-per-round 2 --compared-steps 4
      the U-Net of DDPM on digits made larger, so that nothing is downloaded

on a shared machine
  OMP_NUM_THREADS=1 deepspeed ... keeps a neighbour from stalling both threads; wide quartiles say: measure again

exit codes
  0 done   2 bad input, nothing was started   3 the losses differ   1 a bug
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a benchmark.

    Raises:
        SpecError: an option is unknown or has a wrong value.
    """
    parser = OneLineParser(
        prog="deepspeed [launcher options] launch/bench.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_options(parser)
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="turns of each row (default 15)")
    parser.add_argument(
        "--steps-per-round", type=positive, default=20, metavar="N", help="steps of each row in a round (default 20)"
    )
    parser.add_argument(
        "--compared-steps", type=positive, default=50, metavar="N", help="first steps, losses compared (default 50)"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write every number here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    set_environment()
    try:
        options = parse(arguments)
        processes = int(os.environ["WORLD_SIZE"])
        if processes != 1:
            raise LayoutError(
                f"the plain loop has one process, but {processes} were started; use deepspeed --num_gpus 1 "
                f"launch/bench.py"
            )
        plan = plan_run(options.spec, options.overrides, options.deepspeed_config, world_size=processes, stages=None)
        if options.json is not None:
            _check_writable(options.json)
        from ddpm_ds.train.device import choose_device  # torch, now that everything cheap is checked

        device = choose_device(options.device)
        from ddpm_ds.benchmark.session import Effort, run_benchmark  # deepspeed, which asks for its device then

        run_benchmark(
            plan,
            device,
            Effort(options.rounds, options.steps_per_round, options.compared_steps),
            command=shlex.join(["deepspeed", *(word for word in sys.argv if not word.startswith("--local_rank"))]),
            overrides=options.overrides,
            json_path=options.json,
            verbose=options.verbose,
        )
    except (UserError, BadNumbersError) as error:
        say_once(f"ddpm_ds: error: {error}")
        return error.exit_code
    return 0


def _check_writable(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise OutputError(f"--json {path} can't be written; name a file in a folder that exists and is yours")

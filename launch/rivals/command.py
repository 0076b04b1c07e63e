"""The command line of ``launch/bench.py``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddpm_ds.cli.options import OneLineParser, add_options, read, take_files
from ddpm_ds.config.spec_file import DEFAULT_SPEC
from ddpm_ds.ground.errors import BadNumbersError, SpecError, UserError
from ddpm_ds.ground.outputs import check_outputs
from ddpm_ds.planning.run_plan import choose as choose_layout
from ddpm_ds.planning.run_plan import lay_out, read_run
from ddpm_ds.processes.ranks import print_for_all, set_environment
from rivals.choice import NAMED, ROWS, BenchmarkOptions, choose

DESCRIPTION = """\
Time ways of training one U-Net on the same images, noise, batches, micro-batches and learning rates. First all rows
take a few steps and their losses are compared; if they differ, nothing is timed. Then the rows take turns, round after
round, so that other work on the machine slows all alike. A row with a ratio of 1.1 takes 1.1 times the first row's
time: the median over the rounds, with quartiles in brackets. Finally each row's sent bytes are counted.
"""

EXAMPLES = f"""\
  These run only if --rows names them, since 16 bits under autocast take minutes on a CPU: {", ".join(NAMED)}.
  diffusers-randn has other draws, so its losses are not compared.
  Only this project's engines recompute activations, if the JSON asks for it.

examples
  OMP_NUM_THREADS=1 deepspeed --num_gpus 4 launch/bench.py -p 4 --deepspeed_config ds_configs/zero1_fp32.json \\
      --spec launch/specs/cifar10.yaml --set data.source=digits \\
      --set train.batch_images=32 --set train.accumulation=16 --rounds 5 --steps-per-round 2 --compared-steps 3
  python launch/bench.py --deepspeed_config ds_configs/zero1_fp32.json --spec launch/specs/cifar10.yaml \\
      --set data.source=digits --set unet.dropout=0 --set train.batch_images=8 \\
      --rows plain,1f1b,diffusers --rounds 3 --steps-per-round 2 --compared-steps 3

exit codes
  0 done   2 bad input, nothing was started   3 the losses differ   1 a bug
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    meanings = "".join(f"  {name:18}{what}\n" for name, what in ROWS.items())
    name, epilog = "deepspeed [launcher options] launch/bench.py", f"rows\n{meanings}{EXAMPLES}"
    parser = OneLineParser(prog=name, description=DESCRIPTION, epilog=epilog)
    add_options(parser, BenchmarkOptions)
    try:
        set_environment()
        options = read(BenchmarkOptions, parser.parse_args(arguments))
        check_outputs(overwrite=options.overwrite, json=options.json)
        found = take_files(options, DEFAULT_SPEC, quiet=os.environ.get("RANK", "0") != "0")
        asked = [name.strip() for name in options.rows.split(",")] if options.rows else [*ROWS.keys() - NAMED]
        if unknown := [name for name in asked if name not in ROWS]:
            raise SpecError(f"argument --rows: {unknown[0]!r} is no row; rows are {', '.join(ROWS)}")
        hosts = ("0",) * int(os.environ["WORLD_SIZE"])
        files = read_run(found.spec, found.overrides, found.deepspeed_config)
        chosen = choose_layout(files, hosts, len(hosts), options.pipeline_stages, options.device)
        draft = lay_out(files, hosts, len(hosts), options.pipeline_stages, chosen)
        names, not_run = choose([name for name in ROWS if name in asked], draft)
        from ddpm_ds.ground.device import choose_device  # torch, now that everything cheap is checked
        from ddpm_ds.pipeline import import_deepspeed

        device = choose_device(options.device, draft.ds.layout.stages)
        import_deepspeed()
        from rivals.benchmark import run

        run(draft, device, names, not_run, options)
    except (UserError, BadNumbersError) as error:
        print_for_all(f"ddpm_ds: error: {error}")
        return error.exit_code
    return 0

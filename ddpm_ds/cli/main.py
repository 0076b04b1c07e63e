"""Command ``ddpm-ds``. It imports its verbs only after it handles signals."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import textwrap
from collections.abc import Sequence

from ddpm_ds.ground.errors import COMMAND_ERROR, EXIT_PREEMPTED, SpecError, UserError
from ddpm_ds.ground.version import __version__
from ddpm_ds.processes.signals import EXIT_INTERRUPTED, SUPERVISOR_SIGNALS, handle, leave_on

EPILOG = """\
training
  ddpm-ds init FOLDER
  ddpm-ds train --deepspeed_config ds_configs/zero2_fp16.json
  deepspeed launch/train.py --deepspeed_config ds_configs/zero2_fp16.json

exit codes
  0 done   2 bad input, nothing was done   130 interrupted   1 a bug; of run, see run --help
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    from ddpm_ds.cli.doctor import doctor
    from ddpm_ds.cli.import_data import import_data
    from ddpm_ds.cli.init import add_init, prepare, schema
    from ddpm_ds.cli.launch import run, train
    from ddpm_ds.cli.options import OneLineParser
    from ddpm_ds.cli.plan import plan
    from ddpm_ds.cli.runs import add_checkpoint, compare, diagnose, send
    from ddpm_ds.cli.sample import sample
    from ddpm_ds.cli.sweep import sweep
    from ddpm_ds.cli.trained import evaluate, export, import_

    parser = OneLineParser(
        prog="ddpm-ds",
        description="Train diffusion U-Nets on DeepSpeed pipelines, and everything around it.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"ddpm_ds {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    add_init(verbs)
    for each in (train, run, doctor, plan, sweep, compare, diagnose, send, prepare, schema):
        each.add(verbs)
    add_checkpoint(verbs)
    for each in (sample, evaluate, export, import_, import_data):
        each.add(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; a user's mistake gives one line on stderr and exit code 2.

    Without ``arguments`` this is the whole process, which Ctrl-C ends silently, at any time, with 130. Signals end
    ``train`` and ``run`` with 75 until they supervise ranks, since nothing has to be saved.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    training = given[:1] in (["train"], ["run"])
    if arguments is None:
        leave_on(SUPERVISOR_SIGNALS, EXIT_PREEMPTED) if training else leave_on([signal.SIGINT], EXIT_INTERRUPTED)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid text
    try:
        parser = make_parser()
        from ddpm_ds.processes.hosts import user_name

        os.environ.setdefault("LOGNAME", user_name())  # libraries ask, and a container's user may have no name
        options, unknown = parser.parse_known_args(given)
        if unknown and not hasattr(options.verb.options, "unknown"):
            raise SpecError(f"unrecognized arguments: {' '.join(unknown)}; ddpm-ds {given[0]} --help explains")
        options.arguments, options.unknown = given[1:], unknown
        if arguments is None and not training:  # a verb can keep its finished work
            handle([signal.SIGINT], signal.default_int_handler)
        return options.verb.start(options)
    except UserError as error:
        print(textwrap.indent(str(error), COMMAND_ERROR), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # nobody reads the output any more, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())

"""Command ``ddpm-ds``: training and everything around it.

Verbs are imported when signals are handled.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ddpm_ds.errors import EXIT_PREEMPTED, SpecError, UserError
from ddpm_ds.processes.signals import EXIT_INTERRUPTED, SUPERVISOR_SIGNALS, leave_on, raise_on_interrupt
from ddpm_ds.version import __version__

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
    from ddpm_ds.cli.doctor import add_doctor
    from ddpm_ds.cli.fit import add_fit
    from ddpm_ds.cli.init import add_init
    from ddpm_ds.cli.launch import add_run, add_train
    from ddpm_ds.cli.plan import add_plan
    from ddpm_ds.cli.runs import add_checkpoint, add_compare, add_diagnose, add_note, add_send
    from ddpm_ds.cli.sample import add_sample
    from ddpm_ds.cli.sweep import add_sweep
    from ddpm_ds.cli.trained import add_evaluate, add_export, add_import
    from ddpm_ds.command_line import OneLineParser

    parser = OneLineParser(
        prog="ddpm-ds",
        description="Train diffusion U-Nets on DeepSpeed pipelines, and everything around it.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"ddpm_ds {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (
        add_init,
        add_train,
        add_run,
        add_doctor,
        add_plan,
        add_fit,
        add_sweep,
        add_compare,
        add_note,
        add_diagnose,
        add_send,
        _add_prepare,
        _add_schema,
        add_checkpoint,
        add_sample,
        add_evaluate,
        add_export,
        add_import,
    ):
        add(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; a user's mistake gives one line on stderr and exit code 2.

    Without ``arguments`` this is the whole process, and Ctrl-C ends it with 130 without a word, at any time. Before
    ``train`` and ``run`` have begun to supervise, signals end it with 75, since there is nothing to save.
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
        if unknown and not hasattr(options, "unknown"):
            raise SpecError(f"unrecognized arguments: {' '.join(unknown)}; ddpm-ds {given[0]} --help explains")
        options.arguments, options.unknown = given[1:], unknown
        if arguments is None and not training:  # a verb keeps what it has done
            raise_on_interrupt()
        return options.run(options) or 0
    except UserError as error:
        print(textwrap.indent(str(error), "ddpm-ds: error: "), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # nobody reads the output any more, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 128 + signal.SIGPIPE


def _add_prepare(verbs: argparse._SubParsersAction[Any]) -> None:
    from ddpm_ds.command_line import add_spec_options, file_path

    parser = verbs.add_parser(
        "prepare",
        help="write the images of a spec into the data-set cache",
        description="Read a spec's images once and write the data-set cache that training reads. Training does this\n"
        "by itself when the cache is missing. Latents of data.autoencoder and encoded captions of data.text\n"
        "are made here alone, with --encode, and what a regression leaves of fields with --residual.",
    )
    add_spec_options(parser)
    parser.add_argument(
        "--encode",
        action="store_true",
        help="make the latents of data.autoencoder and encode the captions of data.text too, on CUDA if there is any",
    )
    parser.add_argument(
        "--residual",
        type=file_path,
        metavar="RUN_DIR",
        help="make the residuals of this regression too, which becomes data.residual_of, on CUDA if there is any",
    )
    parser.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> None:
    from ddpm_ds.command_line import take_files
    from ddpm_ds.config.spec_file import load_spec
    from ddpm_ds.processes.ranks import set_environment

    take_files(options)
    residual = [] if options.residual is None else [f"data.residual_of={json.dumps(str(options.residual))}"]
    spec = load_spec(options.spec, [*options.overrides, *residual])
    data = spec.data
    from ddpm_ds.data.buckets import check_steps
    from ddpm_ds.data.held_out import prepare_all  # imports torch, so the spec is checked first
    from ddpm_ds.data.text import check_text

    encode_on = regression = None
    if options.encode and data.autoencoder is None and data.text is None:
        raise SpecError(
            "--encode makes latents of data.autoencoder and encodes captions of data.text, and both are null; give one "
            "or leave --encode out"
        )
    if options.encode or residual:
        set_environment()
        from ddpm_ds.device import choose_device
        from ddpm_ds.evaluate.inputs import TrainedRegression

        device = choose_device("auto")
        encode_on = device if options.encode else None
        regression = TrainedRegression(data, device) if residual else None
    check_text(spec.data.text, spec.unet.text)
    check_steps(spec.data, len(spec.unet.multipliers))
    group = spec.bucket_group or 1
    store, apart = prepare_all(
        data, progress=True, verify=True, encode_on=encode_on, regression=regression, group=group
    )
    others = () if apart is store else apart.caches
    for number, each in enumerate((*store.caches, *others)):
        skipped = f", {each.meta.skipped:,} left out (skipped.txt)" if each.meta.skipped else ""
        what = "images" if data.residual_of is None else "residuals"
        if each.meta.kind == "latents":
            what = f"latents of {'x'.join(map(str, each.meta.shape))}"
        held_out = ", held out" if number >= len(store.caches) else ""
        print(f"{each.path}: {len(each):,} {what}{held_out}{skipped}")


def _add_schema(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "schema",
        help="print what a run spec or a DeepSpeed JSON may hold",
        description="Print the JSON schema of run specs (launch/specs/run.schema.json) or of DeepSpeed JSONs, for\n"
        "editors, or the tables of docs/spec.md or docs/ds_configs.md.",
    )
    parser.add_argument("what", nargs="?", choices=("spec", "ds_config"), default="spec", help="default: spec")
    parser.add_argument("--markdown", action="store_true", help="print the reference as Markdown instead of the schema")
    parser.set_defaults(run=_schema)


def _schema(options: argparse.Namespace) -> None:
    from ddpm_ds.config.ds_model import DS_CONFIG
    from ddpm_ds.config.spec_file import SPEC

    format = DS_CONFIG if options.what == "ds_config" else SPEC
    print(format.markdown() if options.markdown else json.dumps(format.file_schema(), indent=2) + "\n", end="")


if __name__ == "__main__":
    sys.exit(main())

"""Training program of a rank, which ``ddpm_ds.cli.rank`` or ``launch/train.py`` starts."""

from __future__ import annotations

import argparse
import contextlib
import os
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from ddpm_ds.checkpoint.manifest import MANIFEST
from ddpm_ds.cli.plan import decided_since, describe_plan, stage_table
from ddpm_ds.command_line import (
    OneLineParser,
    add_config_option,
    add_spec_options,
    file_path,
    limited_seconds,
    memory_size,
    positive,
    processes,
    seconds,
    step_range,
    take_files,
    valid_text,
)
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import DEFAULT_SPEC
from ddpm_ds.errors import (
    ERROR,
    RAN_OUT,
    BadNumbersError,
    CheckpointError,
    PeerLostError,
    Preempted,
    SpecError,
    UserError,
    faults_logged,
    is_out_of_memory,
    print_to_stderr,
)
from ddpm_ds.files import MACHINE, REHEARSAL, STAGES, VERDICT, expanded
from ddpm_ds.pipeline.placement import launched_hosts
from ddpm_ds.planning import RunDraft, check_memory, choose, lay_out, machine_here, make_plan, read_run
from ddpm_ds.processes.ranks import (
    DEAD_SECONDS,
    HANG_SECONDS,
    for_good,
    on_several_hosts,
    print_once,
    record_exit,
    set_environment,
)
from ddpm_ds.schema.layout import Precision
from ddpm_ds.schema.types import ALL_SIGMAS
from ddpm_ds.tracking.address import check_experiment
from ddpm_ds.tracking.progress import ProgressLine
from ddpm_ds.tracking.run_folder import (
    OUTPUT_ROOT,
    check_output,
    checkpoints_of,
    make_run_dir,
    new_run_dir,
    remove_if_empty,
)
from ddpm_ds.tracking.tracker import start_child
from ddpm_ds.unet.layers import Layer

if TYPE_CHECKING:
    import torch

    from ddpm_ds.train.session import Ended
    from ddpm_ds.train.start import Asked

TRACED_STEPS = range(20, 23)
"""Optimizer steps that are traced by default."""
DESCRIPTION = """\
Train a diffusion U-Net on DeepSpeed's pipeline engine.

The run spec (YAML) says what is trained, the DeepSpeed JSON how. Processes are stages x ranks of a tensor group x
replicas: -p sets the stages, the launcher's --num_gpus the processes.
"""

EXAMPLES = """\
examples
  deepspeed launch/train.py --deepspeed_config ds_configs/zero2_fp16.json
      handwritten digits on this machine, fp16 and ZeRO-2
  deepspeed --num_gpus 4 launch/train.py --deepspeed_config ds_configs/zero2_fp16.json -p 2
      2 stages x 2 replicas
  deepspeed launch/train.py --deepspeed_config ds_configs/zero2_bf16.json \\
      --spec launch/specs/folder.yaml --set data.path=photos --set train.images=2000000
      your own images
  deepspeed --num_gpus 8 launch/train.py --deepspeed_config ds_configs/zero2_fp16.json \\
      --spec launch/specs/cifar10.yaml -p 4 --dry-run
      what would run, with the table of stages

exit codes
  0 done   2 bad input, nothing was started   3 the numbers went bad (NaN, loss scale at its floor)
  75 stopped by a signal or RUN_DIR/save_and_stop, and saved: start it again with the same --run-dir
  76 another rank died or hangs: the same   1 a bug
"""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every program that a launcher starts; they say what, how and where to train."""
    add_config_option(parser)
    add_spec_options(parser)
    parser.add_argument(
        "-p",
        "--pipeline-stages",
        type=processes,
        metavar="STAGES",
        help="number of stages, instead of the JSON's pipeline.stages",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--verbose", action="store_true", help="show DeepSpeed's own log")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS
    )  # launchers pass it
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # a convention of DeepSpeed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of a training run.

    Raises:
        SpecError: an option is unknown or has a wrong value.
    """
    parser = OneLineParser(
        prog="deepspeed [launcher options] launch/train.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add_train_options(parser)
    return parser.parse_args(arguments)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training run."""
    add_run_options(parser)
    parser.add_argument(
        "--run-dir",
        type=file_path,
        metavar="DIR",
        help="folder of this run; a run that is in it is resumed; MLflow's store is in its parent "
        f"(default {OUTPUT_ROOT}/DATE-NAME)",
    )
    parser.add_argument(
        "--resume",
        type=lambda text: str(expanded(text)),
        default="auto",
        metavar="auto|never|CHECKPOINT|RUN_DIR",
        help="auto: from the newest good checkpoint of --run-dir, if any (default); or from a checkpoint of any run, "
        "or its newest good one",
    )
    parser.add_argument(
        "--start-seconds",
        type=limited_seconds,
        default=300.0,
        metavar="S",
        help="how long the first ranks wait for the last one to be started (300)",
    )
    parser.add_argument(
        "--dead-seconds",
        type=seconds,
        default=DEAD_SECONDS,
        metavar="S",
        help=f"silence after which a rank is given up ({DEAD_SECONDS:g})",
    )
    parser.add_argument(
        "--hang-seconds",
        type=seconds,
        default=HANG_SECONDS,
        metavar="S",
        help=f"seconds without a step after which all ranks stop ({HANG_SECONDS:g})",
    )
    parser.add_argument(
        "--trace-steps",
        type=step_range,
        metavar="FIRST-LAST",
        help="optimizer steps whose instructions are timed on every rank, for the timeline and the verdict; none: no "
        f"step (default {TRACED_STEPS[0]}-{TRACED_STEPS[-1]} if the run is that long)",
    )
    parser.add_argument(
        "--profile-kernels",
        type=step_range,
        default=range(0),
        metavar="FIRST-LAST",
        help="optimizer steps of which PyTorch's profiler records every kernel, on every rank (default none)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help=f"only rehearse: a step or two to warm up, N timed ones and a picture by one evaluation of the U-Net, "
        f"without MLflow and checkpoints; RUN_DIR/{REHEARSAL} has the times and the memory",
    )
    parser.add_argument("--memory-budget", type=memory_size, help=argparse.SUPPRESS)  # for ddpm-ds fit
    parser.add_argument("--note", type=valid_text, metavar="TEXT", help="why this run is made; kept with it in MLflow")
    parser.add_argument("--parent-run", metavar="IDENTITY", help=argparse.SUPPRESS)  # for ddpm-ds sweep
    parser.add_argument("--described", action="store_true", help=argparse.SUPPRESS)  # train has printed the plan
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and exit")


def checked(options: argparse.Namespace, world_size: int, hosts: Sequence[str]) -> tuple[RunDraft, Path]:
    """Check the options before anything starts; return the run's draft and folder. ``hosts`` has each rank's host.

    Raises:
        UserError: an option or a file is wrong.
    """
    take_files(options, DEFAULT_SPEC, quiet=options.described or os.environ.get("RANK", "0") != "0")
    files = read_run(options.spec, options.overrides, options.deepspeed_config)
    chosen = choose(files, hosts, world_size, options.pipeline_stages, options.device)
    draft = lay_out(files, hosts, world_size, options.pipeline_stages, chosen)
    options.trace_steps = _traced(options.trace_steps, draft.steps)
    _check_steps("--profile-kernels", options.profile_kernels, draft.steps)
    if options.steps is not None:
        draft, options.resume = replace(draft, spec=_rehearsed(draft.spec)), "never"
    run_dir = options.run_dir or new_run_dir(draft.spec.name)
    _check_resume(options.resume, run_dir)
    return draft, run_dir


def _rehearsed(spec: RunSpec) -> RunSpec:
    """Return the spec of a rehearsal: as much memory and time for a step, and little time for all else."""
    changes = {
        "sampler": {"steps": 1, "spacing": "trailing", "guidance_between": ALL_SIGMAS},
        "evaluation": {"every_images": None},
    }
    sections = {name: getattr(spec, name).model_copy(update=values) for name, values in changes.items()}
    return spec.model_copy(update=sections)


def _check_resume(resume: str, run_dir: Path) -> None:
    """Raise CheckpointError if ``resume`` is neither a word nor a checkpoint nor the folder of a run that has any."""
    path = Path(resume)
    if resume in ("auto", "never") or os.path.isdir(checkpoints_of(path)) or os.path.isfile(path / MANIFEST):
        return
    if path.absolute().parent == checkpoints_of(run_dir.absolute()):  # a kill during a save may have moved it away
        return
    beside = [folder for folder in (run_dir.parent / path, OUTPUT_ROOT / path) if os.path.isdir(checkpoints_of(folder))]
    hint = f"did you mean {beside[0]}?" if beside else f"write a path, such as {OUTPUT_ROOT / 'NAME'}"
    raise CheckpointError(f"--resume {resume} is no checkpoint, and no run's folder that has one; {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training program on this rank and return its exit code."""
    try:
        with contextlib.ExitStack() as screen:  # closes the progress line before an error is printed
            set_environment()
            with _reported_to_other_hosts():
                options = parse(arguments)
                world_size = int(os.environ["WORLD_SIZE"])
                draft, run_dir = checked(options, world_size, launched_hosts(world_size))
                if int(os.environ["RANK"]) == 0:
                    check_experiment(draft.spec.logging.experiment, run_dir.parent)
                    if options.run_dir is None and not options.dry_run:
                        run_dir = make_run_dir(run_dir)
                        screen.callback(remove_if_empty, run_dir)
                    check_output(run_dir, options.resume)
                    if not options.described:
                        print(describe_plan(draft, run_dir), flush=True)
                if options.dry_run:
                    return 0
                line = sender = None
                if os.environ["RANK"] == "0":
                    line = screen.enter_context(contextlib.closing(ProgressLine(draft.spec.train.images)))
                    if options.steps is None:
                        sender = start_child()  # imports MLflow meanwhile
                        screen.callback(sender.wait)
                        screen.callback(sender.kill)
                with for_good(), line.doing("starting PyTorch and DeepSpeed") if line else contextlib.nullcontext():
                    # These import torch, after everything cheap is checked.
                    from ddpm_ds.device import choose_device
                    from ddpm_ds.pipeline import import_deepspeed

                    device = choose_device(options.device, draft.ds.layout.stages)
                    import_deepspeed()
                    warning = check_run_memory(options, draft, run_dir, device)
                    if warning is not None and os.environ["LOCAL_RANK"] == "0":
                        print(warning, flush=True)
                    from ddpm_ds.train.start import Asked
            asked = Asked(**{field.name: getattr(options, field.name) for field in fields(Asked)})
            _train(draft, run_dir, device, asked, line, sender)
    except PeerLostError as error:  # nothing may wait for other ranks, not even to leave their group
        print_to_stderr(f"{ERROR}{error}")
        os._exit(record_exit(error.exit_code))
    except (UserError, BadNumbersError, Preempted) as error:
        print_once(textwrap.indent(str(error), "ddpm_ds: " if isinstance(error, Preempted) else ERROR))
        return error.exit_code
    except Exception as error:  # an orderly exit of the interpreter would wait for other ranks
        if is_out_of_memory(error):
            fix = "ddpm-ds fit finds a micro-batch that fits"
            print_to_stderr(f"{ERROR}rank {os.environ['RANK']} {RAN_OUT}; {fix}")
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        os._exit(1)
    return 0


def _train(
    draft: RunDraft,
    run_dir: Path,
    device: torch.device,
    asked: Asked,
    line: ProgressLine | None,
    sender: Popen[bytes] | None,
) -> None:
    """Meet the other ranks, make the plan with them, and train as planned."""
    from ddpm_ds.predict.finished_run import machine_json
    from ddpm_ds.train.session import run_training
    from ddpm_ds.train.start import meet, started

    rendezvous = meet(draft, device, asked, line)
    hosts, doing = rendezvous.hosts, line.doing if line else lambda what: contextlib.nullcontext()
    with rendezvous.reporting():
        machine = machine_here(draft.ds.precision, hosts, len(hosts))
        plan = make_plan(draft, hosts, machine)
    with started(plan, run_dir, device, asked, rendezvous, line) as (prepared, watchdog):
        with watchdog.blamed(), watchdog.pause(), doing("planning the pipeline"):
            plan = make_plan(plan, hosts, machine, device)
        if line is not None and (decisions := decided_since(draft, plan)):
            print(decisions, flush=True)
        files = {STAGES: stage_table(plan), MACHINE: machine_json(machine, {})}
        with run_training(plan, prepared, watchdog, asked, line, files, sender) as ended:
            if ended is not None:
                _conclude(ended, plan.layers, plan.ds.precision, prepared.claim.run_dir)


def check_run_memory(options: argparse.Namespace, draft: RunDraft, run_dir: Path, device: torch.device) -> str | None:
    """Return a warning if a run may not fit this host's memory.

    Raises:
        LayoutError: it does not fit; the message has a change with which it does.
    """

    hosts = draft.grid.hosts

    def again(changes: Sequence[str], stages: int) -> RunDraft:
        files = read_run(options.spec, [*options.overrides, *changes], options.deepspeed_config)
        return lay_out(files, hosts, len(hosts), stages)

    if not hosts:  # unknown until the ranks have met
        return None
    new = draft.spec.train.initial_weights is None and not os.path.isdir(checkpoints_of(run_dir))
    return check_memory(draft, device, int(os.environ["RANK"]), again, new=new)


def _conclude(ended: Ended, layers: Sequence[Layer], precision: Precision, run_dir: Path) -> None:
    """Say where the time of a run that is over and saved went, and how it ended. Every rank calls this.

    A fault of a report is said in a line, and changes nothing for the run.
    """
    from ddpm_ds.observe.device_speed import startup_times
    from ddpm_ds.observe.observer import Pauses, read_pauses
    from ddpm_ds.predict import verdict
    from ddpm_ds.tracking.progress import summary

    engine, recorder = ended.engine, ended.recorder
    pauses, found = Pauses(), None
    with faults_logged("time of the pauses", recorder.log):
        pauses = read_pauses(run_dir)
        recorder.observed({"perf/run_seconds": pauses.seconds}, engine.global_steps)
    with faults_logged("verdict", recorder.log):
        if os.environ["RANK"] == "0":
            found = verdict.conclude(run_dir, startup_times(layers, engine.device, precision))
            recorder.artifact(run_dir / VERDICT)
            recorder.tags(verdict.tags(found))
    link = recorder.finish("FINISHED")
    if link is None:
        return
    with faults_logged("summary", recorder.log):
        if found is not None:
            print(f"\n{verdict.text(found, run_dir)}", flush=True)
        print(
            summary(
                loss=ended.loss,
                images=ended.images,
                images_per_second=recorder.images_per_second(),
                pauses=pauses,
                steps=engine.global_steps,
                skipped_steps=engine.count_skipped_steps(),
                run_dir=run_dir,
                link=link,
            ),
            flush=True,
        )


@contextlib.contextmanager
def _reported_to_other_hosts() -> Iterator[None]:
    """Report a UserError of this rank to the ranks of other hosts, which may not have the same error."""
    try:
        yield
    except UserError as error:
        if on_several_hosts():  # on one host its parent ends the other ranks
            from ddpm_ds.processes.rendezvous import refuse_alone

            refuse_alone(error)
        raise


def _traced(asked: range | None, steps: int) -> range:
    """Return the steps to trace in a run of ``steps`` steps."""
    if asked is None:
        return TRACED_STEPS if TRACED_STEPS[-1] <= steps else range(0)
    _check_steps("--trace-steps", asked, steps)
    return asked


def _check_steps(option: str, asked: range, steps: int) -> None:
    """Raise SpecError if the run is too short for the steps ``asked`` for."""
    if asked and asked[-1] > steps:
        raise SpecError(f"{option} {asked[0]}-{asked[-1]}, but the run has {steps} steps; use steps up to {steps}")

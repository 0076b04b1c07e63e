"""A rank's training program, which ``ddpm_ds.cli.rank`` or ``launch/train.py`` starts."""

from __future__ import annotations

import contextlib
import os
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from ddpm_ds.checkpoint.manifest import MANIFEST
from ddpm_ds.cli.options import ConfigOption, Device, OneLineParser, SpecOptions, add_options, read, take_files
from ddpm_ds.cli.plan import decided_since, describe_plan, stage_table
from ddpm_ds.config.spec_file import DEFAULT_SPEC
from ddpm_ds.ground import errors
from ddpm_ds.ground.errors import SpecError, UserError, print_to_stderr
from ddpm_ds.ground.options import HIDDEN, flag, option, process_count
from ddpm_ds.pipeline.placement import launched_hosts
from ddpm_ds.planning import run_plan
from ddpm_ds.planning.inputs import Machine
from ddpm_ds.planning.run_plan import RunDraft, RunPlan
from ddpm_ds.processes.ranks import for_good, on_several_hosts, print_for_all, record_exit, set_environment
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.address import check_experiment
from ddpm_ds.tracking.progress import ProgressLine, activity
from ddpm_ds.tracking.tracker import start_child
from ddpm_ds.training.asked import Asked

if TYPE_CHECKING:
    import torch

    from ddpm_ds.training.session import Ended

DESCRIPTION = """\
Train a diffusion U-Net on DeepSpeed's pipeline engine.

The run spec (YAML) says what is trained, the DeepSpeed JSON how. Processes are stages x ranks of a tensor group x
replicas: -p sets the stages, the launcher's --num_gpus the processes.

  deepspeed --num_gpus 4 launch/train.py --deepspeed_config ds_configs/zero2_fp16.json -p 2
      2 stages x 2 replicas; --dry-run shows what would run

exit codes (docs/exit_codes.md)
  0 done   2 bad input   3 the numbers went bad   75 stopped and saved, start it again   76 another rank died or hangs
"""


@dataclass(frozen=True)
class RankOptions(SpecOptions, ConfigOption):
    """Options of every program that a launcher starts."""

    pipeline_stages: int | None = option(
        "instead of the JSON's pipeline.stages", "STAGES", process_count, names=("-p", "--pipeline-stages")
    )
    device: Device = option("default: CUDA if any", default="auto")
    local_rank: int = option(HIDDEN, kind=int, default=0, names=("--local_rank", "--local-rank"))  # launchers pass it
    deepspeed: bool = flag(HIDDEN)  # a convention of DeepSpeed


@dataclass(frozen=True)
class TrainOptions(Asked, RankOptions):
    described: bool = flag(HIDDEN)
    """Whether ``ddpm-ds train`` has printed the plan."""
    dry_run: bool = flag("print what would run, and exit")


def parse(arguments: Sequence[str] | None) -> TrainOptions:
    """Parse the options of a training run; raises SpecError if one is unknown or has a wrong value."""
    parser = OneLineParser(prog="deepspeed [launcher options] launch/train.py", description=DESCRIPTION)
    add_options(parser, TrainOptions)
    return read(TrainOptions, parser.parse_args(arguments))


def checked(options: TrainOptions, world_size: int, hosts: Sequence[str]) -> tuple[RunDraft, Path]:
    """Check options and files before anything starts, and return the run's draft and folder.

    ``hosts`` has the host of each rank. UserError if an option or a file is wrong.
    """
    found = take_files(options, DEFAULT_SPEC, quiet=options.described or os.environ.get("RANK", "0") != "0")
    files = run_plan.read_run(found.spec, found.overrides, found.deepspeed_config)
    chosen = run_plan.choose(files, hosts, world_size, options.pipeline_stages, options.device)
    draft = run_plan.lay_out(files, hosts, world_size, options.pipeline_stages, chosen)
    for name, steps in (("--trace-steps", options.trace_steps), ("--profile-kernels", options.profile_kernels)):
        if steps and steps[-1] > draft.steps:
            asked = f"{name} {steps[0]}-{steps[-1]}"
            raise SpecError(f"{asked}, but the run has {draft.steps} steps; use steps up to {draft.steps}")
    run_dir = options.run_dir or run_folder.new_run_dir(draft.spec.name)
    _check_resume(options.resume, run_dir)
    return draft, run_dir


def _has_saved(folder: Path) -> bool:
    return os.path.isdir(run_folder.checkpoints_of(folder))


def _check_resume(resume: str, run_dir: Path) -> None:
    """Raise CheckpointError unless ``resume`` is a word, a checkpoint, or the folder of a run that has one."""
    path = Path(resume)
    if resume in ("auto", "never") or _has_saved(path) or os.path.isfile(path / MANIFEST):
        return
    if path.absolute().parent == run_folder.checkpoints_of(run_dir.absolute()):  # a killed save may have moved it
        return
    beside = filter(_has_saved, (run_dir.parent / path, run_folder.OUTPUT_ROOT / path))
    path_needed = f"write a path, such as {run_folder.OUTPUT_ROOT / 'NAME'}"
    hint = next((f"did you mean {folder}?" for folder in beside), path_needed)
    raise errors.CheckpointError(f"--resume {resume} is no checkpoint, and no run's folder that has one; {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training program on this rank and return its exit code."""
    try:
        with contextlib.ExitStack() as screen:  # closes the progress line before an error is printed
            _train(arguments, screen)
    except errors.PeerLostError as error:  # an orderly exit would wait for lost ranks
        print_to_stderr(f"{errors.ERROR}{error}")
        os._exit(record_exit(error.exit_code))
    except (UserError, errors.BadNumbersError, errors.Preempted) as error:
        print_for_all(textwrap.indent(str(error), "ddpm_ds: " if isinstance(error, errors.Preempted) else errors.ERROR))
        return error.exit_code
    except Exception as error:  # an orderly exit of the interpreter would wait for other ranks
        if errors.is_out_of_memory(error):
            fix = "take smaller micro-batches, by a larger train.accumulation"
            print_to_stderr(f"{errors.ERROR}rank {os.environ['RANK']} ran out of memory; {fix}")
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        os._exit(1)
    return 0


def _train(arguments: Sequence[str] | None, screen: contextlib.ExitStack) -> None:
    set_environment()
    try:
        options, world_size = parse(arguments), int(os.environ["WORLD_SIZE"])
        draft, run_dir = checked(options, world_size, launched_hosts(world_size))
        if int(os.environ["RANK"]) == 0:
            check_experiment(draft.spec.logging.experiment, run_dir.parent)
            if options.run_dir is None and not options.dry_run:
                run_dir = run_folder.make_run_dir(run_dir)
                screen.callback(run_folder.remove_if_empty, run_dir)
            run_folder.check_output(run_dir, options.resume)
            if not options.described:
                print(describe_plan(draft, run_dir), flush=True)
        if options.dry_run:
            return
        line = sender = None
        if os.environ["RANK"] == "0":
            line = screen.enter_context(contextlib.closing(ProgressLine(draft.spec.train.images)))
            sender = start_child()  # imports MLflow meanwhile
            screen.callback(sender.wait)
            screen.callback(sender.kill)
        with for_good(), activity(line, "starting PyTorch and DeepSpeed"):
            # These import torch, so everything cheap is checked first.
            from ddpm_ds.ground.device import choose_device
            from ddpm_ds.pipeline import import_deepspeed

            device = choose_device(options.device, draft.ds.layout.stages)
            import_deepspeed()
            machine = run_plan.machine_here(draft.ds.precision, world_size)
            warning = check_run_memory(options.overrides, draft, run_dir, machine)
            if warning is not None and os.environ["LOCAL_RANK"] == "0":
                print(warning, flush=True)
    except UserError as error:
        if on_several_hosts():  # their ranks may not have the same error; on one host the parent ends the others
            from ddpm_ds.processes.rendezvous import refuse_alone

            refuse_alone(error)
        raise
    _train_with_others(draft, machine, run_dir, device, options, line, sender)


def _train_with_others(
    draft: RunDraft,
    machine: Machine,
    run_dir: Path,
    device: torch.device,
    asked: Asked,
    line: ProgressLine | None,
    sender: Popen[bytes] | None,
) -> None:
    """Meet the other ranks, make the plan with them, and train as planned."""
    from ddpm_ds.planning.finished_run import machine_json
    from ddpm_ds.training.session import run_training
    from ddpm_ds.training.start import meet, shared_images, started

    rendezvous = meet(draft, device, asked, line)
    with rendezvous.reporting(), run_folder.disk_errors_reported(run_dir), activity(line, "checking the run's images"):
        plan = run_plan.make_plan(draft, rendezvous.hosts, machine)
        images = shared_images(draft.spec, run_dir, asked.resume, rendezvous)
    with started(plan, images, run_dir, device, asked, rendezvous, line) as (prepared, watchdog):
        with watchdog.blamed(), watchdog.pause(), activity(line, "planning the pipeline"):
            plan = run_plan.with_decisions(plan, device)
            seen = prepared.checkpoint.manifest.images if prepared.checkpoint else 0
            ahead = ""
            with errors.faults_logged("forecast", print):
                ahead = run_plan.forecast(plan, device, seen)
        if line is not None and (news := "\n".join(filter(None, (decided_since(draft, plan), ahead)))):
            print(news, flush=True)
        files = {run_folder.STAGES: stage_table(plan), run_folder.MACHINE: machine_json(plan.machine)}
        with run_training(plan, prepared, watchdog, asked, line, files, sender) as ended:
            if ended is not None:
                _conclude(ended, plan, prepared.claim.run_dir)


def check_run_memory(overrides: Sequence[str], draft: RunDraft, run_dir: Path, machine: Machine) -> str | None:
    """Return a warning if a run may not fit this host's memory; LayoutError, with a change that helps, if it can't."""
    hosts = draft.grid.hosts

    def again(changes: Sequence[str], stages: int) -> RunDraft:
        files = run_plan.read_run(draft.spec_path, [*overrides, *changes], draft.ds_path)
        return run_plan.lay_out(files, hosts, len(hosts), stages)

    if not hosts:  # unknown until the ranks have met
        return None
    new = draft.spec.train.initial_weights is None and not _has_saved(run_dir)
    return run_plan.check_memory(draft, machine, int(os.environ["RANK"]), again, new=new)


def _conclude(ended: Ended, plan: RunPlan, run_dir: Path) -> None:
    """Print the verdict and summary of a saved run. Every rank calls this.

    A fault of a report is logged as one line and changes nothing for the run.
    """
    from ddpm_ds.observe.device_speed import startup_times
    from ddpm_ds.observe.observer import Pauses, read_pauses
    from ddpm_ds.planning import verdict
    from ddpm_ds.tracking.progress import summary

    engine, recorder = ended.engine, ended.recorder
    pauses, found = Pauses(), None
    with errors.faults_logged("time of the pauses", recorder.log):
        pauses = read_pauses(run_dir)
        recorder.observed({"perf/run_seconds": pauses.seconds}, engine.global_steps)
    with errors.faults_logged("verdict", recorder.log):
        if os.environ["RANK"] == "0":
            found = verdict.conclude(run_dir, startup_times(plan.layers, engine.device, plan.ds.precision))
            recorder.artifact(run_dir / run_folder.VERDICT)
            recorder.tags(verdict.tags(found))
    with errors.faults_logged("description in MLflow", recorder.log):
        layout = plan.ds.layout if on_several_hosts() else replace(plan.ds.layout, across_hosts="auto")
        words = f"{layout.words()}, {plan.ds.precision} on {engine.device.type}"
        recorder.result(words, ended.loss, "" if found is None else verdict.text(found, run_dir))
    link = recorder.finish("FINISHED")
    if link is None:
        return
    with errors.faults_logged("summary", recorder.log):
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

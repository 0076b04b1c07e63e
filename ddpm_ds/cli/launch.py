"""Verbs that start the ranks of runs and stay with them: ``train``; ``run``, which starts any training script; and
``sweep``, which trains a spec with different values of some settings, one run after another, and compares them.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ddpm_ds.checkpoint.folder import LATEST, images_of
from ddpm_ds.cli.plan import describe_plan
from ddpm_ds.cli.runs import metric_names
from ddpm_ds.cli.train import add_train_options, checked, parse
from ddpm_ds.command_line import (
    OneLineParser,
    Verbs,
    add_config_option,
    add_spec_options,
    counted,
    file_path,
    gib,
    grace_seconds,
    natural,
    port,
    processes,
    take_files,
    valid_text,
    without,
)
from ddpm_ds.config.ds_config import check_ds_config, read_ds_config
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec, spec_overrides
from ddpm_ds.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PREEMPTED, SpecError, print_to_stderr
from ddpm_ds.experiments.sweep import (
    BASELINE,
    SHORTHANDS,
    Sweep,
    Trial,
    make_trials,
    parse_variables,
    plan_trials,
    run_command,
)
from ddpm_ds.files import REHEARSAL
from ddpm_ds.planning import RunPlan
from ddpm_ds.processes.signals import heard_signals
from ddpm_ds.processes.supervisor import Node, Outcome, Place, gpus, supervise
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.address import check_experiment
from ddpm_ds.tracking.runs import ExperimentError, add_runs_option
from ddpm_ds.tracking.tracker import Status

TRAIN_DESCRIPTION = """\
Train a diffusion U-Net: check everything, start the processes, stay with them, and say at the end what was saved and
how to go on. Ctrl-C or SIGTERM lets the ranks finish their step and save; a second one ends them at once.

The run spec (YAML) says what is trained, the DeepSpeed JSON how. Processes are stages x replicas: -p sets the stages.
"""
TRAIN_EPILOG = """\
examples
  ddpm-ds train --deepspeed_config ds_configs/zero2_fp16.json
      handwritten digits on this machine, fp16 and ZeRO-2
  ddpm-ds train --processes 4 -p 2 --deepspeed_config ds_configs/zero2_fp16.json
      2 stages x 2 replicas
  ddpm-ds train --hostfile hostfile -p 4 --deepspeed_config ds_configs/zero2_fp16.json --spec launch/specs/cifar10.yaml
      on several hosts; --dry-run says what would run

exit codes are those of run (docs/exit_codes.md)
"""
RUN_DESCRIPTION = """\
Start a training script on the processes of this machine, or on those of a hostfile by DeepSpeed's launcher, and stay
with them. SIGTERM, SIGINT, SIGUSR1 and SIGHUP make the ranks finish their step, save and stop; a second signal ends
them at once. If ranks are lost, the run is started again and resumes from the newest checkpoint of its --run-dir, which
must be given. Nothing is left running. For several hosts, start it on one host of the hostfile, preferably the first;
each start reads the hostfile again. For other launchers and their options type deepspeed, torchrun, srun or mpirun.
"""

RUN_EPILOG = """\
examples
  ddpm-ds run launch/train.py --deepspeed_config ds_configs/zero2_fp16.json --run-dir runs/digits
  ddpm-ds run --max-restarts 3 --processes 4 launch/train.py -p 2 \\
      --deepspeed_config ds_configs/zero2_fp16.json --run-dir runs/digits
  ddpm-ds run --max-restarts 3 --hostfile hostfile launch/train.py -p 2 \\
      --deepspeed_config ds_configs/zero2_fp16.json --run-dir runs/digits

exit codes (docs/exit_codes.md)
  0 done   2 bad input   3 the numbers went bad   75 stopped and saved, start it again   76 ranks were lost
  129 to 143 ended at once by a second signal   1 a bug
"""
PARENT_SECONDS = 30.0
"""Maximum seconds that the first trial waits until its parent run is in MLflow."""
OWN_OPTIONS = {
    "spec": "--spec",
    "overrides": "--set",
    "deepspeed_config": "--deepspeed_config",
    "run_dir": "--run-dir",
    "parent_run": "--parent-run",
    "note": "--note",
    "resume": "--resume",
    "dry_run": "--dry-run",
    "steps": "--steps",
}
"""Options of launch/train.py that the sweep itself sets for each trial, by the names of their values."""

SWEEP_DESCRIPTION = """\
Train the same spec with different values of something, one run after another, and compare the runs. The baseline has
the first value of each variable; every other value is tried alone, or with --full in every combination. All trials are
checked before the first one starts. The runs are children of one run in MLflow. The same command continues where it was
stopped: what is done is skipped, what failed is tried again.
"""

SWEEP_EXAMPLES = f"""\
variables
  {", ".join(SHORTHANDS)}
  or a key of the spec (unet.channels), or one of the DeepSpeed JSON after ds. (ds.zero_optimization.stage)

examples
  ddpm-ds sweep --spec launch/specs/digits.yaml --deepspeed_config ds_configs/zero2_fp16.json \\
      --vary precision=fp32,fp16 --vary processes=1,2 --note "is half precision worth it on this machine?"
      three runs: fp32 on one process, then fp16 alone, then two processes alone
  ddpm-ds sweep ... --vary processes=4 --vary stages=1,2,4 --vary schedule=1f1b,folded --full -- --trace-steps 10-12
      every combination, with an option of launch/train.py for all

exit codes
  0 all trials are done   2 bad input, nothing was started   75 stopped, start it again
  else that of the first trial that failed, see ddpm-ds run --help
"""


def add_train(verbs: Verbs) -> None:
    """Add the verb ``train``."""
    parser = verbs.add_parser(
        "train", help="train a U-Net on this machine or on several", description=TRAIN_DESCRIPTION, epilog=TRAIN_EPILOG
    )
    _add_launch_options(parser)
    add_train_options(parser)
    parser.set_defaults(run=_train)


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    where, filters = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    where.add_argument(
        "--processes", type=processes, metavar="N", help="processes on this machine (default: one for each GPU, or one)"
    )
    where.add_argument(
        "--hostfile", type=file_path, metavar="FILE", help="hosts and their processes, as DeepSpeed reads them"
    )
    parser.add_argument(
        "--nodes", type=processes, default=1, metavar="N", help="hosts on each of which this is typed (default 1)"
    )
    parser.add_argument(
        "--node-rank", type=natural, default=0, metavar="K", help="this one's place among them, from 0 (default 0)"
    )
    parser.add_argument("--master-addr", metavar="HOST", help="name or address of the first of them")
    filters.add_argument("--include", default="", metavar="HOST:0,1@HOST", help="only these hosts and slots of it")
    filters.add_argument("--exclude", default="", metavar="HOST:0,1@HOST", help="all but these hosts and slots of it")
    parser.add_argument(
        "--port", type=port, metavar="PORT", help="where ranks meet (default: a free one; with a hostfile 29500)"
    )
    _add_restart_options(parser)


def _place(options: argparse.Namespace, device: str) -> Place:
    """Return where the ranks are started: by default one for each GPU of this host, or one on its CPU."""
    count = options.processes
    if count is None and options.hostfile is None:
        asked = os.environ.get("DS_ACCELERATOR", device) if device == "auto" else device
        count = 1 if asked == "cpu" else max(1, gpus())
    if options.nodes > 1 and options.hostfile is not None:
        raise SpecError(
            "--nodes and --hostfile both say where ranks run; a hostfile names all hosts, so leave --nodes out"
        )
    if options.nodes > 1 and options.master_addr is None:
        raise SpecError(f"--nodes {options.nodes} needs --master-addr HOST, the address of the host with --node-rank 0")
    node = Node(options.node_rank, options.nodes, options.master_addr or Node.master)
    return Place(count or 0, node, options.hostfile, options.include, options.exclude, options.port)


def _train(options: argparse.Namespace) -> int:
    place, given = _place(options, options.device), vars(options).copy()
    hosts = tuple(host for host, slots in place.hosts().items() for _ in range(slots))
    plan, run_dir = checked(options, len(hosts), hosts)
    check_experiment(plan.spec.logging.experiment, run_dir.parent)
    if not options.dry_run:
        place.check()
    if options.run_dir is None and place.node.of > 1:
        raise SpecError(f"--nodes {place.node.of} needs --run-dir DIR, a folder that all hosts share")
    if options.run_dir is None and not options.dry_run:
        run_dir = run_folder.make_run_dir(run_dir)
    run_folder.check_output(run_dir, options.resume)
    print(describe_plan(plan, run_dir), flush=True)
    if options.dry_run:
        return 0
    asked = without(options.arguments, _add_launch_options)
    if plan.chosen is not None:
        asked += ["-p", str(plan.chosen.stages)]
        if plan.chosen.tensor is not None:
            asked += ["--set", f"ds.pipeline.tensor={json.dumps(plan.chosen.tensor.block)}"]
    if options.run_dir is None:
        asked += ["--run-dir", str(run_dir)]
    for name in ("spec", "deepspeed_config"):
        if given[name] is None and (found := getattr(options, name)) != DEFAULT_SPEC:
            asked += [f"--{name}", str(found)]
    program = ["-m", "ddpm_ds.cli.rank", *asked]
    words = [f"{place.processes} x python", *program]
    if place.hostfile is not None:
        words = ["deepspeed", *place.deepspeed(program)]
    print(f"starting     {words[0]} {shlex.join(words[1:])}", flush=True)
    ended = supervise(
        [*program, "--described"],
        place,
        max_restarts=options.max_restarts,
        grace_seconds=options.grace_seconds,
        log=functools.partial(_log, "train"),
    )
    again = options.arguments
    if options.run_dir is None:
        run_folder.remove_if_empty(run_dir)
        again = [*again, "--run-dir", str(run_dir)]
    rehearsed = options.steps is not None and ended.code == 0
    _log("train", f"rehearsed: {run_dir / REHEARSAL}" if rehearsed else _outcome(ended, run_dir, again))
    return ended.code


def _outcome(ended: Outcome, run_dir: Path, arguments: Sequence[str]) -> str:
    """Return a line that says what a run has saved, and which command continues it, unless it would fail again."""
    latest = run_folder.checkpoints_of(run_dir) / LATEST
    saved = images_of(latest.read_bytes().decode(errors="replace").strip()) if latest.is_file() else None
    if ended.code == 0:
        return f"done; draw from it with: {shlex.join(['ddpm-ds', 'sample', str(run_dir)])}"
    resumed = without(arguments, lambda parser: parser.add_argument("--resume"))
    again = shlex.join(["ddpm-ds", "train", *resumed])
    what, how = "nothing was saved", "start again"
    if saved is not None:
        what, how = f"saved after {saved:,} images in {run_dir}", "go on"
    if ended.killed:
        from ddpm_ds.device import host_memory  # imports torch

        return (
            f"{what}; a process was killed, probably for memory, of which this machine has {gib(host_memory())}: "
            "use a smaller U-Net, or a micro-batch that ddpm-ds fit finds"
        )
    if ended.code in (1, EXIT_BAD_INPUT, EXIT_BAD_NUMBERS):
        return f"{what}; see the error above"
    return f"{what}; {how} with: {again}"


def add_run(verbs: Verbs) -> None:
    """Add the verb ``run``."""
    parser = verbs.add_parser(
        "run",
        help="start a training script, with restarts, orderly stops and clear exit codes",
        description=RUN_DESCRIPTION,
        epilog=RUN_EPILOG,
    )
    _add_launch_options(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="training script, its options")
    parser.set_defaults(run=_run, unknown=[])


def _run(options: argparse.Namespace) -> int:
    after = OneLineParser(prog="ddpm-ds run")  # options may also come after --
    _add_launch_options(after)
    after.add_argument("program", nargs=argparse.REMAINDER)
    options, unknown = after.parse_known_args(options.program[options.program[:1] == ["--"] :], options)
    if unknown := [*options.unknown, *unknown]:
        words = [word for word in without(options.arguments, _add_restart_options) if word != "--"]
        instead = shlex.join(["deepspeed", *words])
        raise SpecError(f"run has no option {unknown[0]}; see ddpm-ds run --help, or type: {instead}")
    return supervise(
        options.program,
        _place(options, "auto"),
        max_restarts=options.max_restarts,
        grace_seconds=options.grace_seconds,
        log=functools.partial(_log, "run"),
    ).code


def _add_restart_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-restarts",
        type=natural,
        default=0,
        metavar="N",
        help="restarts in a row without a new checkpoint (default 0)",
    )
    parser.add_argument(
        "--grace-seconds",
        type=grace_seconds,
        default=300.0,
        metavar="S",
        help="seconds for the ranks to save and stop after a signal (default 300)",
    )


def _log(verb: str, line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may have been closed
        print_to_stderr(f"ddpm-ds {verb}: {line}")


def add_sweep(verbs: Verbs) -> None:
    """Add the verb ``sweep``."""
    parser = verbs.add_parser(
        "sweep",
        help="train one spec with different values, and compare the runs",
        description=SWEEP_DESCRIPTION,
        epilog=SWEEP_EXAMPLES,
    )
    add_spec_options(parser)
    add_config_option(parser)
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="NAME=VALUE,VALUE",
        help="a setting and its values; may be repeated",
    )
    parser.add_argument("--full", action="store_true", help="every combination of values")
    parser.add_argument(
        "--processes", type=processes, default=1, metavar="N", help="processes of each run, unless varied (default 1)"
    )
    parser.add_argument("--note", type=valid_text, metavar="TEXT", help="why this is tried; kept in MLflow")
    parser.add_argument("--metrics", type=metric_names, metavar="A,B", help="metrics to compare")
    add_runs_option(parser)
    parser.add_argument(
        "--grace-seconds",
        type=grace_seconds,
        default=300.0,
        metavar="S",
        help="seconds for a run to save and stop (default 300)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check and print the trials, and exit")
    parser.add_argument(
        "train_options", nargs=argparse.REMAINDER, metavar="-- ...", help="options of launch/train.py for every run"
    )
    parser.set_defaults(run=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    take_files(options)
    asked = _check_train_options(options)
    own = spec_overrides(options.overrides)
    spec, config = load_spec(options.spec, own), read_ds_config(options.deepspeed_config, options.overrides)
    check_ds_config(config, options.deepspeed_config)
    variables = parse_variables(options.vary)
    if asked.pipeline_stages is not None and "stages" in variables:
        raise ExperimentError(
            f"-p {asked.pipeline_stages} after -- and --vary stages say the same thing twice; leave one out"
        )
    trials = make_trials(variables, config, own, options.processes, full=options.full)
    plans = plan_trials(
        trials, options.spec, options.deepspeed_config, stages=asked.pipeline_stages, device=asked.device
    )
    for trial, plan in zip(trials, plans, strict=True):
        for option, steps in (("--trace-steps", asked.trace_steps), ("--profile-kernels", asked.profile_kernels)):
            if steps and steps[-1] > plan.steps:
                raise ExperimentError(
                    f"{option} after --: trial {trial.label} has {plan.steps} steps; use some of those"
                )
    check_experiment(spec.logging.experiment, options.runs)
    asked_for = [options.vary, options.full, options.processes, options.train_options]
    content = json.dumps([spec.model_dump(mode="json"), config, *asked_for], sort_keys=True).encode()
    sweep = Sweep(options.runs / f"vary-{spec.name}-{hashlib.sha256(content).hexdigest()[:8]}", trials)
    print(_describe(sweep, plans), flush=True)
    return 0 if options.dry_run else _train_trials(sweep, plans, options)


def _check_train_options(options: argparse.Namespace) -> argparse.Namespace:
    """Parse the options after ``--`` as launch/train.py does, and remove the ``--`` from them.

    Raises:
        ExperimentError: there is anything else, or an option that the sweep itself sets.
        SpecError: an option is unknown or has a wrong value.
    """
    first, *given = options.train_options or ["--"]
    if first != "--":
        raise ExperimentError(f"{first} is no option of sweep; write options of launch/train.py after --")
    options.train_options = given
    config = ["--deepspeed_config", str(options.deepspeed_config)]
    default, asked = parse(config), parse([*config, *given])
    for name, option in OWN_OPTIONS.items():
        if getattr(asked, name) != getattr(default, name):
            raise ExperimentError(f"{option} after --: each trial gets its own; leave it out, or give it before the --")
    return asked


def _describe(sweep: Sweep, plans: Sequence[RunPlan]) -> str:
    """Return a text that lists the trials and their layouts."""
    lines = [f"sweep        {sweep.folder}, {counted(len(sweep.trials), 'trial')}"]
    for trial, plan in zip(sweep.trials, plans, strict=True):
        layout = plan.ds.layout
        state = " (done)" if sweep.finished(trial) else ""
        lines.append(
            f"  {trial.label}: {layout.processes_words()}, "
            f"{plan.ds.precision}, ZeRO-{plan.ds.layout.zero_stage}, "
            f"{counted(layout.micro_batches, 'micro-batch')} of {layout.micro_batch_images}, "
            f"{plan.steps:,} steps{state}"
        )
    values = ", ".join(f"{name}={value}" for name, value in sweep.trials[0].values.items())
    return "\n".join([*lines, f"{BASELINE}     {values}"])


def _train_trials(sweep: Sweep, plans: Sequence[RunPlan], options: argparse.Namespace) -> int:
    """Run the trials that are not done, within the sweep's run in MLflow, and compare all; return the exit code."""

    def log(line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may have been closed
            tqdm.write(f"ddpm-ds sweep: {line}", file=sys.stderr)

    variables = [item.partition("=") for item in options.vary]
    params = {
        "vary": {name.strip(): values for name, _, values in variables},
        "full": options.full,
        "command": shlex.join(["ddpm-ds", *sys.argv[1:]]),
    }
    with run_folder.disk_errors_said(sweep.folder), run_folder.claim_folder(sweep.folder), heard_signals() as heard:
        tracker, identity = sweep.begin(plans[0].spec.logging.experiment, params, options.note, log)
        until = time.monotonic() + PARENT_SECONDS
        while tracker.run_id is None and not heard and time.monotonic() < until:
            time.sleep(0.1)
        with tqdm(total=len(sweep.trials), unit="trial", disable=None) as bar:
            for done, (trial, plan) in enumerate(zip(sweep.trials, plans, strict=True)):
                if heard:
                    break
                bar.n = done
                if sweep.finished(trial):
                    log(f"{trial.label}: done before")
                    continue
                sweep.prepare(trial, plan.spec)
                log(f"{trial.label}: started, its output is in {sweep.log(trial)}")
                command = sweep.command(trial, identity, options.grace_seconds, options.train_options)
                tick = partial(_show_progress, bar, done, sweep, trial, plan.spec.train.images)
                ending = run_command(command, sweep.log(trial), heard, tick)
                sweep.remember(trial, ending)
                log(f"{trial.label}: {ending.words()} after {ending.seconds:,.0f} s")
                if ending.stopped:
                    break
                if not ending.finished:
                    for line in ending.said:
                        log(f"    {line}")
                    tracker.artifact(sweep.log(trial), f"failed/{trial.name}")
            bar.n = sum(map(sweep.finished, sweep.trials))
        code, status = _outcome_of_sweep(sweep, stopped=bool(heard))
        if not heard and (table := sweep.compare(options.metrics, tracker, log)):
            print(f"\n{table}", flush=True)
        tracker.finish(status)
        _log_what_next(sweep, code, log)
    return code


def _show_progress(bar: Any, done: int, sweep: Sweep, trial: Trial, total: int) -> None:
    """Move the bar while a trial trains, by the share of its ``total`` images that it has seen."""
    images = sweep.progress(trial)
    bar.n = round(done + min(images / total, 1.0), 2)
    bar.set_postfix_str(f"{trial.label}, {images:,}/{total:,} images")


def _outcome_of_sweep(sweep: Sweep, *, stopped: bool) -> tuple[int, Status]:
    """Return the exit code, and the final status of the sweep's run in MLflow."""
    for ending in sweep.endings.values():
        if ending.stopped:
            return (ending.exit_code if ending.exit_code > 0 else EXIT_PREEMPTED), "KILLED"
    if stopped and len(sweep.endings) < len(sweep.trials):
        return EXIT_PREEMPTED, "KILLED"
    failed = [ending.exit_code for ending in sweep.endings.values() if not ending.finished]
    return (failed[0], "FAILED") if failed else (0, "FINISHED")


def _log_what_next(sweep: Sweep, code: int, log: Callable[[str], None]) -> None:
    done = sum(map(sweep.finished, sweep.trials))
    if code == 0:
        return log(f"all {done} trials are done; look again: ddpm-ds compare {sweep.folder}")
    for trial in sweep.trials:
        if trial.name in sweep.endings and not sweep.finished(trial):
            log(f"{trial.label}: {sweep.endings[trial.name].words()}, see {sweep.log(trial)}")
    log(f"{done} of {len(sweep.trials)} trials are done; the same command continues with the others")

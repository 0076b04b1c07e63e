"""``ddpm-ds sweep``: train a spec with different values of some settings, one run after another, and compare them."""

import argparse
import contextlib
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from ddpm_ds.cli.runs import metric_names
from ddpm_ds.cli.train import parse
from ddpm_ds.command_line import Verbs, add_spec_options, counted, file_path, grace_seconds, processes, valid_text
from ddpm_ds.config.ds_config import check_ds_config, read_ds_config
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.errors import EXIT_PREEMPTED
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
from ddpm_ds.planning import RunPlan
from ddpm_ds.processes.signals import heard_signals
from ddpm_ds.tracking.address import check_experiment
from ddpm_ds.tracking.run_folder import claim_folder, disk_errors_said
from ddpm_ds.tracking.runs import ExperimentError, add_runs_option
from ddpm_ds.tracking.tracker import Status

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

DESCRIPTION = """\
Train the same spec with different values of something, one run after another, and compare the runs. The baseline has
the first value of each variable; every other value is tried alone, or with --full in every combination. All trials are
checked before the first one starts. The runs are children of one run in MLflow. The same command continues where it was
stopped: what is done is skipped, what failed is tried again.
"""

EXAMPLES = f"""\
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


def add_sweep(verbs: Verbs) -> None:
    """Add the verb ``sweep``."""
    parser = verbs.add_parser(
        "sweep",
        help="train one spec with different values, and compare the runs",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add_spec_options(parser)
    parser.add_argument(
        "--deepspeed_config", type=file_path, required=True, metavar="JSON", help="DeepSpeed JSON to train with"
    )
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
    return 0 if options.dry_run else _train(sweep, plans, options)


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


def _train(sweep: Sweep, plans: Sequence[RunPlan], options: argparse.Namespace) -> int:
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
    with disk_errors_said(sweep.folder), claim_folder(sweep.folder), heard_signals() as heard:
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
        code, status = _outcome(sweep, stopped=bool(heard))
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


def _outcome(sweep: Sweep, *, stopped: bool) -> tuple[int, Status]:
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

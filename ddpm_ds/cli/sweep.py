"""``ddpm-ds sweep``: train a spec with all combinations of some values, and compare the runs."""

import contextlib
import hashlib
import json
import shlex
import shutil
import sys
from argparse import REMAINDER
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddpm_ds.cli.options import ConfigOption, SpecOptions, Verb, log_line, take_files
from ddpm_ds.cli.train import parse
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.experiments.compare import of_folder, terminal
from ddpm_ds.experiments.sweep import LOG, OPTIONS, Trial, make_trials, parse_variables, run_command
from ddpm_ds.ground.errors import EXIT_PREEMPTED, UserError
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.options import flag, option, process_count, valid_text
from ddpm_ds.ground.units import counted
from ddpm_ds.processes.signals import received_signals
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.address import check_experiment
from ddpm_ds.tracking.run_folder import KIND_TAG, OUTPUT_ROOT, RunFolder, identity_of
from ddpm_ds.tracking.runs import SWEEP, ExperimentError
from ddpm_ds.tracking.tracker import RunStart, Tracker

COMPARISON = "comparison.txt"
OWN = ["spec", "overrides", "deepspeed_config", "run_dir", "parent_run", "note", "resume", "dry_run"]
"""Options of ``ddpm-ds train`` that the sweep sets for each trial."""


@dataclass(frozen=True)
class SweepOptions(ConfigOption, SpecOptions):
    vary: tuple[str, ...] = option(
        f"values of {', '.join(OPTIONS)}, a key of the spec, or ds.KEY of the JSON; may be repeated",
        "NAME=VALUE,VALUE",
        action="append",
        required=True,
    )
    processes: int = option("processes of each run (default 1)", "N", process_count, default=1)
    note: str | None = option("why this is tried; kept in MLflow", "TEXT", valid_text)
    runs: Path = option(f"folder of the runs, with MLflow's store (default {OUTPUT_ROOT})", "DIR", default=OUTPUT_ROOT)
    dry_run: bool = flag("check and print the trials, and exit")
    train_options: tuple[str, ...] = option(
        "options of ddpm-ds train, such as -p 2", "-- ...", names=("train_options",), nargs=REMAINDER, default=()
    )


@Verb
def sweep(options: SweepOptions) -> int:
    """Train one spec with different values, and compare the runs.

    Trains with all combinations of the values, one run after another, which are children of one run in MLflow. All
    trials are checked before the first one starts. The same command continues a sweep: it skips trials that are done
    and repeats those that failed. The exit code is that of the first trial that failed, or 75 after a stop.

      ddpm-ds sweep --spec launch/specs/digits.yaml --deepspeed_config ds_configs/zero2_fp16.json \\
          --vary ds.fp16.enabled=false,true --vary processes=1,2 --note "is half precision worth it on this machine?"
    """
    files, (first, *given) = take_files(options), options.train_options or ("--",)
    if first != "--":
        raise ExperimentError(f"{first} is no option of sweep; write options of ddpm-ds train after --")
    config_option = ["--deepspeed_config", str(files.deepspeed_config)]
    default, asked = parse(config_option), parse([*config_option, *given])
    for name in OWN:
        if getattr(asked, name) != getattr(default, name):
            raise ExperimentError(f"{name} after --: the sweep sets it; leave it out or write it before --")
    spec = load_spec(files.spec, spec_overrides(files.overrides))
    config = read_ds_config(files.deepspeed_config, files.overrides)
    content = json.dumps([spec.model_dump(mode="json"), config, options.vary, options.processes, given], sort_keys=True)
    folder = options.runs / f"sweep-{spec.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    trials = make_trials(
        parse_variables(options.vary),
        folder,
        files.spec,
        files.deepspeed_config,
        files.overrides,
        processes=options.processes,
        stages=asked.pipeline_stages,
        device=asked.device,
    )
    check_experiment(spec.logging.experiment, options.runs)
    print(f"sweep        {folder}, {counted(len(trials), 'trial')}")
    for trial in trials:
        layout, state = trial.draft.ds.layout, " (done)" if trial.done else ""
        batch = f"{counted(layout.micro_batches, 'micro-batch')} of {layout.micro_batch_images}"
        how = f"{trial.draft.ds.precision}, ZeRO-{layout.zero_stage}, {batch}, {trial.draft.steps:,} steps"
        print(f"  {trial.label}: {layout.processes_words()}, {how}{state}", flush=True)
    return 0 if options.dry_run else _train(folder, trials, options, given)


_log = partial(log_line, "sweep")


def _train(folder: Path, trials: list[Trial], options: SweepOptions, given: list[str]) -> int:
    """Run the trials that are not done, compare all, and return the exit code."""
    failed, stopped = dict[str, int](), 0
    with run_folder.disk_errors_reported(folder), run_folder.claim_folder(folder), received_signals() as received:
        # before identity(): a run that has one keeps its note
        tags = run_folder.labels(folder, options.note, _log) | {KIND_TAG: SWEEP, "mlflow.source.name": "ddpm-ds sweep"}
        identity = RunFolder(folder).identity()
        params = {"vary": " ".join(options.vary), "command": shlex.join(["ddpm-ds", *sys.argv[1:]])}
        experiment = trials[0].draft.spec.logging.experiment
        tracker = Tracker(RunStart(experiment, folder, params, tags, identity=identity), _log)
        for trial in trials:
            if trial.done or received or stopped:
                continue
            trial.prepare(options.overrides)
            _log(f"{trial.label}: started, its output is in {trial.run_dir / LOG}")
            code, why = run_command(trial.command(identity, given), trial.run_dir / LOG, received)
            if code == EXIT_PREEMPTED or not 0 <= code <= 128:  # by request
                stopped = code if code > 0 else EXIT_PREEMPTED
            elif code:
                failed[trial.label] = code
                tracker.artifact(trial.run_dir / LOG, f"failed/{trial.run_dir.name}")
            _log("\n    ".join((f"{trial.label}: {f'exit code {code}' if code else 'done'}", *why)))
        done = sum(trial.done for trial in trials)
        begun = [trial.run_dir for trial in trials if identity_of(trial.run_dir)]
        with contextlib.suppress(UserError):  # a trial that failed before it had anything
            if begun and not (received or stopped):
                text = terminal([of_folder(run) for run in begun], width=shutil.get_terminal_size((120, 24)).columns)
                print(f"\n{text}", flush=True)
                replace_file(folder / COMPARISON, text.encode() + b"\n")
                tracker.artifact(folder / COMPARISON)
        tracker.finish("KILLED" if received or stopped else "FAILED" if failed else "FINISHED")
    for label, code in failed.items():
        _log(f"{label}: exit code {code}")
    again = f"look again: ddpm-ds compare {folder}" if done == len(trials) else "the same command continues"
    _log(f"{done} of {len(trials)} trials are done; {again}")
    return stopped or (EXIT_PREEMPTED if received and done < len(trials) else 0) or next(iter(failed.values()), 0)

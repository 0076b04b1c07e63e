"""``ddpm-ds vary``: train a grid of runs, one after another, and compare them."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ddpm_ds.cli.train import parse
from ddpm_ds.command_line import add_overrides, positive
from ddpm_ds.config.ds_config import check_ds_config, read_ds_config
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.errors import EXIT_PREEMPTED, OutputError
from ddpm_ds.experiments.grid import BASELINE, SHORTHANDS, Trial, cells, parse_variable, plan_cells
from ddpm_ds.experiments.sweep import TRAIN, Sweep, begin_parent, compare_cells, digest, heard_signals, run_command
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.tracking.run_folder import claim_folder
from ddpm_ds.tracking.runs import ExperimentError, add_runs_option

PARENT_SECONDS = 30.0
"""How long the first cell waits for its parent to be in MLflow, under which it wants to be."""
TICK_SECONDS = 1.0
OWN_OPTIONS = {
    "spec": "--spec",
    "overrides": "--set",
    "deepspeed_config": "--deepspeed_config",
    "run_dir": "--run-dir",
    "parent_run": "--parent-run",
    "note": "--note",
    "resume": "--resume",
    "dry_run": "--dry-run",
}
"""Of launch/train.py: a grid sets them itself for each cell."""

DESCRIPTION = """\
Train the same spec with different values of something, one run after another, and compare the runs. The baseline has
the first value of each variable; every other value is tried alone, or with --full in every combination. All cells are
checked before the first one starts. The runs are children of one run in MLflow. The same command goes on where it was
stopped: what is done is skipped, what failed is tried again.
"""

EXAMPLES = f"""\
variables
  {", ".join(SHORTHANDS)}
  or a key of the spec (unet.channels), or one of the DeepSpeed JSON after ds. (ds.zero_optimization.stage)

examples
  ddpm-ds vary --spec launch/specs/digits.yaml --deepspeed_config ds_configs/zero2_fp16.json \\
      --vary precision=fp32,fp16 --vary processes=1,2 --note "is half precision worth it on this machine?"
      three runs: fp32 on one process, then fp16 alone, then two processes alone
  ddpm-ds vary ... --vary processes=4 --vary stages=1,2,4 --vary schedule=1f1b,folded --full -- --trace-steps 10-12
      every combination, with an option of launch/train.py for all

exit codes
  0 all cells are done   2 bad input, nothing was started   75 stopped, start it again
  else that of the first cell that failed, see ddpm-ds run --help
"""


def add_vary(verbs: argparse._SubParsersAction[Any]) -> None:
    """The verb ``vary``."""
    parser = verbs.add_parser(
        "vary",
        help="train a grid of runs and compare them",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("--spec", type=Path, required=True, metavar="YAML", help="run spec, see launch/specs")
    add_overrides(parser)
    parser.add_argument("--deepspeed_config", type=Path, required=True, metavar="JSON", help="how to train")
    parser.add_argument(
        "--vary", action="append", required=True, metavar="NAME=VALUE,VALUE", help="what is varied; may be repeated"
    )
    parser.add_argument("--full", action="store_true", help="every combination of values")
    parser.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="of each run, where they are not varied (default 1)"
    )
    parser.add_argument("--note", default=None, metavar="TEXT", help="why this is tried; kept in MLflow")
    parser.add_argument(
        "--metrics", type=lambda text: text.split(","), default=None, metavar="A,B", help="what to compare the runs by"
    )
    add_runs_option(parser)
    parser.add_argument(
        "--grace-seconds", type=float, default=300.0, metavar="S", help="for a run to save and stop (default 300)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and print the cells, and exit")
    parser.add_argument(
        "train_options", nargs=argparse.REMAINDER, metavar="-- ...", help="options of launch/train.py for every run"
    )
    parser.set_defaults(run=_vary)


def _vary(options: argparse.Namespace) -> int:
    asked = _check_train_options(options)
    spec, config = load_spec(options.spec, options.overrides), read_ds_config(options.deepspeed_config)
    check_ds_config(config, options.deepspeed_config)
    variables = [parse_variable(item) for item in options.vary]
    if asked.pipeline_stages is not None and any(variable.name == "stages" for variable in variables):
        raise ExperimentError(
            f"-p {asked.pipeline_stages} after -- and --vary stages say the same thing twice; leave one out"
        )
    made = cells(variables, config, options.overrides, options.processes, full=options.full)
    plans = plan_cells(made, options.spec, options.deepspeed_config, stages=asked.pipeline_stages, device=asked.device)
    for cell, plan in zip(made, plans, strict=True):
        for option, steps in (("--trace-steps", asked.trace_steps), ("--profile-kernels", asked.profile_kernels)):
            if steps and steps[-1] > plan.steps:
                raise ExperimentError(
                    f"{option} after --: cell {_label(cell)} has {plan.steps} steps; use some of those"
                )
    content = digest(
        spec.model_dump(mode="json"), config, options.vary, options.full, options.processes, options.train_options
    )
    grid = Sweep(options.runs / f"vary-{spec.name}-{content}", made)
    print(_describe(grid, plans), flush=True)
    return 0 if options.dry_run else _train(grid, plans, options)


def _check_train_options(options: argparse.Namespace) -> argparse.Namespace:
    """What the options after ``--`` mean to launch/train.py; they are without the ``--`` afterwards.

    Raises:
        ExperimentError: something else stands there, or an option that is the grid's own.
        SpecError: an option is unknown or has a wrong value.
    """
    first, *given = options.train_options or ["--"]
    if first != "--":
        raise ExperimentError(f"{first} is no option of vary; write options of launch/train.py after --")
    if not TRAIN.is_file():
        raise ExperimentError(f"{TRAIN} is missing, which trains the cells; install ddpm_ds from its repository: -e .")
    options.train_options = given
    config = ["--deepspeed_config", str(options.deepspeed_config)]
    default, asked = parse(config), parse([*config, *given])
    for name, option in OWN_OPTIONS.items():
        if getattr(asked, name) != getattr(default, name):
            raise ExperimentError(f"{option} after --: each cell gets its own; leave it out, or give it before the --")
    return asked


def _describe(grid: Sweep, plans: Sequence[RunPlan]) -> str:
    """The cells and their layouts."""
    endings, lines = grid.endings(), [f"grid         {grid.folder}, {len(grid.cells)} cells"]
    for cell, plan in zip(grid.cells, plans, strict=True):
        layout = plan.ds.layout
        state = " (done)" if cell.name in endings and endings[cell.name].finished else ""
        lines.append(
            f"  {_label(cell)}: {layout.stages} stages x {layout.replicas} replicas, {plan.ds.precision}, "
            f"ZeRO-{plan.ds.zero_stage}, {layout.micro_batches} micro-batches of {layout.micro_batch_images}, "
            f"{plan.steps:,} steps{state}"
        )
    values = ", ".join(f"{name}={value}" for name, value in grid.cells[0].values.items())
    return "\n".join([*lines, f"{BASELINE}     {values}"])


def _label(cell: Trial) -> str:
    return cell.changed or BASELINE


def _train(grid: Sweep, plans: Sequence[RunPlan], options: argparse.Namespace) -> int:
    """All cells that are not done, the comparison, and the parent's run around them; returns the exit code."""
    from tqdm import tqdm

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may have gone
            tqdm.write(f"ddpm-ds vary: {line}", file=sys.stderr)

    try:
        claim = claim_folder(grid.folder)
    except OSError as error:
        raise OutputError(
            f"--runs {options.runs} can't be written ({error.strerror}); name a folder that can"
        ) from None
    with heard_signals() as heard:
        tracker, identity = begin_parent(grid, plans[0].spec.logging.experiment, _params(options), options.note, say)
        until = time.monotonic() + PARENT_SECONDS
        while tracker.run_id is None and not heard and time.monotonic() < until:
            time.sleep(0.1)
        with tqdm(total=len(grid.cells), unit="cell", disable=None) as bar:
            for done, (cell, plan) in enumerate(zip(grid.cells, plans, strict=True)):
                if heard:
                    break
                bar.n = done
                before = grid.endings().get(cell.name)
                if before is not None and before.finished:
                    say(f"{_label(cell)}: done before")
                    continue
                grid.prepare(cell, plan.spec)
                say(f"{_label(cell)}: started, its output is in {grid.log(cell)}")
                command = grid.command(cell, identity, options.grace_seconds, options.train_options)
                ending = run_command(command, grid.log(cell), heard, _ticker(bar, grid, cell, plan))
                grid.remember(cell, ending)
                say(f"{_label(cell)}: {ending.words()} after {ending.seconds:,.0f} s")
                if ending.stopped:
                    break
                if not ending.finished:
                    for line in ending.said:
                        say(f"    {line}")
                    tracker.artifact(grid.log(cell), f"failed/{cell.name}")
            bar.n = sum(ending.finished for ending in grid.endings().values())
        code, status = _outcome(grid, stopped=bool(heard))
        if not heard and (table := compare_cells(grid, options.metrics, tracker, say)):
            print(f"\n{table}", flush=True)
        tracker.finish(status)
    _say_what_next(grid, code, say)
    del claim
    return code


def _params(options: argparse.Namespace) -> dict[str, object]:
    """Of the grid's run."""
    variables = [item.partition("=") for item in options.vary]
    return {
        "vary": {name.strip(): values for name, _, values in variables},
        "full": options.full,
        "command": shlex.join(["ddpm-ds", *sys.argv[1:]]),
    }


def _ticker(bar: Any, grid: Sweep, cell: Trial, plan: RunPlan) -> Callable[[], None]:
    """What moves the bar while a cell is trained."""
    done, total, shown_at = bar.n, plan.spec.train.images, 0.0

    def tick() -> None:
        nonlocal shown_at
        if not bar.disable and time.monotonic() - shown_at >= TICK_SECONDS:
            shown_at, images = time.monotonic(), grid.progress(cell)
            bar.n = round(done + min(images / total, 1.0), 2)
            bar.set_postfix_str(f"{_label(cell)}, {images:,}/{total:,} images")

    return tick


def _outcome(grid: Sweep, *, stopped: bool) -> tuple[int, Literal["FINISHED", "FAILED", "KILLED"]]:
    """The exit code, and how the grid's run ends in MLflow."""
    endings = grid.endings()
    ended = [endings[cell.name] for cell in grid.cells if cell.name in endings]
    for ending in ended:
        if ending.stopped:
            return (ending.exit_code if ending.exit_code > 0 else EXIT_PREEMPTED), "KILLED"
    if stopped and len(ended) < len(grid.cells):
        return EXIT_PREEMPTED, "KILLED"
    failed = [ending.exit_code for ending in ended if not ending.finished]
    return (failed[0], "FAILED") if failed else (0, "FINISHED")


def _say_what_next(grid: Sweep, code: int, say: Callable[[str], None]) -> None:
    endings = grid.endings()
    done = sum(cell.name in endings and endings[cell.name].finished for cell in grid.cells)
    if code == 0:
        say(f"all {done} cells are done; look again: ddpm-ds compare {grid.folder}")
        return
    for cell in grid.cells:
        if cell.name in endings and not endings[cell.name].finished:
            say(f"{_label(cell)}: {endings[cell.name].words()}, see {grid.log(cell)}")
    say(f"{done} of {len(grid.cells)} cells are done; the same command goes on with the others")

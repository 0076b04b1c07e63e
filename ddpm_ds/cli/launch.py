"""Verbs that start the ranks of runs and stay with them: ``train``, and ``run``, which starts any training script."""

import argparse
import contextlib
import functools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpm_ds.checkpoint.folder import LATEST, images_of
from ddpm_ds.cli.plan import describe_plan
from ddpm_ds.cli.train import add_train_options, checked
from ddpm_ds.command_line import OneLineParser, Verbs, file_path, gib, grace_seconds, natural, port, processes, without
from ddpm_ds.config.spec_file import DEFAULT_SPEC
from ddpm_ds.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, SpecError, print_to_stderr
from ddpm_ds.files import REHEARSAL
from ddpm_ds.processes.supervisor import Outcome, Place, gpus, supervise
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.address import check_experiment

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
      on several hosts; --dry-run shows the plan

exit codes as of run (docs/exit_codes.md)
"""
RUN_DESCRIPTION = """\
Start a training script on the processes of this machine, or by DeepSpeed's launcher on a hostfile's, and stay with
them. SIGTERM, SIGINT, SIGUSR1 and SIGHUP make the ranks finish their step, save and stop; a second signal ends
them at once. If ranks are lost, the run is started again and resumes from the newest checkpoint of its --run-dir, which
must be given. Nothing is left running. For several hosts, start it on one host of the hostfile, preferably the first;
each start reads the hostfile again. For other launchers and their options type deepspeed, torchrun or srun.
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


def add_train(verbs: Verbs) -> None:
    """Add the verb ``train``."""
    parser = verbs.add_parser(
        "train", help="train a U-Net on this machine or on several", description=TRAIN_DESCRIPTION, epilog=TRAIN_EPILOG
    )
    _add_launch_options(parser)
    add_train_options(parser)
    parser.set_defaults(run=_train)


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    about = "processes on this machine (default: one for each GPU, or one)"
    where.add_argument("--processes", type=processes, metavar="N", help=about)
    about = "hosts and their processes, as DeepSpeed reads them"
    where.add_argument("--hostfile", type=file_path, metavar="FILE", help=about)
    about = "hosts on each of which this is typed (default 1)"
    parser.add_argument("--nodes", type=processes, default=1, metavar="N", help=about)
    about = "this one's place among them, from 0 (default 0)"
    parser.add_argument("--node-rank", type=natural, default=0, metavar="K", help=about)
    parser.add_argument("--master-addr", metavar="HOST", help="name or address of the first of them")
    about = "where ranks meet (default: a free one; with a hostfile 29500)"
    parser.add_argument("--port", type=port, metavar="PORT", help=about)
    _add_restart_options(parser)


def _place(options: argparse.Namespace, device: str) -> Place:
    """Return where the ranks are started: by default one for each GPU of this host, or one on its CPU."""
    count = options.processes
    if count is None and options.hostfile is None:
        asked = os.environ.get("DS_ACCELERATOR", device) if device == "auto" else device
        count = 1 if asked == "cpu" else max(1, gpus())
    if options.nodes > 1 and options.hostfile is not None:
        raise SpecError("--nodes and --hostfile both say where ranks run; leave --nodes out")
    if options.nodes > 1 and options.master_addr is None:
        raise SpecError(f"--nodes {options.nodes} needs --master-addr HOST, the address of the host with --node-rank 0")
    master = options.master_addr or Place.master
    return Place(count or 0, options.node_rank, options.nodes, master, options.hostfile, options.port)


def _train(options: argparse.Namespace) -> int:
    place, given = _place(options, options.device), vars(options).copy()
    hosts = tuple(host for host, slots in place.hosts().items() for _ in range(slots))
    draft, run_dir = checked(options, len(hosts), hosts)
    check_experiment(draft.spec.logging.experiment, run_dir.parent)
    if not options.dry_run:
        place.check()
    if options.run_dir is None and place.nodes > 1:
        raise SpecError(f"--nodes {place.nodes} needs --run-dir DIR, a folder that all hosts share")
    if options.run_dir is None and not options.dry_run:
        run_dir = run_folder.make_run_dir(run_dir)
    run_folder.check_output(run_dir, options.resume)
    print(describe_plan(draft, run_dir), flush=True)
    if options.dry_run:
        return 0
    asked = without(options.arguments, _add_launch_options)
    if draft.chosen is not None:
        asked += ["-p", str(draft.chosen.stages)]
        if draft.chosen.tensor is not None:
            asked += ["--set", f"ds.pipeline.tensor={json.dumps(draft.chosen.tensor.block)}"]
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
    log = functools.partial(_log, "train")
    ended = supervise([*program, "--described"], place, **_limits(options), log=log)
    if ended.code > 128:  # a second signal has ended the process that sends to MLflow too
        events = run_dir / run_folder.EVENTS
        run_folder.end_killed(events, log)
        if line := run_folder.unsent(events):
            log(line)
    again = options.arguments
    if options.run_dir is None:
        run_folder.remove_if_empty(run_dir)
        again = [*again, "--run-dir", str(run_dir)]
    rehearsed = options.steps is not None and ended.code == 0
    log(f"rehearsed: {run_dir / REHEARSAL}" if rehearsed else _outcome(ended, run_dir, again))
    return ended.code


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    return {"max_restarts": options.max_restarts, "grace_seconds": options.grace_seconds}


def _outcome(ended: Outcome, run_dir: Path, arguments: Sequence[str]) -> str:
    """Return the last line: what a run has saved, and the command that continues it unless it would fail again."""
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
        raise SpecError(
            f"run has no option {unknown[0]}; write the script's after it, and for DeepSpeed's type: {instead}"
        )
    place, log = _place(options, "auto"), functools.partial(_log, "run")
    return supervise(options.program, place, **_limits(options), log=log).code


def _add_restart_options(parser: argparse.ArgumentParser) -> None:
    about = "restarts in a row without a new checkpoint (default 0)"
    parser.add_argument("--max-restarts", type=natural, default=0, metavar="N", help=about)
    about = "seconds for the ranks to save and stop after a signal (default 300)"
    parser.add_argument("--grace-seconds", type=grace_seconds, default=300.0, metavar="S", help=about)


def _log(verb: str, line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may have been closed
        print_to_stderr(f"ddpm-ds {verb}: {line}")

"""Verbs that start ranks and supervise them: ``train``, and ``run``, which starts any training script."""

import functools
import json
import os
import shlex
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpm_ds.checkpoint.folder import LATEST, images_of
from ddpm_ds.cli.options import OneLineParser, Verb, add_options, log_line, read, without
from ddpm_ds.cli.plan import describe_plan, wrapped
from ddpm_ds.cli.train import TrainOptions, checked
from ddpm_ds.config.spec_file import DEFAULT_SPEC
from ddpm_ds.ground.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, SpecError
from ddpm_ds.ground.options import grace_seconds, natural, option, port, process_count, split_option
from ddpm_ds.ground.units import gib
from ddpm_ds.processes.supervisor import Outcome, Place, gpus, supervise
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.address import check_experiment


@dataclass(frozen=True)
class RestartOptions:
    max_restarts: int = option("restarts in a row without a new checkpoint (default 0)", "N", natural, default=0)
    grace_seconds: float = option(
        "seconds for the ranks to save and stop after a signal (default %(default)g)", "S", grace_seconds, default=300.0
    )


@dataclass(frozen=True)
class LaunchOptions:
    processes: int | None = option(
        "processes on this machine (default: one for each GPU, or one)", "N", process_count, either="where"
    )
    hostfile: Path | None = option("hosts and their processes, in DeepSpeed's format", "FILE", either="where")
    nodes: int = option("hosts, on each of which you type this command (default 1)", "N", process_count, default=1)
    node_rank: int = option("number of this host, from 0 (default 0)", "K", natural, default=0)
    master_addr: str | None = option("name or address of host 0", "HOST")
    port: int | None = option("port at which ranks meet (default: a free one; with a hostfile 29500)", "PORT", port)
    restarts: RestartOptions = RestartOptions()


@dataclass(frozen=True)
class StartOptions(TrainOptions, LaunchOptions):
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptOptions(LaunchOptions):
    program: tuple[str, ...] = option(
        "training script and its options", "SCRIPT ...", names=("program",), nargs=REMAINDER, default=()
    )
    arguments: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def _place(options: LaunchOptions, device: str) -> Place:
    """Return where to start ranks: by default one for each GPU of this host, or one on its CPU."""
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


@Verb
def train(options: StartOptions) -> int:
    """Train a U-Net on this machine or on several.

    Checks everything, starts the processes, and prints at the end what was saved and how to go on. Ctrl-C or SIGTERM
    saves after the step; a second one ends at once. The run spec (YAML) says what is trained, the DeepSpeed JSON how.
    Processes are stages (parts of the U-Net) x replicas (copies that see other images): -p sets the stages.

      ddpm-ds train --deepspeed_config ds_configs/zero2_fp16.json
          handwritten digits on this machine, fp16 and ZeRO-2
      ddpm-ds train --processes 4 -p 2 --deepspeed_config ds_configs/zero2_fp16.json
          2 stages x 2 replicas
      ddpm-ds train --hostfile hostfile -p 4 --deepspeed_config ds_configs/zero2_fp16.json
          on several hosts; --dry-run shows the plan

    Exit codes are those of run (docs/exit_codes.md).
    """
    place = _place(options, options.device)
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
    asked = without(options.arguments, LaunchOptions)
    if draft.chosen is not None:
        asked += ["-p", str(draft.chosen.stages)]
        for key, block in draft.chosen.keys.items():
            asked += ["--set", f"ds.{key}={json.dumps(block)}"]
    if options.run_dir is None:
        asked += ["--run-dir", str(run_dir)]
    if options.spec is None and draft.spec_path != DEFAULT_SPEC:
        asked += ["--spec", str(draft.spec_path)]
    if options.deepspeed_config is None:
        asked += ["--deepspeed_config", str(draft.ds_path)]
    program = ["-m", "ddpm_ds.cli.rank", *asked]
    words = [f"{place.processes} x python", *program]
    if place.hostfile is not None:
        words = ["deepspeed", *place.deepspeed(program)]
    print(wrapped(f"starting     {words[0]} {shlex.join(words[1:])}"), flush=True)
    log = functools.partial(log_line, "train")
    ended = supervise([*program, "--described"], place, **vars(options.restarts), log=log)
    if ended.code > 128:  # a second signal has ended the process that sends to MLflow too
        events = run_dir / run_folder.EVENTS
        run_folder.end_killed(events)
        if line := run_folder.unsent(events):
            log(line)
    again = list(options.arguments)
    if options.run_dir is None:
        run_folder.remove_if_empty(run_dir)
        again += ["--run-dir", str(run_dir)]
    log(_outcome(ended, run_dir, again))
    return ended.code


def _outcome(ended: Outcome, run_dir: Path, arguments: Sequence[str]) -> str:
    """Return the last line: how much is saved, and the command that continues unless it would fail again."""
    latest = run_folder.checkpoints_of(run_dir) / LATEST
    saved = images_of(latest.read_bytes().decode(errors="replace").strip()) if latest.is_file() else None
    if ended.code == 0:
        return f"done; draw from it with: {shlex.join(['ddpm-ds', 'sample', str(run_dir)])}"
    again = shlex.join(["ddpm-ds", "train", *split_option(arguments, "--resume")[1]])
    what, how = "nothing was saved", "start again"
    if saved is not None:
        what, how = f"saved after {saved:,} images in {run_dir}", "go on"
    if ended.killed:
        from ddpm_ds.ground.device import host_memory  # imports torch

        return (
            f"{what}; a process was killed, probably because this machine's {gib(host_memory())} of memory were full: "
            "use a smaller U-Net, or smaller micro-batches by a larger train.accumulation"
        )
    if ended.code in (1, EXIT_BAD_INPUT, EXIT_BAD_NUMBERS):
        return f"{what}; see the error above"
    return f"{what}; {how} with: {again}"


@Verb
def run(options: ScriptOptions) -> int:
    """Start a training script, with restarts, orderly stops and clear exit codes.

    Starts it on this machine, or by DeepSpeed's launcher on the hosts of a hostfile. SIGTERM, SIGINT, SIGUSR1 and
    SIGHUP make the ranks finish their step, save and stop; a second signal ends them at once. If ranks are lost, the
    run starts again and resumes from the newest checkpoint of its --run-dir, which must be given. With a hostfile, type
    this on one of its hosts, preferably the first; each start reads the file again. For other launchers and their
    options type deepspeed, torchrun or srun.

      ddpm-ds run --max-restarts 3 --processes 4 launch/train.py -p 2 \\
          --deepspeed_config ds_configs/zero2_fp16.json --run-dir runs/digits

    exit codes (docs/exit_codes.md)
      0 done   2 bad input   3 the numbers went bad   75 stopped and saved, start it again   76 ranks were lost
      129 to 143 ended at once by a second signal   1 a bug
    """
    after = OneLineParser(prog="ddpm-ds run")  # options may also come after --
    add_options(after, ScriptOptions)
    words = options.program[options.program[:1] == ("--",) :]
    given, unknown = after.parse_known_args(words, Namespace(**vars(options), **vars(options.restarts)))
    if unknown := [*options.unknown, *unknown]:
        others = [word for word in without(options.arguments, RestartOptions) if word != "--"]
        instead = shlex.join(["deepspeed", *others])
        raise SpecError(
            f"run has no option {unknown[0]}; write the script's options after its name, or type: {instead}"
        )
    options = read(ScriptOptions, given)
    place, log = _place(options, "auto"), functools.partial(log_line, "run")
    return supervise(options.program, place, **vars(options.restarts), log=log).code

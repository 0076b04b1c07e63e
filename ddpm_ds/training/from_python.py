"""Training from a Python program, in child processes."""

import json
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.ground.errors import EXIT_BAD_INPUT, ProgramError, explanation
from ddpm_ds.ground.files import replace_file
from ddpm_ds.planning.run_plan import Processes
from ddpm_ds.schema.types import GivenPath
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.run_folder import ASKED_CONFIG, ASKED_SPEC, RunFolder

TRAIN = ("-m", "ddpm_ds.cli.main", "train")


def train(
    spec: RunSpec | Mapping[str, object] | GivenPath,
    ds_config: Mapping[str, object] | GivenPath,
    overrides: Sequence[str] = (),
    *,
    run_dir: GivenPath | None = None,
    processes: Processes | None = None,
    stages: Processes | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    resume: Literal["auto", "never"] | GivenPath = "auto",
) -> RunFolder:
    """Train as ``ddpm-ds train`` does and return the run, with its ``folder``, ``last_metrics`` and ``all_samples()``.

    Child processes train, and their lines are printed here. ``spec`` and ``ds_config`` are values, a path or a preset's
    name; ``overrides`` such as ``unet.dropout=0.1`` or ``ds.block.key=value`` change them. A run goes on in its
    ``run_dir``; without one it gets a new folder in ``runs``. Without ``processes`` each GPU gets one. After a
    KeyboardInterrupt the ranks finish their step and save before it is raised; a second one ends them at once.

    Wrong arguments and a failed run raise UserError, whose ``exit_code`` is in docs/exit_codes.md.
    """
    name = spec.name if isinstance(spec, RunSpec) else spec.stem if isinstance(spec, Path) else "run"
    folder = Path(run_dir or run_folder.make_run_dir(run_folder.new_run_dir(name)))
    own = folder / ASKED_SPEC, folder / ASKED_CONFIG
    try:
        options = {"--run-dir": folder, "--spec": _file(spec, own[0]), "--deepspeed_config": _file(ds_config, own[1])}
        options |= {"--processes": processes, "--pipeline-stages": stages, "--device": device, "--resume": resume}
        words = [f"{name}={value}" for name, value in options.items() if value is not None]
        words += [f"--set={item}" for item in overrides]
        _follow([sys.executable, *TRAIN, *words])
    finally:
        if not (folder / run_folder.SPEC).exists():  # the run has not begun
            for path in own:
                path.unlink(missing_ok=True)
            if run_dir is None:
                run_folder.remove_if_empty(folder)
    return RunFolder(folder)


def _file(given: object, path: Path) -> object:
    """Return the path that was given; values are written to ``path``, so that the run can go on from a terminal."""
    if isinstance(given, RunSpec):
        given = given.model_dump(mode="json")
    if not isinstance(given, Mapping):
        return given
    with run_folder.disk_errors_reported(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(given, indent=2, default=str).encode())
    return path


def _follow(command: Sequence[str]) -> None:
    """Run a command, pass interrupts on and print its lines; raise the interrupt or the failure with which it ends."""
    lines, interrupted, pipe, together = deque[str](maxlen=1000), False, subprocess.PIPE, subprocess.STDOUT
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=together, errors="replace")
    assert child.stdout is not None
    try:
        while child.returncode is None:
            try:
                for line in child.stdout:
                    lines.append(line)
                    print(line, end="", flush=True)
                child.wait()
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(signal.SIGINT)
    finally:
        if child.poll() is None:  # its lines can't be printed
            child.terminate()
            child.wait()
    if interrupted:
        raise KeyboardInterrupt
    if code := child.returncode if child.returncode >= 0 else 128 - child.returncode:  # as a shell has a signal's
        named = () if code == EXIT_BAD_INPUT else (f"training ended with exit code {code} (docs/exit_codes.md):",)
        raise ProgramError([*named, *explanation("".join(lines))], code)

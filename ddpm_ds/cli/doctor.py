"""``ddpm-ds doctor``: check that hosts can train together."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpm_ds.cli.options import SpecOptions, Verb, take_files
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec, spec_overrides
from ddpm_ds.ground.errors import EXIT_BAD_INPUT, SpecError
from ddpm_ds.ground.options import flag, option, port, positive
from ddpm_ds.ground.secret import is_secret
from ddpm_ds.ground.units import aligned, counted
from ddpm_ds.processes.hosts import DEFAULT_HOSTFILE, OF_DEEPSPEED, find_environment, read_hostfile, this_host
from ddpm_ds.processes.preflight import Cell, Fleet, examined
from ddpm_ds.processes.supervisor import DEFAULT_PORT
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT
from ddpm_ds.unet.layers import unet_layers

CHECKPOINT_BYTES = 16
"""Bytes of a checkpoint per parameter: fp32 weight, two Adam moments and averaged weight."""


@dataclass(frozen=True)
class DoctorOptions(SpecOptions):
    hostfile: Path | None = option(
        f"DeepSpeed's: a line HOST slots=N for each host (default {DEFAULT_HOSTFILE}, else this machine alone)", "FILE"
    )
    deepspeed_config: Path | None = option("compare this file as well", "JSON", names=("--deepspeed_config",))
    run_dir: Path = option(f"where runs will go (default {OUTPUT_ROOT})", "DIR", default=OUTPUT_ROOT)
    master_port: int = option("port of the all-reduce (default %(default)s)", "PORT", port, default=DEFAULT_PORT)
    no_network: bool = flag("skip the all-reduce")
    timeout_seconds: int = option("seconds to wait for a host (default 60)", "S", positive, default=60)


@Verb
def doctor(options: DoctorOptions) -> int:
    """Check that hosts can train together.

    Asks every host of a hostfile over ssh, in the environment of DeepSpeed's pdsh launcher, and shows what differs,
    devices and disks; then makes one all-reduce. It changes nothing on any host. Without a hostfile it checks this
    machine alone. The exit code is 2 if a ! marks something to fix, or for bad input.

      ddpm-ds doctor --hostfile hostfile --deepspeed_config ds_configs/zero2_fp16.json
    """
    files = take_files(options, DEFAULT_SPEC, needed=False)
    slots: Mapping[str, int] = {"localhost": 1}
    if options.hostfile is not None or DEFAULT_HOSTFILE.exists():
        slots = read_hostfile(options.hostfile or DEFAULT_HOSTFILE)
    local = len(slots) == 1 and this_host(slots) is not None
    for program in () if local else ("ssh", "pdsh"):
        if shutil.which(program) is None:
            raise SpecError(f"{program}, which starts other hosts, is not on this machine; install it")
    spec, config = load_spec(files.spec, spec_overrides(files.overrides)), files.deepspeed_config
    if config is not None:
        read_ds_config(config, files.overrides)
    parameters = sum(layer.parameters for layer in unet_layers(spec.unet, spec.data.interface))
    question = {
        "spec": str(files.spec),
        "overrides": list(files.overrides),
        "ds_config": None if config is None else str(config),
        "run_dir": str(options.run_dir),
        "run_bytes": CHECKPOINT_BYTES * parameters * (spec.checkpoint.keep_last + 1),
    }
    folder, seconds = str(Path.cwd()), options.timeout_seconds
    environment = exported(os.environ, find_environment(), folder)
    fleet = Fleet(slots, sys.executable, folder, environment, local, seconds)
    text, good = report(examined(fleet, question, options.master_port, network=not options.no_network))
    print(text)
    return 0 if good else EXIT_BAD_INPUT


def exported(environment: Mapping[str, str], file: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment that DeepSpeed's pdsh launcher gives to processes on every host, without secrets.

    Variables of ``file`` override those that DeepSpeed exports; the working folder is first in ``PYTHONPATH``.
    """
    taken = {name: value for name, value in environment.items() if name.startswith(OF_DEEPSPEED)}
    python_path = ":".join([folder, *filter(None, [environment.get("PYTHONPATH")])])
    everything = taken | {"PYTHONPATH": python_path} | dict(file)
    return {name: value for name, value in everything.items() if not is_secret(name, value)}


def report(table: Mapping[str, Mapping[str, Cell]]) -> tuple[str, bool]:
    """Return a table of hosts with a line for each fault and the verdict, and whether all is good."""
    columns, faults = dict.fromkeys(name for row in table.values() for name in row), dict[str, list[str]]()
    rows = [["", *(f"  {name}" for name in columns)]]
    for host, row in table.items():
        texts = {name: f"{'!' if cell.why else ' '} {cell.text}" for name, cell in row.items()}
        rows.append([host, *(texts.get(name, "  -") for name in columns)])
        for name, cell in row.items():
            if cell.why:
                faults.setdefault(f"{name}: {cell.why}; {cell.fix}", []).append(host)
    lines = [f"! {', '.join(hosts)}, {what}" for what, hosts in faults.items()]
    verdict = f"{counted(len(table), 'host')}: {f'{len(lines)} to fix' if lines else 'good'}"
    parts = ["\n".join(aligned(rows, left=range(len(columns) + 1))), "\n".join(lines), verdict]
    return "\n\n".join(filter(None, parts)), not lines

"""``ddpm-ds doctor``: whether hosts can train together, before they do."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpm_ds.cluster.checks import BAD, check, network_row, on_cuda
from ddpm_ds.cluster.network import ALL_PAIRS_HOSTS, Network, network_test
from ddpm_ds.cluster.probe import travelling
from ddpm_ds.cluster.report import findings, report
from ddpm_ds.cluster.survey import PlannedRun, Survey, survey
from ddpm_ds.command_line import add_spec_options, check_output, file_path, port, positive
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec, spec_overrides
from ddpm_ds.errors import EXIT_BAD_INPUT, OutputError, SpecError
from ddpm_ds.processes.hosts import (
    DEFAULT_HOSTFILE,
    ENVIRONMENT_FILE,
    ENVIRONMENT_FILE_VARIABLE,
    OF_DEEPSPEED,
    find_environment,
    read_environment,
    read_hostfile,
    this_host,
    write_environment,
)
from ddpm_ds.processes.launcher import DEFAULT_PORT
from ddpm_ds.secret import is_secret, shown, write_private
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT

CHECKPOINT_BYTES = 16
"""Bytes of a checkpoint per parameter: fp32 weight, two Adam moments and averaged weight."""
PROFILE_BYTES, SNAPSHOT_BYTES = 4, 2
"""Bytes per parameter of an average of ``ema.profiles``, in a checkpoint and in a snapshot."""
NEEDED_SECRET = re.compile(r"(MLFLOW|AWS)_\w+")
DESCRIPTION = """\
Check what a training run will need on every host of a hostfile, show the hosts side by side, and say how to fix what is
wrong: ssh, working folder, Python, package versions, sources, spec and DeepSpeed JSON, clock, disks, devices,
environment, interface, master port; then an all-reduce over the network, and latency and bandwidth of each pair.
Processes are started as DeepSpeed's pdsh launcher starts them: the same interpreter, folder and environment. Nothing is
changed on any host.
"""
EXAMPLES = """\
examples
  ddpm-ds doctor --hostfile hostfile --deepspeed_config ds_configs/zero2_fp16.json
      the hosts that would train launch/specs/digits.yaml
  ddpm-ds doctor --hostfile hostfile --spec launch/specs/folder.yaml --set data.path=/shared/photos \\
      --deepspeed_config ds_configs/zero2_bf16.json --run-dir /shared/runs/photos
      a run of your own, with a folder that all hosts share
  NCCL_SOCKET_IFNAME=ens5 ddpm-ds doctor --hostfile hostfile --write-env
      also write .deepspeed_env, with which DeepSpeed sets NCCL_SOCKET_IFNAME and others on every host
  ddpm-ds doctor
      this machine alone

marks
  ! must be fixed   ? may be intended

exit codes
  0 all good, or nothing but ?   2 at least one !, or bad input

docs/doctor.md says what is checked and what each finding means.
"""


def add_doctor(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``doctor``."""
    parser = verbs.add_parser(
        "doctor",
        help="check that hosts can train together, and tell how to fix problems",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--hostfile",
        type=file_path,
        metavar="FILE",
        help=f"as for deepspeed: a line HOST slots=N for each (default {DEFAULT_HOSTFILE}, else this machine alone)",
    )
    add_spec_options(parser, DEFAULT_SPEC)
    parser.add_argument("--deepspeed_config", type=file_path, metavar="JSON", help="compare this file as well")
    parser.add_argument(
        "--run-dir",
        type=file_path,
        default=OUTPUT_ROOT,
        metavar="DIR",
        help=f"where runs will go (default {OUTPUT_ROOT})",
    )
    parser.add_argument(
        "--master-addr",
        default="",
        metavar="ADDRESS",
        help="address of the first host (default: the first word of its hostname -I)",
    )
    parser.add_argument("--master-port", type=port, default=DEFAULT_PORT, metavar="PORT", help="default %(default)s")
    parser.add_argument(
        "--no-network", action="store_true", help="skip the network tests (all-reduce and pairs of hosts)"
    )
    parser.add_argument(
        "--timeout-seconds", type=positive, default=60, metavar="S", help="silence after which a host is given up (60)"
    )
    name = os.environ.get(ENVIRONMENT_FILE_VARIABLE, ENVIRONMENT_FILE)
    parser.add_argument(
        "--write-env",
        type=file_path,
        nargs="?",
        const=Path(name),
        metavar="FILE",
        help=f"write the variables that have to travel (default file {name}, where DeepSpeed looks)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ddpm_ds.config.ds_config import read_ds_config

    if options.write_env is not None:
        check_output(options.write_env, overwrite=True, called="--write-env ")  # what it has is kept
    hosts: Mapping[str, int | None] = {"localhost": None}
    if options.hostfile is not None or DEFAULT_HOSTFILE.exists():
        hosts = read_hostfile(options.hostfile or DEFAULT_HOSTFILE)
    local = len(hosts) == 1 and this_host(hosts) is not None
    if not local and shutil.which("ssh") is None:
        raise SpecError("ssh, with which other hosts are asked, is not on this machine; apt install openssh-client")
    if options.deepspeed_config is not None:
        read_ds_config(options.deepspeed_config, options.overrides)
    run = _planned_run(options, local)
    seen = survey(hosts, run, _log)
    rows, network = check(seen), None
    if not options.no_network:
        network = _network(seen)
    if network:
        rows["all-reduce"] = network_row(network)
    notes = list(_notes(seen, network, untried=network is None and not options.no_network))
    found = findings(rows, network)
    print(report(list(hosts), rows, network, found, notes, sys.stdout.isatty()))
    if options.write_env is not None:
        print(f"\n{_write(options.write_env, seen)}")
    return EXIT_BAD_INPUT if any(line.startswith(BAD) for line in found) else 0


def _planned_run(options: argparse.Namespace, local: bool) -> PlannedRun:
    """Return the run as DeepSpeed would start it on every host, with the variables that ``--write-env`` will write."""
    from ddpm_ds.unet.layers import unet_layers

    spec = load_spec(options.spec, spec_overrides(options.overrides))
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    travels, file, folder = travelling(os.environ), find_environment(), str(Path.cwd())
    if options.write_env is not None:
        written = read_environment(options.write_env) if options.write_env.exists() else {}
        file = {**file, **written, **travels}
    if local:  # ranks of a single host read the file themselves, for what their environment lacks
        file = {name: value for name, value in file.items() if name not in os.environ}
    return PlannedRun(
        python=sys.executable,
        folder=folder,
        environment=exported(os.environ, file, folder),
        travels={} if local else travels,
        spec=str(options.spec),
        overrides=tuple(spec_overrides(options.overrides)),
        ds_config=None if options.deepspeed_config is None else str(options.deepspeed_config),
        run_dir=str(options.run_dir),
        checkpoint_bytes=saved_bytes(spec) * sum(layer.parameters for layer in layers),
        local=local,
        master_address=options.master_addr,
        master_port=options.master_port,
        seconds=options.timeout_seconds,
        connect_seconds=min(PlannedRun.connect_seconds, options.timeout_seconds),
    )


def saved_bytes(spec: RunSpec) -> int:
    """Return the bytes per parameter of all checkpoints that a run keeps, one being written, and all its snapshots."""
    profiles, every = len(spec.ema.profiles), spec.ema.snapshot_images
    snapshots = math.ceil(spec.train.images / every) if every else 0
    checkpoint = CHECKPOINT_BYTES + PROFILE_BYTES * profiles
    return checkpoint * (spec.checkpoint.keep_last + 1) + SNAPSHOT_BYTES * profiles * snapshots


def _log(line: str) -> None:
    print(f"ddpm-ds doctor: {line}", file=sys.stderr, flush=True)


def _network(seen: Survey) -> Network | None:
    """Run the network test between the hosts that can connect to the first one's port, if there are two."""
    able = [
        host
        for host, facts in seen.facts.items()
        if not (seen.hosts[host].port_error or seen.hosts[host].route_error) and "torch" in facts.versions
    ]
    if seen.master not in able or len(able) < 2:
        return None
    backend = "nccl" if on_cuda(seen.facts) and all(seen.facts[host].devices for host in able) else "gloo"
    return network_test(able, seen.run, seen.master_address, backend, _log)


def _notes(seen: Survey, network: Network | None, untried: bool) -> Iterator[str]:
    """Yield findings that belong to no single host."""
    if len(seen.hosts) > 1 and shutil.which("pdsh") is None:
        yield (
            "pdsh is not on this machine, which deepspeed starts other hosts with: apt install pdsh, or use its "
            "--launcher slurm or openmpi, or --no_ssh."
        )
    if len(seen.hosts) == 1 and not seen.run.local:
        yield "With a single host in the hostfile deepspeed starts the processes here, unless --force_multi."
    if len(seen.hosts) > 1 and untried:
        yield "The network was not tried: fewer than two hosts can connect."
    if network and len(network.hosts) > ALL_PAIRS_HOSTS:
        yield f"With more than {ALL_PAIRS_HOSTS} hosts only neighbours in the hostfile are measured."
    if network and network.routes:
        slowest = min(route.bytes_per_second for route in network.routes)
        yield (
            f"For ddpm-ds plan: --inter-node {slowest / 1e9:.3g}GB/s, the slowest route by {network.backend}; less "
            "if several processes of a host send at once."
        )


def _write(path: Path, seen: Survey) -> str:
    """Write the environment file, and describe its content."""
    chosen = {}
    if len(seen.facts) == len(seen.hosts):
        interfaces = [report.interface for report in seen.hosts.values() if len(seen.hosts) > 1]
        chosen = chosen_by_hosts(on_cuda(seen.facts), interfaces)
    try:
        lines = merge_into(path, travelling(os.environ), chosen)
    except OSError as error:
        raise OutputError(f"--write-env {path} can't be written ({error.strerror}); name another file") from None
    if left_out := secrets(os.environ):
        lines.append(
            f"  left out because they are secrets: {', '.join(left_out)}; only rank 0 talks to MLflow: set them there"
        )
    if path.name != os.environ.get(ENVIRONMENT_FILE_VARIABLE, ENVIRONMENT_FILE):
        lines.append(f"  deepspeed reads it with {ENVIRONMENT_FILE_VARIABLE}={path}")
    return "\n".join(lines)


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the names of secret variables that training may need, which are not sent to other hosts."""
    return sorted(
        name for name, value in environment.items() if NEEDED_SECRET.fullmatch(name) and is_secret(name, value)
    )


def exported(environment: Mapping[str, str], file: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment that DeepSpeed's pdsh launcher gives to the processes on every host, without secrets.

    The variables of ``file`` override those that DeepSpeed takes along; the working folder is first in ``PYTHONPATH``.
    """
    taken = {name: value for name, value in environment.items() if name.startswith(OF_DEEPSPEED)}
    python_path = ":".join([folder, *filter(None, [environment.get("PYTHONPATH")])])
    everything = taken | {"PYTHONPATH": python_path} | dict(file)
    return {name: value for name, value in everything.items() if not is_secret(name, value)}


def chosen_by_hosts(on_cuda: bool, interfaces: Iterable[str]) -> dict[str, str]:
    """Return the variables that follow from the hosts: the CPU accelerator if none has a CUDA device, and gloo's
    interface if it has the same name on all.
    """
    values = {} if on_cuda else {"DS_ACCELERATOR": "cpu"}
    names = set(interfaces)
    return values | ({"GLOO_SOCKET_IFNAME": names.pop()} if len(names) == 1 and "" not in names else {})


def merge_into(path: Path, values: Mapping[str, str], defaults: Mapping[str, str]) -> list[str]:
    """Add variables to an environment file, and return lines that describe what was done.

    ``values`` override the file's variables, which override ``defaults``. The old content of a file that changes is
    kept beside it as ``.bak``.

    Raises:
        SpecError: the file can't be understood, or a value can't be written into it.
        OSError: it can't be written.
    """
    before = read_environment(path) if path.exists() else {}
    after = dict(defaults) | before | dict(values)
    old = path.read_bytes() if path.exists() else None
    write_environment(path, after)
    lines = [f"{path}: {', '.join(after) or 'nothing has to travel'}"]
    lines += [f"  {name} was {shown(name, value)}" for name, value in before.items() if after[name] != value]
    if old is not None and old != path.read_bytes():
        backup = path.with_name(f"{path.name}.bak")
        write_private(backup, old)
        lines.append(f"  the file as it was: {backup}")
    return lines

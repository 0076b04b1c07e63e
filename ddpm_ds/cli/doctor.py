"""``ddpm-ds doctor``: whether hosts can train together, before they do."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.command_line import add_overrides, check_writable, positive
from ddpm_ds.config.spec_file import SPECS
from ddpm_ds.errors import EXIT_BAD_INPUT
from ddpm_ds.processes.hosts import (
    DEFAULT_HOSTFILE,
    ENVIRONMENT_FILE,
    ENVIRONMENT_FILE_VARIABLE,
    find_environment,
    read_environment,
    read_hostfile,
    this_host,
)
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT

if TYPE_CHECKING:
    from ddpm_ds.cluster.pairs import Network
    from ddpm_ds.cluster.survey import RemoteStart, Survey
    from ddpm_ds.config.spec import RunSpec

CONNECT_SECONDS = 10
CHECKPOINT_BYTES = 16
"""Of a parameter: fp32 weights, two moments of Adam and averaged weights."""
DESCRIPTION = """\
Ask every host of a hostfile what a training run will ask of it, compare the answers side by side, and say how to mend
each that is not good: ssh, working folder, Python, package versions, sources, spec and DeepSpeed JSON, clock, disks,
devices, environment, interface, master port; then an all-reduce over the network, and latency and bandwidth of each
pair. Processes are started as DeepSpeed's pdsh launcher starts them: the same interpreter, folder and environment.
Nothing is changed on any host.
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
  ! has to be mended   ? may be meant

exit codes
  0 all good, or nothing but ?   2 at least one !, or bad input

docs/doctor.md says what is checked and what each finding means.
"""


def add_doctor(verbs: argparse._SubParsersAction[Any]) -> None:
    """The verb ``doctor``."""
    parser = verbs.add_parser(
        "doctor",
        help="check that several hosts can train together, and say how to mend what can't",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help=f"as for deepspeed: a line HOST slots=N for each (default {DEFAULT_HOSTFILE}, else this machine alone)",
    )
    parser.add_argument(
        "--spec", type=Path, default=SPECS / "digits.yaml", metavar="YAML", help="what will be trained (digits.yaml)"
    )
    add_overrides(parser)
    parser.add_argument("--deepspeed_config", type=Path, metavar="JSON", help="compare this file as well")
    parser.add_argument(
        "--run-dir", type=Path, default=OUTPUT_ROOT, metavar="DIR", help=f"where runs will go (default {OUTPUT_ROOT})"
    )
    parser.add_argument(
        "--master-addr", metavar="ADDRESS", help="of the first host (default: the first word of its hostname -I)"
    )
    parser.add_argument("--master-port", type=positive, default=29500, metavar="PORT", help="default 29500")
    parser.add_argument("--no-network", action="store_true", help="leave out the all-reduce and the pairs")
    parser.add_argument(
        "--timeout-seconds", type=positive, default=60, metavar="S", help="silence after which a host is given up (60)"
    )
    name = os.environ.get(ENVIRONMENT_FILE_VARIABLE, ENVIRONMENT_FILE)
    parser.add_argument(
        "--write-env",
        type=Path,
        nargs="?",
        const=Path(name),
        metavar="FILE",
        help=f"write the variables that have to travel (default file {name}, where DeepSpeed looks)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ddpm_ds.config.ds_config import read_ds_config
    from ddpm_ds.config.spec_file import load_spec

    if options.write_env is not None:
        check_writable("--write-env", options.write_env)
    hosts = _hosts(options.hostfile)
    spec = load_spec(options.spec, options.overrides)
    if options.deepspeed_config is not None:
        read_ds_config(options.deepspeed_config)
    from ddpm_ds.cluster.checks import Requirements, check
    from ddpm_ds.cluster.facts import Question, travelling
    from ddpm_ds.cluster.pairs import network_row
    from ddpm_ds.cluster.report import findings, report
    from ddpm_ds.cluster.survey import survey

    travels = travelling(os.environ)
    start, local = _start(options, travels), len(hosts) == 1 and this_host(hosts) is not None
    ds_config = None if options.deepspeed_config is None else str(options.deepspeed_config)
    seen = survey(
        hosts,
        start,
        Question(str(options.spec), tuple(options.overrides), ds_config, str(options.run_dir)),
        local=local,
        master_address=options.master_addr,
        master_port=options.master_port,
        seconds=options.timeout_seconds,
        say=_say,
    )
    need = Requirements(
        start.folder, start.python, str(options.spec), ds_config, _checkpoint_bytes(spec), {} if local else travels
    )
    rows, notes, network = check(seen, need), _notes(seen, local), None
    ready = [] if options.no_network else _ready(seen)
    if len(ready) > 1:
        network = _network(seen, ready, start, options.timeout_seconds)
        rows.append(network_row(network))
        notes += _about(network)
    elif len(hosts) > 1 and not options.no_network:
        notes.append("The network was not tried: fewer than two hosts can meet.")
    found = findings(rows, network)
    print(report(list(hosts), rows, network, found, notes, sys.stdout.isatty()))
    if options.write_env is not None:
        print(f"\n{_write(options.write_env, seen, travels)}")
    return EXIT_BAD_INPUT if any(one.level == "bad" for one in found) else 0


def _hosts(path: Path | None) -> Mapping[str, int | None]:
    if path is None and not DEFAULT_HOSTFILE.exists():
        return {"localhost": None}
    return read_hostfile(path or DEFAULT_HOSTFILE)


def _start(options: argparse.Namespace, travels: Mapping[str, str]) -> RemoteStart:
    """What DeepSpeed would start every host with; of a file that is to be written also what it will have."""
    from ddpm_ds.cluster.facts import exported
    from ddpm_ds.cluster.survey import RemoteStart

    file = find_environment()
    if options.write_env is not None:
        written = read_environment(options.write_env) if options.write_env.exists() else {}
        file = {**file, **written, **travels}
    folder = str(Path.cwd())
    connect = min(CONNECT_SECONDS, options.timeout_seconds)
    return RemoteStart(sys.executable, folder, exported(os.environ, file, folder), connect)


def _say(line: str) -> None:
    print(f"ddpm-ds doctor: {line}", file=sys.stderr, flush=True)


def _checkpoint_bytes(spec: RunSpec) -> int:
    from ddpm_ds.unet.layers import unet_layers

    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    return CHECKPOINT_BYTES * sum(layer.parameters for layer in layers) * (spec.checkpoint.keep_last + 1)


def _ready(seen: Survey) -> list[str]:
    """The hosts that can meet on the first one's port, it among them, or none."""
    able = [
        host
        for host, facts in seen.answering.items()
        if not (seen.hosts[host].port_error or seen.hosts[host].route_error) and "torch" in facts.versions
    ]
    return able if seen.master in able else []


def _network(seen: Survey, ready: Sequence[str], start: RemoteStart, seconds: float) -> Network:
    from ddpm_ds.cluster.checks import on_cuda
    from ddpm_ds.cluster.pairs import measure

    facts = seen.answering
    backend = "nccl" if on_cuda(facts) and all(facts[host].devices for host in ready) else "gloo"
    return measure(ready, start, seen.master_address, seen.master_port, backend=backend, seconds=seconds, say=_say)


def _notes(seen: Survey, local: bool) -> list[str]:
    """What is nobody's cell."""
    notes = []
    if len(seen.hosts) > 1 and shutil.which("pdsh") is None:
        notes.append(
            "pdsh is not on this machine, which deepspeed starts other hosts with: apt install pdsh, or use its "
            "--launcher slurm or openmpi, or --no_ssh."
        )
    if len(seen.hosts) == 1 and not local:
        notes.append("With a single host in the hostfile deepspeed starts the processes here, unless --force_multi.")
    return notes


def _about(network: Network) -> list[str]:
    from ddpm_ds.cluster.network import ALL_PAIRS_HOSTS

    notes = []
    if len(network.hosts) > ALL_PAIRS_HOSTS:
        notes.append(f"Of more than {ALL_PAIRS_HOSTS} hosts only neighbours in the hostfile are measured.")
    if network.ways:
        slowest = min(way.bytes_per_second for way in network.ways)
        notes.append(
            f"For ddpm-ds plan: --inter-node {slowest / 1e9:.3g}GB/s, the slowest way by {network.backend}; less where "
            "several processes of a host send at once."
        )
    return notes


def _write(path: Path, seen: Survey, travels: Mapping[str, str]) -> str:
    """Write the file of what has to travel, and say what is in it and what not."""
    from ddpm_ds.cluster.checks import on_cuda
    from ddpm_ds.cluster.facts import chosen_by_hosts, secrets, write_merged

    chosen = {}
    if len(seen.answering) == len(seen.hosts):
        interfaces = [report.interface for report in seen.hosts.values() if len(seen.hosts) > 1]
        chosen = chosen_by_hosts(on_cuda(seen.answering), interfaces)
    written = write_merged(path, travels, chosen)
    lines = [f"{path}: {', '.join(written.values) or 'nothing has to travel'}"]
    lines += [f"  {name} was {value}" for name, value in written.changed.items()]
    if written.backup is not None:
        lines.append(f"  the file as it was: {written.backup}")
    if left_out := secrets(os.environ):
        lines.append(
            f"  left out, for they are secrets: {', '.join(left_out)}; only rank 0 talks to MLflow: set them there"
        )
    if path.name != os.environ.get(ENVIRONMENT_FILE_VARIABLE, ENVIRONMENT_FILE):
        lines.append(f"  deepspeed reads it with {ENVIRONMENT_FILE_VARIABLE}={path}")
    return "\n".join(lines)

"""``ddpm-ds doctor``: whether hosts can train together, before they do, and the report of it."""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddpm_ds.cluster.checks import BAD, GOOD, WARNING, Rows, check, network_row, on_cuda
from ddpm_ds.cluster.probe import travelling
from ddpm_ds.cluster.survey import Network, PlannedRun, Survey, network_test, survey
from ddpm_ds.command_line import Verbs, add_spec_options, aligned, file_path, port, positive, take_files
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec, spec_overrides
from ddpm_ds.errors import EXIT_BAD_INPUT, SpecError, print_to_stderr
from ddpm_ds.processes.hosts import DEFAULT_HOSTFILE, OF_DEEPSPEED, find_environment, read_hostfile, this_host
from ddpm_ds.processes.supervisor import DEFAULT_PORT
from ddpm_ds.secret import is_secret
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT
from ddpm_ds.unet.layers import unet_layers

CHECKPOINT_BYTES = 16
"""Bytes of a checkpoint per parameter: fp32 weight, two Adam moments and averaged weight."""
DESCRIPTION = """\
Check what a training run will need on every host of a hostfile, show the hosts side by side, and say how to fix what is
wrong: ssh, working folder, Python, package versions, sources, spec and DeepSpeed JSON, disks, devices, environment,
interface, master port; then one all-reduce over the network.
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
  ddpm-ds doctor
      this machine alone

marks
  ! must be fixed   ? may be intended

exit codes
  0 all good, or nothing but ?   2 at least one !, or bad input

docs/doctor.md says what is checked and what each finding means.
"""
HOSTS_ABREAST = 8
COLOURS = {BAD: "\033[31m", WARNING: "\033[33m"}
PLAIN = "\033[0m"
MARKED = re.compile(r"(?<=  )[!?] \S+(?: \S+)*|^[!?] .*$", re.MULTILINE)
"""A marked cell of a table, whose columns are two spaces apart, or a whole marked line."""


def add_doctor(verbs: Verbs) -> None:
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
    add_spec_options(parser)
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
    parser.add_argument("--no-network", action="store_true", help="skip the all-reduce over the network")
    parser.add_argument(
        "--timeout-seconds", type=positive, default=60, metavar="S", help="silence after which a host is given up (60)"
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    take_files(options, DEFAULT_SPEC, needed=False)
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
    notes = list(_notes(seen, untried=network is None and not options.no_network))
    found = findings(rows)
    print(report(list(hosts), rows, found, notes, sys.stdout.isatty()))
    return EXIT_BAD_INPUT if any(line.startswith(BAD) for line in found) else 0


def _planned_run(options: argparse.Namespace, local: bool) -> PlannedRun:
    """Return the run as DeepSpeed would start it on every host."""
    spec = load_spec(options.spec, spec_overrides(options.overrides))
    layers = unet_layers(spec.unet, spec.data.interface)
    travels, file, folder = travelling(os.environ), find_environment(), str(Path.cwd())
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
    """Return the bytes per parameter of all checkpoints that a run keeps, and of one being written."""
    return CHECKPOINT_BYTES * (spec.checkpoint.keep_last + 1)


def _log(line: str) -> None:
    print_to_stderr(f"ddpm-ds doctor: {line}")


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


def _notes(seen: Survey, untried: bool) -> Iterator[str]:
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


def exported(environment: Mapping[str, str], file: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment that DeepSpeed's pdsh launcher gives to the processes on every host, without secrets.

    The variables of ``file`` override those that DeepSpeed takes along; the working folder is first in ``PYTHONPATH``.
    """
    taken = {name: value for name, value in environment.items() if name.startswith(OF_DEEPSPEED)}
    python_path = ":".join([folder, *filter(None, [environment.get("PYTHONPATH")])])
    everything = taken | {"PYTHONPATH": python_path} | dict(file)
    return {name: value for name, value in everything.items() if not is_secret(name, value)}


def findings(rows: Rows) -> list[str]:
    """Return a line for each finding that is not good, beginning with its mark, bad ones first.

    Hosts with the same finding share a line.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name, cells in rows.items():
        for host, cell in cells.items():
            if cell.mark != GOOD:
                found.setdefault((cell.mark, f"{name}: {cell.why}; {cell.fix}"), []).append(host)
    lines = [f"{mark} {', '.join(who)}, {what}" for (mark, what), who in found.items()]
    return sorted(lines, key=lambda line: not line.startswith(BAD))


def report(hosts: Sequence[str], rows: Rows, found: Sequence[str], notes: Sequence[str], colour: bool) -> str:
    """Return the printed text: tables, findings, notes, and the verdict in the last line."""
    bad = sum(line.startswith(BAD) for line in found)
    verdict = [f"{bad} to fix" if bad else "good"]
    verdict += [f"{len(found) - bad} to check"] if len(found) > bad else []
    parts = [
        *_host_tables(hosts, rows),
        "\n".join(found),
        "\n".join(notes),
        f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}: {', '.join(verdict)}",
    ]
    text = "\n\n".join(part for part in parts if part)
    return MARKED.sub(lambda marked: f"{COLOURS[marked[0][0]]}{marked[0]}{PLAIN}", text) if colour else text


def _host_tables(hosts: Sequence[str], rows: Rows) -> list[str]:
    """Return tables with a row for each check and a column for each host, several tables for many hosts."""
    tables = []
    for first in range(0, len(hosts), HOSTS_ABREAST):
        abreast = hosts[first : first + HOSTS_ABREAST]
        lines = [["", *(f"  {host}" for host in abreast)]]
        for name, cells in rows.items():
            texts = {host: f"{cell.mark} {cell.text}" for host, cell in cells.items()}
            lines.append([name, *(texts.get(host, "  -") for host in abreast)])
        tables.append("\n".join(aligned(lines, left=range(len(abreast) + 1))))
    return tables

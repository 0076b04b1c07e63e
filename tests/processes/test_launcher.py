"""The launcher's options about hosts, understood as DeepSpeed's own parser and filters understand them."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.launcher import runner

from ddpm_ds.errors import EXIT_BAD_INPUT, SpecError
from ddpm_ds.processes import launcher, ranks
from ddpm_ds.processes.launcher import SSH_ALIVE, local_options, read_launch, ssh_environment
from ddpm_ds.processes.ranks import GIVEN_DEVICES

OWN = socket.gethostname()
SCRIPT = "launch/train.py --run-dir runs/a -p 2 --hostfile of-the-script"


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    """This host and two others."""
    file = tmp_path / "hostfile"
    file.write_text(f"{OWN} slots=2\nworker-2 slots=2\nworker-3 slots=2\n")
    return file


def test_every_option_of_deepspeeds_launcher_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda parser, args=None: parser)
    options = [action for action in runner.parse_args()._actions if action.option_strings and action.dest != "help"]
    flags = {tuple(action.option_strings) for action in options if action.nargs == 0}
    assert flags == names(launcher.FLAGS)
    known = names(launcher.WITH_VALUE) | names(launcher.NUMBERS)
    assert {tuple(action.option_strings) for action in options} - flags == known


def names(options: str) -> set[tuple[str, ...]]:
    return {tuple(option.split(",")) for option in options.split()}


@pytest.fixture
def pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pdsh on the path, which nobody calls."""
    (tmp_path / "pdsh").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("pdsh")
@pytest.mark.parametrize(
    ("options", "hosts", "remote"),
    [
        ("-H {file}", (OWN, "worker-2", "worker-3"), True),
        ("--hostfile={file} --ssh_port 22 --launcher_args '-R ssh'", (OWN, "worker-2", "worker-3"), True),
        ("--hostf {file} --num_nodes 2", (OWN, "worker-2"), True),
        ("-H {file} --num_nodes 1", (OWN,), False),
        ("-H {file} --num_nodes 1 --force_multi", (OWN,), True),
        (f"-H {{file}} --include worker-3@{OWN}:1", (OWN, "worker-3"), True),
        ("-H {file} -e worker-2@worker-3:0", (OWN, "worker-3"), True),
        ("-H {file} -e worker-2@worker-3:0,1", (OWN,), False),
        ("-H {file} --no_ssh --node_rank 1 --master_addr worker-2", (OWN, "worker-2", "worker-3"), False),
        ("--num_gpus 2 --no_local_rank -q", (), False),
        ("--hostfile /dev/null --num_gpus 2", (), False),
    ],
)
def test_the_hosts_that_take_part_are_deepspeeds(
    options: str, hosts: tuple[str, ...], remote: bool, hostfile: Path
) -> None:
    command = shlex.split(f"{options.format(file=hostfile)} --master_port 29511 {SCRIPT}")
    launch = read_launch(command)
    assert (launch.hosts, launch.remote, launch.port) == (hosts, remote, 29511)

    theirs = runner.parse_args(command)
    assert [theirs.user_script, *theirs.user_args] == list(launch.script) == SCRIPT.split()
    if pool := runner.fetch_hostfile(theirs.hostfile):
        active = runner.parse_inclusion_exclusion(pool, theirs.include, theirs.exclude)
        assert tuple(runner.apply_num_nodes_and_gpus(active, theirs.num_nodes, theirs.num_gpus)) == hosts

    assert launch.command(29511) == command
    assert runner.parse_args(launch.command(29512)).master_port == 29512
    assert launch.command(29512)[-len(SCRIPT.split()) :] == SCRIPT.split()


REFUSED = {
    "-H {file} --include localhost:5,6": "--include names localhost, which hostfile",
    f"-H {{file}} --include {OWN}:5,6": f"--include {OWN}:5,6 names slot 5 of {OWN}, and hostfile",
    "-H {file} --include worker-2:2": "has 2, from 0 on; use worker-2:0,1 or fewer",
    "-H {file} --exclude worker-9": "--exclude names worker-9",
    "-H {file} --include worker-2:a": "is no list of slots",
    "-H {file} --include worker-2:0:1": "is no list of slots",
    "-H {file} --include worker-2 --exclude worker-3": "exclude each other",
    "-H {file} --include worker-2 --num_nodes 1": "--num_nodes and --num_gpus exclude --include",
    "-H {file} --exclude worker-2 --num_gpus 1": "--num_nodes and --num_gpus exclude --include",
    f"-H {{file}} --exclude {OWN}@worker-2@worker-3": "leaves no host",
    "-H /dev/null --num_nodes 2": "needs the other hosts in a hostfile",
    "-H /dev/null --include localhost:4": "names slot 4 of localhost, and this host, without a hostfile, has 4",
    "-H /dev/null --include worker-2": "names worker-2, which this host, without a hostfile, does not; use localhost",
}


@pytest.mark.usefixtures("pdsh")
@pytest.mark.parametrize("options", REFUSED)
def test_what_deepspeeds_filters_refuse_is_one_line_before_any_start(
    options: str, hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = SimpleNamespace(visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"], device_count=lambda: 4)
    monkeypatch.setattr(launcher, "_devices", four.device_count)
    monkeypatch.setattr(runner, "get_accelerator", lambda: four)
    monkeypatch.setattr(runner.subprocess, "check_call", lambda *arguments, **options: 0)
    command = shlex.split(f"{options.format(file=hostfile)} {SCRIPT}")
    with pytest.raises(SpecError, match=re.escape(REFUSED[options])):
        read_launch(command)
    with pytest.raises((ValueError, AssertionError, IndexError, StopIteration)):  # as DeepSpeed does
        runner.main(command)


@pytest.mark.parametrize(
    ("visible", "processes", "on_cpu", "taken", "seen"),
    [
        (None, 2, False, [0, 1], "0,1"),
        ("", 1, False, [0], ""),
        ("-1", 1, False, [0], "-1"),
        ("3", 1, False, [3], "3"),
        ("3, 1", 2, False, [1, 3], "1,3"),
        ("3,2,1", 1, False, [3], "3"),
        ("3", 2, False, [0, 1], "3"),
        ("3,3", 2, False, [0, 1], "3,3"),
        ("GPU-8d1f", 1, False, [0], "GPU-8d1f"),
        ("MIG-8d1f,MIG-9e2a", 1, False, [0], "MIG-8d1f,MIG-9e2a"),
        ("3", 1, True, [0], "0"),
    ],
)
def test_processes_of_this_host_get_the_gpus_of_cuda_visible_devices(
    visible: str | None, processes: int, on_cpu: bool, taken: list[int], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``taken`` are the launcher's GPUs; ``seen`` is what a rank has in the variable before it starts CUDA."""

    class Started(Exception):
        """Raised where DeepSpeed would start the ranks."""

    def start(hosts: dict[str, list[int]]) -> None:
        raise Started(hosts)

    rest = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", GIVEN_DEVICES)}
    monkeypatch.setattr(os, "environ", rest if visible is None else {**rest, "CUDA_VISIBLE_DEVICES": visible})
    host = SimpleNamespace(visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"], device_count=lambda: 4)
    monkeypatch.setattr(runner, "get_accelerator", lambda: host)
    monkeypatch.setattr(runner, "encode_world_info", start)
    with pytest.raises(Started) as started:
        runner.main([*local_options(processes, on_cpu=on_cpu), "--hostfile", "/dev/null", *SCRIPT.split()])
    assert started.value.args == ({"localhost": taken},)

    CUDA_Accelerator.set_visible_devices_envs(host, os.environ, taken)
    monkeypatch.setattr(ranks, "find_environment", dict)
    ranks.set_environment()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-H nowhere", "hostfile nowhere can't be read"),
        ("-H {file} -i worker-9", f"--include names worker-9, which hostfile {{file}} does not; use {OWN}, worker-2"),
        ("-H {file} -e {own}", "none of worker-2, worker-3 of hostfile {file} is this host; start it on one of them"),
        ("--no_such_option 1", "unrecognized arguments: --no_such_option; deepspeed --help explains"),
    ],
)
def test_what_could_not_start_is_said_in_one_line(options: str, said: str, hostfile: Path) -> None:
    with pytest.raises(SpecError) as error:
        read_launch(shlex.split(f"{options.format(file=hostfile, own=OWN)} {SCRIPT}"))
    assert said.format(file=hostfile) in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-i localhost:5,6", "No slot '5' specified on host 'localhost'"),
        ("-e worker-9", "Hostname 'worker-9' not found in hostfile"),
        ("-i localhost -e localhost:0", "include_str and exclude_str are mutually exclusive."),
        ("-i localhost --num_gpus 1", "Cannot specify num_nodes/gpus with include/exclude"),
        ("--num_nodes 2", "Num nodes is >1 but no extra nodes available via hostfile"),
        ("--no_ssh --node_rank 7", "Launching training without ssh, but --node_rank is not set correctly."),
        ("--force_multi --launcher nobodys", "Unknown launcher nobodys"),
    ],
)
def test_what_only_deepspeed_can_check_is_one_line_too(
    options: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = SimpleNamespace(visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"], device_count=lambda: 4)
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: host)
    monkeypatch.setattr(sys, "argv", ["launcher", "--hostfile", "/dev/null", *options.split(), *SCRIPT.split()])
    monkeypatch.delitem(sys.modules, "deepspeed.launcher.runner")  # else runpy warns that it is imported
    with pytest.raises(SystemExit) as ended:
        launcher.main()
    assert ended.value.code == EXIT_BAD_INPUT
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"ddpm_ds: error: DeepSpeed's launcher: {said}; deepspeed --help explains its options"
    )


def test_without_pdsh_the_other_way_is_named(hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError, match="pdsh is not installed; install it, or start on each host with --no_ssh"):
        read_launch(["-H", str(hostfile), "launch/train.py"])
    assert read_launch(["-H", str(hostfile), "--launcher", "OpenMPI", "launch/train.py"]).remote


def test_ssh_notices_a_host_that_has_gone_unless_the_user_has_said_how() -> None:
    assert ssh_environment({}) == {"PDSH_SSH_ARGS_APPEND": SSH_ALIVE}
    assert ssh_environment({"PDSH_SSH_ARGS_APPEND": "-p 23"}) == {"PDSH_SSH_ARGS_APPEND": f"-p 23 {SSH_ALIVE}"}
    for name in ("PDSH_SSH_ARGS", "PDSH_SSH_ARGS_APPEND"):
        assert ssh_environment({name: "-o ServerAliveInterval=60"}) == {}

"""Where ranks are started: the hosts that take part and the variables of ranks are those of DeepSpeed's launcher."""

import ctypes
import os
import shlex
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.launcher import launch, runner

from ddpm_ds.cli.main import main
from ddpm_ds.ground.errors import EXIT_BAD_INPUT, SpecError
from ddpm_ds.processes import supervisor
from ddpm_ds.processes.ranks import RUN_SECRET
from ddpm_ds.processes.supervisor import Place, gpus

OWN = socket.gethostname()
SCRIPT = "launch/train.py --run-dir runs/a -p 2 --hostfile of-the-script"


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hostfile"
    file.write_text(f"{OWN} slots=2\nworker-2 slots=2\nworker-3 slots=2\n")
    return file


def test_the_hosts_that_take_part_are_deepspeeds(hostfile: Path) -> None:
    place = Place(hostfile=hostfile, port=29511)
    assert place.hosts() == {OWN: 2, "worker-2": 2, "worker-3": 2}
    theirs = runner.parse_args(place.deepspeed(shlex.split(SCRIPT)))
    assert list(runner.fetch_hostfile(theirs.hostfile).items()) == list(place.hosts().items())
    assert (theirs.master_port, [theirs.user_script, *theirs.user_args]) == (29511, SCRIPT.split())
    module = runner.parse_args(place.deepspeed(["-m", "ddpm_ds.cli.rank", "-p", "2"]))
    assert (module.module, module.user_script, module.user_args) == (True, "ddpm_ds.cli.rank", ["-p", "2"])


def test_ranks_of_this_host_have_the_variables_that_deepspeeds_launcher_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for CUDA_VISIBLE_DEVICES, which is the user's, by number or UUID."""
    popen = Mock(return_value=Mock(poll=lambda: 0, returncode=0))
    host = SimpleNamespace(visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"])
    host.set_visible_devices_envs = lambda *given: CUDA_Accelerator.set_visible_devices_envs(host, *given)
    given = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "GPU-8d1f,GPU-9e2a", "RANK": "7", "LOCAL_SIZE": "9"}
    world = runner.encode_world_info({"localhost": [0, 1]})
    monkeypatch.setattr(sys, "argv", ["launch", f"--world_info={world}", "--master_port=29511", SCRIPT.split()[0]])
    monkeypatch.setattr(launch, "get_accelerator", lambda: host)
    monkeypatch.setattr(launch, "subprocess", Mock(Popen=lambda words, env: popen(dict(env))))
    monkeypatch.setattr(launch, "signal", Mock())
    monkeypatch.setattr(launch, "time", Mock())
    monkeypatch.setattr(os, "environ", given)
    launch.main()
    ours = Place(2, port=29511).environments(given)
    assert len({rank.pop(RUN_SECRET) for rank in ours}) == 1
    own = {"CUDA_VISIBLE_DEVICES": "GPU-8d1f,GPU-9e2a", "LOCAL_WORLD_SIZE": "2"}
    assert ours == [{**call.args[0], **own} for call in popen.call_args_list] and len(ours) == 2


def test_the_gpus_of_this_host_are_counted_by_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def driver(starts: int, count: int) -> SimpleNamespace:
        def cu_device_get_count(pointer: object) -> int:
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = count  # type: ignore[arg-type]
            return 0

        return SimpleNamespace(cuInit=lambda flags: starts, cuDeviceGetCount=cu_device_get_count)

    for starts, found in ((0, 3), (100, 0)):  # 100: no device, such as one that is hidden
        monkeypatch.setattr(supervisor.ctypes, "CDLL", lambda name, starts=starts: driver(starts, 3))
        assert gpus() == found
    monkeypatch.setattr(supervisor.ctypes, "CDLL", lambda name: ctypes.PyDLL("no such library"))
    assert gpus() == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--hostfile nowhere {script}", "hostfile nowhere can't be read"),
        ("--hostfile others {script}", "none of worker-2, worker-3 of hostfile others is this host; start it on"),
        ("--hostfile hostfile --processes 2 {script}", "not allowed with argument"),
        (
            "--no_ssh --hostfile hostfile {script}",
            "run has no option --no_ssh; write the script's options after its name, or",
        ),
        (
            "-- --num_gpus 2 {script}",
            "type: deepspeed --num_gpus 2 launch/train.py --run-dir runs/a -p 2 --hostfile of",
        ),
        ("--max-restarts 1 -- --hostfile nowhere {script}", "hostfile nowhere can't be read"),
        ("launch/train.py --run-dir", "add --run-dir DIR"),
        ("--hostfile own {script}", "line 1: 'GLOO_SOCKET_IFNAME' is not NAME=VALUE"),
    ],
)
def test_a_command_that_run_can_not_start_ends_in_one_line(
    words: str, line: str, hostfile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(hostfile.parent)
    own, *others = hostfile.read_text().splitlines()
    for name, text in (("own", own), ("others", "\n".join(others)), (".deepspeed_env", "GLOO_SOCKET_IFNAME\n")):
        Path(name).write_text(text)
    assert main(["run", *words.format(script=SCRIPT).split()]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and not Path("runs").exists()


def test_without_pdsh_the_other_way_is_named(hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError, match="pdsh is not installed; install it, or start on each host: deepspeed --no_ssh"):
        Place(hostfile=hostfile).check()
    hostfile.write_text(f"{OWN} slots=2\n")
    Place(hostfile=hostfile).check()

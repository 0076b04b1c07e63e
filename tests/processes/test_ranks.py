"""The beginning of every program, and how it notices that its launcher has gone."""

import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpm_ds.ground.errors import HostError, SpecError
from ddpm_ds.ground.outputs import cache_folder
from ddpm_ds.processes.hosts import find_environment
from ddpm_ds.processes.ranks import EXIT_FILE_VARIABLE, ExitFile, Launcher, for_good, set_environment
from ddpm_ds.processes.signals import STOP_SIGNALS
from tests.launching import PATIENCE_SECONDS, REPOSITORY, wait_for

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1"}
SRUN |= {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "MASTER_ADDR": "node-1"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
SALLOC = {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a launcher, in a folder and a home without files; restored afterwards."""
    for name in (*NAMES, *(name for name in os.environ if name.startswith(("SLURM_", "DS_ENV")))):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("SLURM_STEP_TASKS_PER_NODE", value) for value in ("", "2(x", "2(xx2)", "two", "-2(x3)", "2(x9999999999)")),
        *(("SLURM_NODEID", value) for value in ("", "x", "-1", "3", "9" * 5000)),
        *((name, value) for name in ("SLURM_PROCID", "SLURM_LOCALID") for value in ("", "x", "-1", "7", "9" * 5000)),
        *(("SLURM_STEP_NUM_TASKS", value) for value in ("", "x", "0", "1", "9" * 5000)),
    ],
)
def test_odd_variables_of_slurm_are_refused_in_a_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known, text in {**SRUN, name: value}.items():
        monkeypatch.setenv(known, text)
    with pytest.raises(SpecError) as refused:
        set_environment()
    assert len(str(refused.value).splitlines()) == 1 and "in the environment" in str(refused.value)


WORLDS: dict[str, tuple[dict[str, str], str]] = {
    "alone": ({}, "0 1 0 1"),
    "deepspeed": (DEEPSPEED, "5 8 1 4"),
    "deepspeed after another's variables": ({**DEEPSPEED, "LOCAL_WORLD_SIZE": "1"}, "5 8 1 4"),
    "torchrun": (TORCHRUN, "5 8 1 4"),
    "torchrun after deepspeed's": ({**TORCHRUN, "LOCAL_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, "5 8 1 4"),
    "srun": (SRUN, "5 7 1 2"),
    "srun on the last node": ({**SRUN, "SLURM_NODEID": "2"}, "5 7 1 3"),
    "in a batch script": (BATCH_SCRIPT, "0 1 0 1"),
    "in the shell of salloc": (SALLOC, "0 1 0 1"),
    "deepspeed in a step of srun": ({**SRUN, **DEEPSPEED}, "5 8 1 4"),
    "no count on a host": ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "1 2 1 1"),
}


@pytest.mark.parametrize("launcher", WORLDS)
def test_every_launcher_makes_the_same_world(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, expected = WORLDS[launcher]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_environment()
    assert [os.environ[name] for name in NAMES[:4]] == expected.split()


@pytest.mark.parametrize(("ranks", "soft"), [(1, 1024), (100, 1024), (102, 1024), (103, 1027), (4096, 20_992)])
def test_many_ranks_may_open_many_files(ranks: int, soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 20_992]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: limits.__setitem__(slice(None), given))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    set_environment()
    assert limits == [soft, 20_992]
    monkeypatch.setenv("WORLD_SIZE", "4097")
    with pytest.raises(HostError, match=r"4,097 ranks need up to 20,997 open files .* is 20,992 .*limits.conf"):
        set_environment()
    limits[:] = [resource.RLIM_INFINITY] * 2
    set_environment()
    assert limits == [resource.RLIM_INFINITY] * 2


def test_the_file_gives_what_the_environment_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".deepspeed_env").write_text("UCX_TLS\n")
    with pytest.raises(SpecError, match="line 1: 'UCX_TLS' is not NAME=VALUE"):
        set_environment()
    assert os.environ["RANK"] == "0"  # print_for_all asks for it
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("UCX_TLS", "")
    monkeypatch.delenv("UCX_TLS")
    (tmp_path / ".deepspeed_env").write_text("UCX_TLS=tcp\n\nGLOO_SOCKET_IFNAME=eth0\n")
    set_environment()
    assert (os.environ["UCX_TLS"], os.environ["GLOO_SOCKET_IFNAME"]) == ("tcp", "lo")


RANK = """
import sys, time
from pathlib import Path
from ddpm_ds.processes.ranks import Launcher

launcher, said = Launcher(), Path(sys.argv[1])
said.write_text("here")
until = time.monotonic() + 60
while not launcher.is_gone() and time.monotonic() < until:
    time.sleep(0.01)
print("this goes to nowhere", flush=True)
said.write_text("gone" if launcher.is_gone() else "still there")
"""


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_a_supervisor_that_was_killed_before_its_rank_began_is_missed_unless_it_may_be_on_another_host(
    hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = ExitFile()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2" if hosts == "one host" else "1")
    monkeypatch.setenv(EXIT_FILE_VARIABLE, supervisor.name)
    before = Launcher()
    assert not before.is_gone()
    supervisor.close()
    assert before.is_gone() and Launcher().is_gone() == (hosts == "one host")


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize(("launched", "output"), [(True, "stdout"), (False, "stdout"), (False, "stderr")])
def test_a_launcher_is_missed_when_it_is_killed_and_any_parent_when_nobody_reads_the_output(
    launched: bool, output: str, tmp_path: Path
) -> None:
    said, streams = tmp_path / "said", {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    streams[output] = subprocess.PIPE
    variables = {**ENVIRONMENT, **({"CROSS_RANK": "0"} if launched else {})}
    command = [sys.executable, "-c", LAUNCHER, RANK, str(said)]
    parent = subprocess.Popen(command, env=variables, **streams, start_new_session=True)  # type: ignore[call-overload]
    try:
        wait_for(lambda: said.exists() and said.read_text() == "here")
        parent.kill()
        parent.wait()
        if not launched:
            time.sleep(0.3)
            assert said.read_text() == "here", "its parent may have been a shell"
            getattr(parent, output).close()
        wait_for(lambda: said.read_text() == "gone")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_home_folder_that_is_nobodys_or_can_not_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run as another user: neither a file of variables nor a cache is looked for there."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what Python does for a user without a home
    assert find_environment() == {} and "~" not in str(cache_folder())

    def refused(path: object, **options: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "stat", refused)
    assert find_environment() == {}


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_rank_that_is_stopped_before_it_has_anything_to_save_ends_with_75(number: int, tmp_path: Path) -> None:
    program = """
import hashlib, sys
from ddpm_ds.processes.ranks import recorded

def stuck():
    print("on", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in which Python does not handle a signal

sys.exit(recorded(stuck, stoppable=True))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=ENVIRONMENT) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"on\n"
        for _ in range(5):
            rank.send_signal(number)
        assert rank.wait(PATIENCE_SECONDS) == 75


def test_a_signal_after_a_rank_has_ended_does_not_change_its_code() -> None:
    program = (
        "import os, sys; from ddpm_ds.processes.ranks import STOP_SIGNALS, recorded\n"
        "code = recorded(lambda: 2, stoppable=True)\n"
        "for number in STOP_SIGNALS: os.kill(os.getpid(), number)\n"
        "sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT).returncode == 2


def test_a_rank_that_reads_what_a_mapped_file_no_longer_has_says_where_it_was(tmp_path: Path) -> None:
    program = """
import mmap, os, sys
from ddpm_ds.processes.ranks import recorded
def read_images():
    with open(sys.argv[1], "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        os.truncate(sys.argv[1], 0)
        return mapped[-1]
recorded(read_images)
"""
    (tmp_path / "images").write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", program, str(tmp_path / "images")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr and "in read_images" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            f"{name}={value} is not a whole number from"
            for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CROSS_SIZE", "MASTER_PORT")
            for value in ("", "two", "-1", "1.5", "1000000000", "9" * 5000)
        ),
        "LOCAL_RANK=4 and LOCAL_WORLD_SIZE = 4 in the environment contradict each other; correct",
        "LOCAL_RANK=3,RANK=2 LOCAL_RANK = 3 and RANK = 2 in the environment contradict each other",
        "LOCAL_WORLD_SIZE=9 and WORLD_SIZE = 8 in the environment contradict each other",
        "RANK=8 and WORLD_SIZE = 8 in the environment contradict each other",
    ],
)
def test_numbers_of_a_launcher_that_are_none_out_of_range_or_contradict_each_other_are_refused(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, _, message = wrong.partition(" ")
    given = dict(word.split("=") for word in words.split(","))
    monkeypatch.setattr(os, "environ", TORCHRUN | {"HOME": str(tmp_path)} | given)
    with pytest.raises(SpecError) as refused:
        set_environment()
    error = str(refused.value)
    assert message in error and all(name in error for name in given) and error.isprintable()


def test_permanent_objects_are_never_collected_again_even_if_making_them_fails() -> None:
    with pytest.raises(KeyError), for_good():
        assert not gc.isenabled()
        kept = [[number] for number in range(1000)]
        raise KeyError
    assert gc.isenabled() and not any(one is kept for one in gc.get_objects())
    gc.unfreeze()

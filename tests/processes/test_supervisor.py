"""``ddpm-ds run``: signals, exit codes, leftovers and restarts, with DeepSpeed's launcher and a quick stand-in."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from ddpm_ds.ground.errors import SpecError
from ddpm_ds.processes import signals as processes_signals
from ddpm_ds.processes import supervisor
from ddpm_ds.processes.hosts import OF_DEEPSPEED
from ddpm_ds.processes.ranks import EXIT_FILE_VARIABLE, ExitFile, ExitRecord, free_port, record_exit, recorded
from ddpm_ds.processes.signals import SAME_SIGNAL_SECONDS, received_signals
from ddpm_ds.processes.supervisor import DEFAULT_PORT, Outcome, Place, exit_code, supervise
from tests.launching import PATIENCE_SECONDS, REPOSITORY, place_program, wait_for

ONE, TWO = Place(1), Place(2)
SCRIPT = REPOSITORY / "tests" / "fake_training.py"
WAITED_FOR = "has ended 0.5 s ago and others have not: ending them"
LOST = "exit code 76 (a process was lost or hung)"

STAND_IN = """
import json, os, subprocess, sys, time
script = next(index for index, word in enumerate(sys.argv) if index and word.endswith(".py"))
with open("starts", "a") as log:
    log.write(json.dumps([sys.argv[1:script], dict(os.environ), open(os.environ["DS_ENV_FILE"]).read()]) + chr(10))
rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
code = subprocess.run([sys.executable, *sys.argv[script:]], env={**os.environ, **rank}).returncode
time.sleep(float(os.environ.get("STAND_IN_SLEEPS", "0")))
sys.exit(code)
"""
"""A quick launcher of one rank."""

RUN = """
import signal, sys; from ddpm_ds.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""
"""A shell that started the tests in the background has them ignore Ctrl-C, as nohup has them ignore a hang-up."""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty run folder, in whose parent the supervisor runs, on CPUs; nothing may be left running."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for name, value in (("HOME", tmp_path), ("PYTHONPATH", REPOSITORY), ("DS_ACCELERATOR", "cpu")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.1)
    yield folder
    assert left_running(folder) == []


KEYED_SSH = """#!/bin/sh
case "$*" in *" -i key "*) echo Welcome; echo 10.0.0.7 10.1.0.7 ;; *) echo "no key" >&2; exit 255 ;; esac
"""
"""An ssh that needs the key in pdsh's options."""


@pytest.fixture
def stand_in(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    package = run_dir.parent / "stand_in" / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    (package / "runner.py").write_text(STAND_IN)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    place_program(run_dir.parent / "bin", "pdsh", "#!/bin/sh\n")
    place_program(run_dir.parent / "bin", "ssh", KEYED_SSH)
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-i key")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parents[1]), str(REPOSITORY)]))
    (run_dir.parent / "hostfile").write_text(f"{socket.gethostname()} slots=1\nworker-2 slots=1\n")
    return Place(hostfile=Path("hostfile"), port=29511)


@pytest.fixture
def one_of_deepspeed(run_dir: Path) -> Place:
    """This host alone in a hostfile, so that DeepSpeed's launcher starts its ranks, with an ssh that it may ask."""
    place_program(run_dir.parent / "bin", "ssh", "#!/bin/sh\necho 127.0.0.1\n")
    (run_dir.parent / "hostfile").write_text(f"{socket.gethostname()} slots=1\n")
    return Place(hostfile=Path("hostfile"), port=free_port())


def test_hosts_that_start_again_on_their_own_meet_at_the_same_port(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Place] = []

    def start(program: tuple[str, ...], place: Place, *others: object) -> Mock:
        places.append(place)
        return Mock(run=lambda: Outcome(76 if len(places) < 3 else 0))

    monkeypatch.setattr(supervisor, "_Start", start)
    place = Place(2, 1, 2, "node-1")
    assert supervised(["train.py", "--run-dir", str(run_dir)], place, max_restarts=2)[0] == 0
    assert places == [replace(place, port=DEFAULT_PORT)] * 3


def playing(run_dir: Path, *parts: str) -> list[str]:
    return [str(SCRIPT), "--run-dir", str(run_dir), *parts]


def supervised(
    command: list[str], place: Place = TWO, max_restarts: int = 0, then: Callable[[str], Any] = print
) -> tuple[int, list[str]]:
    """The exit code of a supervisor in this process, and what it logged; ``then`` is called with each line."""
    said: list[str] = []

    def log(line: str) -> None:
        said.append(line)
        then(line)

    with received_signals():  # a supervisor leaves signals ignored; this process goes on
        ended = supervise(command, place, max_restarts=max_restarts, grace_seconds=60, log=log)
        return ended.code, said


def start(command: list[str], *options: str) -> subprocess.Popen[str]:
    """``ddpm-ds run`` in a process of its own, which can be signalled, with two ranks on this host by default."""
    two = [] if "--hostfile" in options else ["--processes", "2"]
    words = [sys.executable, "-c", RUN, "run", *two, *options, *command]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finish(run: subprocess.Popen[str]) -> tuple[int, list[str]]:
    _, said = run.communicate(timeout=PATIENCE_SECONDS)
    return run.returncode, re.findall(r"ddpm-ds run: (.*)", said)


def ready(run_dir: Path) -> Callable[[], bool]:
    return lambda: sum(path.read_text() != "" for path in run_dir.glob("start-0-*")) == 2


def left_running(run_dir: Path) -> list[str]:
    helpers = {int(path.read_text()) for path in run_dir.glob("helper-*")}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = str(run_dir) in process.cmdline() or process.pid in helpers
            found += [" ".join(process.cmdline())] if ours and process.status() != psutil.STATUS_ZOMBIE else []
    return found


def test_a_signal_lets_every_rank_save_and_ends_with_75(run_dir: Path) -> None:
    run = start(playing(run_dir, "train"), "--max-restarts", "3")
    wait_for(ready(run_dir))
    run.send_signal(signal.SIGUSR1)
    run.send_signal(signal.SIGTERM)  # so soon after the first, this is no second signal
    code, said = finish(run)
    assert code == 75 and len(said) == 1 and "asking 2 ranks to save and stop" in said[0]
    assert {path.name for path in run_dir.glob("saved-*")} == {"saved-0-rank-0", "saved-0-rank-1"}


@pytest.mark.launch
@pytest.mark.long
def test_a_killed_launcher_is_noticed_and_leaves_nothing_behind(run_dir: Path, one_of_deepspeed: Place) -> None:
    code, said = supervised(playing(run_dir, "kill_launcher"), one_of_deepspeed)
    assert code == 76
    assert said[0].startswith("the launcher has ended (exit code 0), but its ranks have not: asking 1 ranks to save")
    assert said[1:] == [LOST]
    assert (run_dir / "saved-0-rank-0").exists()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (supervisor._Start, "_wait_until_gone"),
        (supervisor, "exit_code"),
        (supervisor.Processes, "kill"),
        (ExitFile, "read"),
        (ExitFile, "close"),
    ],
)
def test_signals_while_the_supervisor_looks_at_a_finished_run_do_not_change_that_it_is_done(
    owner: Any, name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_signals, "SAME_SIGNAL_SECONDS", 0.0)
    original, sent = getattr(owner, name), list[signal.Signals]()

    def signalled(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if getattr(result, "finished", True):  # of what is read before, nothing is
            for number in (signal.SIGTERM, signal.SIGINT):
                sent.append(number)
                signal.raise_signal(number)
        return result

    monkeypatch.setattr(owner, name, signalled)
    assert supervised(playing(run_dir, "0"), max_restarts=1) == (0, []) and sent


@pytest.mark.parametrize("code", [0, 2])
def test_the_parent_of_ranks_imports_no_torch_and_a_signal_after_the_last_start_changes_nothing(
    code: int, run_dir: Path
) -> None:
    program = """
import os, signal, sys
from ddpm_ds.cli.main import main
code = main()
assert not {"torch", "deepspeed"} & set(sys.modules)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    os.kill(os.getpid(), number)
sys.exit(code)
"""
    words = [sys.executable, "-c", program, "run", *playing(run_dir, str(code))]
    assert subprocess.run(words, timeout=PATIENCE_SECONDS).returncode == code


def test_when_the_supervisor_is_killed_its_ranks_save_and_leave_and_so_do_its_secrets(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := run_dir / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hush")
    words = [sys.executable, "-c", RUN, "run", "--processes", "2", "--", *playing(run_dir, "train")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        wait_for(ready(run_dir))
        run.kill()
    wait_for(lambda: not left_running(run_dir))
    assert {path.name for path in run_dir.glob("saved-*")} == {"saved-0-rank-0", "saved-0-rank-1"}
    assert list(temporary.iterdir()) == []


def test_ranks_that_do_not_stop_are_ended_after_the_grace_with_their_helpers(run_dir: Path) -> None:
    run = start(playing(run_dir, "deaf"), "--grace-seconds", "0.5")
    wait_for(ready(run_dir))
    assert len(left_running(run_dir)) > 4
    run.send_signal(signal.SIGTERM)
    code, said = finish(run)
    assert code == 75 and "not saved within 0.5 s" in said[-1]


def test_a_second_signal_ends_everything_at_once(run_dir: Path) -> None:
    run = start(playing(run_dir, "deaf"), "--max-restarts", "3")
    wait_for(ready(run_dir))
    run.send_signal(signal.SIGTERM)
    assert run.stderr is not None and "asking 2 ranks" in run.stderr.readline()  # heard, if the machine is busy later
    time.sleep(SAME_SIGNAL_SECONDS + 0.2)
    run.send_signal(signal.SIGINT)
    code, said = finish(run)
    assert code == 128 + signal.SIGINT and said[-1] == "SIGINT: ended everything at once"


@pytest.mark.launch
def test_a_signal_before_there_are_ranks_ends_with_75(run_dir: Path, one_of_deepspeed: Place) -> None:
    run = start(playing(run_dir, "train"), "--hostfile", "hostfile", "--port", str(one_of_deepspeed.port))
    wait_for(lambda: len(left_running(run_dir)) > 1)  # the launcher runs
    run.send_signal(signal.SIGTERM)
    assert finish(run) == (75, ["SIGTERM: stopped before any rank had started"])


def test_a_signal_between_two_starts_ends_with_75(run_dir: Path) -> None:
    run = start(playing(run_dir, "1", "0"), "--max-restarts", "1")
    assert run.stderr is not None and "restart 1 of 1" in run.stderr.readline()
    run.send_signal(signal.SIGTERM)
    assert finish(run)[0] == 75


def test_a_new_checkpoint_gives_the_restarts_back(run_dir: Path) -> None:
    code, said = supervised(playing(run_dir, "raise", "checkpoint_and_die", "raise"), ONE, max_restarts=1)
    assert code == 1
    bug, once = "exit code 1 (an error of the program, see its traceback)", "restart 1 of 1 in 0.1 s"
    assert said == [f"{bug}; {once}", f"{LOST}; {once}", f"{bug}; no restart of 1 is left"]


@pytest.mark.parametrize(
    ("parts", "option", "resumed"),
    [
        ("76 checkpoint_and_die 0", "--resume old", ["old", "old", "auto"]),
        ("76 checkpoint_and_die 0", "--resume=old", ["old", "old", "auto"]),
        ("76 0", "--resume never", ["never", "auto"]),  # the folder is that of the start before
    ],
)
def test_a_restart_resumes_from_the_newest_save(parts: str, option: str, resumed: list[str], run_dir: Path) -> None:
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "latest").write_text("images-000000001")  # which the second start writes again
    assert supervised([*playing(run_dir, *parts.split()), *option.split()], ONE, max_restarts=2)[0] == 0
    assert [(run_dir / f"resume-{number}").read_text() for number in range(len(resumed))] == resumed


@pytest.mark.parametrize(
    ("launcher", "failure", "unfinished", "situation", "expected"),
    [
        (0, None, "", {}, 76),  # a part of the launcher was killed before it had started a rank
        (0, None, "", {"stopping": True}, 75),
        (0, None, "1", {}, 76),  # part of the launcher was killed, and the ranks as well
        (0, 75, "", {"orphaned": True}, 76),  # asked to save because the launcher was lost
        (1, 2, "1", {}, 2),
        (241, 75, "", {"stopping": True}, 75),
        (1, 76, "1", {}, 1),  # rank 1 raised, and the others lost it
        (247, 76, "1", {}, 76),  # rank 1 was killed
        (247, 75, "1", {}, 76),  # the same so early that the launcher's signal ended the others at once
        (247, 75, "", {}, 76),  # before it could record that it had started
        (1, 75, "", {}, 75),  # each rank was asked to stop, by a scheduler that also ended the launcher
        (-9, None, "0", {}, 76),
        (241, None, "0", {"stopping": True}, 75),  # the signal came before the rank could handle it
        (1, None, "0", {"stopping": True}, 1),  # saving failed
        (4, 4, "", {}, 4),
    ],
)
def test_exit_code(
    launcher: int, failure: int | None, unfinished: str, situation: dict[str, bool], expected: int
) -> None:
    record = ExitRecord(failure, tuple(unfinished))
    assert exit_code(launcher, record, **{"stopping": False, "orphaned": False, **situation}) == expected


def test_each_start_on_several_hosts_reads_the_hostfile_anew_and_takes_another_port(
    run_dir: Path, stand_in: Place
) -> None:
    Path(".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    said: list[str] = []

    def then(line: str) -> None:
        said.append(line)
        if "restart 2" in line:
            Path("hostfile").write_text("worker-2 slots=2\nworker-3 slots=2\n")

    with pytest.raises(SpecError, match="none of worker-2, worker-3 of hostfile"):
        supervised(playing(run_dir, "76", "76"), stand_in, max_restarts=3, then=then)
    assert said == [f"{LOST}; restart 1 of 3 in 0.1 s", f"{LOST}; restart 2 of 3 in 0.2 s"]

    (first, environment, travels), (second, _, _) = map(json.loads, Path("starts").read_text().splitlines())
    asked = ["--no_ssh_check", "--master_addr", "10.0.0.7"]
    assert first == ["--log_level", "critical", *asked, "--hostfile", "hostfile", "--master_port", "29511"]
    assert second == [*first[:-1], "29512"]
    assert environment["PDSH_SSH_ARGS_APPEND"] == f"-i key {supervisor.SSH_ALIVE}"
    assert travels == f"GLOO_SOCKET_IFNAME=eth0\n{EXIT_FILE_VARIABLE}={environment[EXIT_FILE_VARIABLE]}\n"


def test_a_first_host_that_ssh_does_not_reach_with_pdshs_options_is_one_line(
    run_dir: Path, stand_in: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-i none")
    with pytest.raises(SpecError, match=r"can't be asked for its address \(no key\); this must work: ssh .* -i none"):
        supervised(playing(run_dir, "0"), stand_in)
    assert not Path("starts").exists()


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_secrets_reach_the_ranks_of_this_host_and_no_command_line(
    run_dir: Path, stand_in: Place, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    """DeepSpeed writes the file that it is given, and of its environment MLFLOW_*, into the command lines of ssh, and
    prints each variable with NCCL in its name."""
    secret = {"MLFLOW_TRACKING_URI": "postgresql+psycopg2://bob:hush@db/ml", "MY_NCCL_URL": "http://me:hush@proxy"}
    secret |= {"MLFLOW_TRACKING_PASSWORD": "hush", "NCCL_TOKEN": "hush"}
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    Path(".deepspeed_env").write_text("MLFLOW_GATEWAY_KEY=hush\nMLFLOW_EXPERIMENT_NAME=digits\n")
    assert supervised(playing(run_dir, "environment"), stand_in if hosts == "several hosts" else ONE)[0] == 0
    if hosts == "several hosts":
        ((words, environment, travels),) = map(json.loads, Path("starts").read_text().splitlines())
        taken = {name for name in environment if name.startswith(OF_DEEPSPEED) or "NCCL" in name}
        assert not taken & secret.keys()
        assert "hush" not in f"{words} {travels}" and "MLFLOW_EXPERIMENT_NAME=digits" in travels
    of_rank = json.loads((run_dir / "environment").read_text())
    assert of_rank.items() >= {**secret, "MLFLOW_GATEWAY_KEY": "hush"}.items()


def test_a_launcher_that_waits_for_a_lost_host_for_ever_is_ended(
    run_dir: Path, stand_in: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOSING_SECONDS", 0.5)
    monkeypatch.setenv("STAND_IN_SLEEPS", "600")
    code, said = supervised(playing(run_dir, "76"), stand_in)
    assert code == 76
    assert said[:1] == ["ranks were lost 0.5 s ago and the launcher has not ended: ending it"]


@pytest.mark.parametrize(
    ("part", "expected", "saved", "said"),
    [
        # has nothing to save yet, and would wait for long
        ("fail:4", 4, True, ["exit code 4 (of the script)"]),
        ("fail:kill", 76, True, ["rank 0 was ended by signal 9 (Killed)", LOST]),
        ("training:4", 4, False, [f"rank 0 {WAITED_FOR}", "exit code 4 (of the script)"]),
        ("training:kill", 76, False, ["rank 0 was ended by signal 9 (Killed)", f"rank 0 {WAITED_FOR}", LOST]),
        # holds back the line that rank 0 has printed
        ("training:2", 2, False, []),
    ],
)
def test_when_a_rank_fails_only_ranks_before_training_are_asked_to_stop(
    part: str, expected: int, saved: bool, said: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOSING_SECONDS", PATIENCE_SECONDS if saved else 0.5)
    assert supervised(playing(run_dir, part)) == (expected, said)
    assert (run_dir / "saved-0-rank-1").exists() == saved


def test_ranks_record_how_they_end_where_their_supervisor_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, elsewhere = ExitFile(), tmp_path / "a file of another process"
    elsewhere.touch()
    with elsewhere.open() as file:
        for path in ("/proc/1/fd/1000", f"/proc/{os.getpid()}/fd/{file.fileno()}", elsewhere):
            monkeypatch.setenv(EXIT_FILE_VARIABLE, f"{path}@{record.name.rpartition('@')[2]}")
            assert recorded(lambda: 5) == 5  # nothing is written, nothing fails
    assert elsewhere.read_bytes() == b"" and record.read() == ExitRecord()
    monkeypatch.setenv(EXIT_FILE_VARIABLE, record.name)
    monkeypatch.setenv("RANK", "1")
    assert recorded(lambda: 0) == 0
    assert record.read() == ExitRecord(None, (), finished=True)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ZeroDivisionError):
        recorded(lambda: 1 // 0)
    assert record.read() == ExitRecord(None, ("0",), finished=True)
    monkeypatch.setenv("RANK", "2")
    assert record_exit(76) == 76
    with pytest.raises(SystemExit):
        recorded(lambda: sys.exit(2))
    assert record.read() == ExitRecord(76, ("0",), finished=True)

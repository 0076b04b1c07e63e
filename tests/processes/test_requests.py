"""Requests to one rank from outside; ``test_preemption.py`` shows how several ranks agree, in whole runs."""

import errno
import gc
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from ddpm_ds.processes import requests as requests_module
from ddpm_ds.processes.requests import Requests, SaveOrStop
from ddpm_ds.processes.signals import SAME_SIGNAL_SECONDS, STOP_SIGNALS, SignalThread
from tests.forking import Forked
from tests.launching import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Requests of a run in ``tmp_path`` that is saved every two minutes."""
    monkeypatch.setattr(requests_module, "LOOK_SECONDS", 0.01)
    requests = Requests(tmp_path, 2.0, ["rank 0"])
    requests.listen()
    yield requests
    requests.close()


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGUSR1], [signal.SIGINT, signal.SIGTERM]])
def test_a_signal_asks_to_stop_and_two_at_once_are_one(numbers: list[int], requests: Requests) -> None:
    assert requests.poll() == SaveOrStop()
    for number in numbers:  # a terminal to its process group, and a launcher to its ranks
        os.kill(os.getpid(), number)
    wait_for(lambda: requests.poll() == SaveOrStop(stop=True))  # a thread receives it


def test_a_thread_that_nobody_else_holds_keeps_receiving() -> None:
    received: list[int] = []
    thread = weakref.ref(SignalThread(received.append))
    gc.collect()
    held = thread()
    assert held is not None
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: received == [signal.SIGTERM])
    held.close()


def test_close_ends_the_thread_although_a_forked_process_has_its_socket_and_restores_handlers(tmp_path: Path) -> None:
    threads, handlers = threading.enumerate(), list(map(signal.getsignal, STOP_SIGNALS))
    requests = Requests(tmp_path, None, ["rank 0"])
    assert list(map(signal.getsignal, STOP_SIGNALS)) == handlers
    requests.listen()
    assert requests._signals is not None and signal.getsignal(signal.SIGTERM) != handlers[0]
    copy = os.dup(requests._signals.wakeup.fileno())  # as the loader's workers have one
    requests.close()
    assert threading.enumerate() == threads and list(map(signal.getsignal, STOP_SIGNALS)) == handlers
    os.close(copy)


@pytest.mark.parametrize(("name", "wish"), [("save", SaveOrStop(save=True)), ("save_and_stop", SaveOrStop(stop=True))])
def test_a_file_asks_until_the_run_is_saved_after_it_was_seen(
    name: str, wish: SaveOrStop, requests: Requests, tmp_path: Path
) -> None:
    assert requests.poll() == SaveOrStop()
    (tmp_path / name).touch()
    requests.saved()  # for another reason, before the file was seen
    wait_for(lambda: requests.poll() == wish)
    requests.saved()
    assert requests.poll() == SaveOrStop() and not (tmp_path / name).exists()


def test_a_file_system_that_fails_for_a_moment_asks_for_nothing(
    requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "save").touch()
    for number in (errno.EACCES, errno.EIO, errno.ESTALE):
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat := Mock(side_effect=OSError(number, os.strerror(number))))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while stat.call_count <= 2 * len(requests_module.FILES) and time.monotonic() < deadline:
                time.sleep(0.01)  # until it has looked once at least
            asked = requests.poll()
        assert asked == SaveOrStop()
    wait_for(lambda: requests.poll() == SaveOrStop(save=True))


def test_a_file_system_that_does_not_answer_keeps_no_step_waiting(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def exists(path: object) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        asked.set()
        return answers.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(os.path, "exists", exists)
    asked.wait(PATIENCE_SECONDS)
    assert requests.poll() == SaveOrStop() and not answers.is_set()
    answers.set()
    wait_for(lambda: requests.poll() == SaveOrStop(save=True, stop=True))


def test_the_clock_asks_and_begins_anew_when_the_run_is_saved(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    requests.saved()
    for minutes, wish in ((1.9, SaveOrStop()), (0.2, SaveOrStop(save=True))):
        now += 60 * minutes
        assert requests.poll() == wish
    requests.saved()
    assert requests.poll() == SaveOrStop()


STUCK = """
import hashlib, sys
from pathlib import Path
import torch.distributed as dist
from ddpm_ds.processes.requests import Requests
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
requests = Requests(Path("."), None, ["rank 0"])
requests.listen()
print("listening", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in which Python does not handle a signal
"""


def test_a_second_signal_ends_at_once_even_where_the_first_was_not_handled(tmp_path: Path) -> None:
    script, said = tmp_path / "stuck.py", tmp_path / "said"
    script.write_text(STUCK)
    process = Forked.script([str(script)], env=os.environ, stdout=said, stderr=said)
    try:
        wait_for(
            lambda: said.exists() and said.read_text() == "listening\n",
            output=said.read_text,
            running=lambda: process.poll() is None,
        )
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(SAME_SIGNAL_SECONDS + 0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    finally:
        process.kill()

"""What all tests share. A process has one thread, unless OMP_NUM_THREADS says otherwise: others would spin."""

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from ddpm_ds.processes.signals import SUPERVISOR_SIGNALS
from tests.forking import ServedWorkers
from tests.launching import place_empty_store

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

PROGRAM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
"""Where a test's programs are looked for: those of system administrators are on root's own path alone."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test where what its mark asks for is missing: GPUs, or programs, of which ``"a|b"`` names two that do."""
    needed = dict.fromkeys(name for mark in item.iter_markers("needs_programs") for name in mark.args)
    missing = [
        name.replace("|", " or ")
        for name in needed
        if not any(shutil.which(choice, path=PROGRAM_PATH) for choice in name.split("|"))
    ]
    if missing:
        pytest.skip(f"needs programs that are not installed: {', '.join(missing)}")
    for mark in item.iter_markers("gpu"):
        import torch

        wanted, found = mark.args[0] if mark.args else 1, torch.cuda.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA device(s), and there are {found}")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need programs as long ones. Files that take long come first, so that workers end together."""
    for item in items:
        if item.get_closest_marker("needs_programs"):
            item.add_marker(pytest.mark.long)
    slow = {item.path for item in items if item.get_closest_marker("launch")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Nothing that test files import is ever looked at for garbage, which engines have collected at their end."""
    if session.config.getoption("numprocesses", None):  # the workers collect, and this process runs no test
        return (yield)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    """A test leaves no variables and no signals to the next: verbs set those of their process."""
    variables, handlers = dict(os.environ), {number: signal.getsignal(number) for number in SUPERVISOR_SIGNALS}
    yield
    os.environ.clear()
    os.environ.update(variables)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers of this process have workers that share the import of MLflow."""
    monkeypatch.setattr("ddpm_ds.tracking.tracker.subprocess", ServedWorkers)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place_empty_store(folder := tmp_path_factory.mktemp("store"))
    return folder / "mlflow.db"

"""Start real processes, and tiny runs to give them."""

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.planning.run_plan import RunDraft, choose, lay_out, read_run
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.processes.supervisor import PRINTED_BY_RANK_0, Place
from tests.forking import ONE_THREAD, REPOSITORY, Forked, wait_for_end

CUTS = "ds.pipeline.partition"
OTHERS_SECONDS = 30.0
PATIENCE_SECONDS = float(os.environ.get("PATIENCE_SECONDS", "900"))
"""How long a test waits for what another process does, however busy the machine is."""


def drafted(
    spec: Path,
    overrides: Sequence[str],
    config: Path,
    *,
    world_size: int,
    stages: int | None,
    hosts: Sequence[str] | None = None,
) -> RunDraft:
    """The draft of a run, on one host by default; the planner chooses for a CPU if the layout is open."""
    files, names = read_run(spec, overrides, config), ("0",) * world_size if hosts is None else tuple(hosts)
    return lay_out(files, names, world_size, stages, choose(files, names, world_size, stages, "cpu"))


@functools.cache
def _empty_store() -> bytes:
    from mlflow import MlflowClient

    with TemporaryDirectory() as folder:
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return Path(folder, "mlflow.db").read_bytes()


def place_empty_store(folder: Path) -> None:
    """Put MLflow's SQLite store without runs into a folder that has none; making one takes long."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "mlflow.db").exists():
        (folder / "mlflow.db").write_bytes(_empty_store())


@functools.cache
def _digits() -> dict[str, bytes]:
    from ddpm_ds.data.prepare import prepare

    with TemporaryDirectory() as folder:
        made = prepare(DataSpec(source="digits", image_size=8, channels=1, store_root=Path(folder)))
        return {f"{made.path.name}/{file.name}": file.read_bytes() for file in made.path.iterdir()}


def place_digits(folder: Path) -> None:
    """Put the digits, prepared, into ``data`` of a folder, unless it has one, so that no run prepares them."""
    if not (folder / "data").exists():
        for name, content in _digits().items():
            file = folder / "data" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


@contextlib.contextmanager
def hanging() -> Iterator[None]:
    """Fail what waits for ever, in the main thread, with an alarm."""

    def give_up(number: int, frame: object) -> None:
        raise AssertionError(f"it has not ended after {PATIENCE_SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(PATIENCE_SECONDS))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def wait_for(
    happened: Callable[[], Any],
    seconds: float = PATIENCE_SECONDS,
    output: Callable[[], str] = lambda: "nothing",
    *,
    running: Callable[[], bool] = lambda: True,
    pause: float = 0.01,
) -> Any:
    """The first true result of ``happened``; fails with ``output`` after ``seconds``, or if nothing is ``running``."""
    until = time.monotonic() + seconds
    while not (result := happened()):
        assert running(), f"ended before it happened and printed {output()[-6000:]}"
        assert time.monotonic() < until, f"did not happen in time and printed {output()[-6000:]}"
        time.sleep(pause)
    return result


def fork_ranks(
    processes: int, script: Path, *arguments: str, stdout: Path, stderr: Path, **environment: str
) -> list[Any]:
    """The ranks of one run, with one thread each; their output is appended to two files, or to one.

    They are forked from a server that has imported DeepSpeed, unless ``environment`` names another accelerator. Unless
    ``arguments`` say how to cut, stages are cut by flops: times of layers on a busy machine make other cuts each time.
    """
    if "--deepspeed_config" in arguments and not any(CUTS in word for word in arguments):
        arguments += ("--set", f"{CUTS}=flops")
    words, ranks = [str(script), *arguments], Place(processes, port=free_port()).environments(os.environ | ONE_THREAD)
    variables = [rank | environment for rank in ranks]
    if variables[0]["DS_ACCELERATOR"] == "cpu":
        return [Forked.script(words, env=each, stdout=stdout, stderr=stderr) for each in variables]
    with stdout.open("a") as out, stderr.open("a") as err:
        started = functools.partial(subprocess.Popen, [sys.executable, *words], cwd=REPOSITORY, stdout=out, stderr=err)
        return [started(env=each) for each in variables]


def run_ranks(processes: int, script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the ranks of :func:`fork_ranks` to their end; return their output and the code of the first that failed.

    The others then have ``OTHERS_SECONDS``, and none where rank 0 has printed that input or numbers are bad.
    """
    with TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        ranks = fork_ranks(processes, script, *arguments, stdout=stdout, stderr=stderr, **environment)
        deadline, code = time.monotonic() + PATIENCE_SECONDS, 0
        while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
            if code == 0 and (code := next(filter(None, codes), 0)):
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS * (codes[0] not in PRINTED_BY_RANK_0))
            wait_for_end([rank.pid for rank, ended in zip(ranks, codes, strict=True) if ended is None], deadline)
        for process in ranks:
            process.kill()
        ended = [process.wait() for process in ranks]
        code = code or next(filter(None, ended), 0)
        return subprocess.CompletedProcess([str(script), *arguments], code, stdout.read_text(), stderr.read_text())


def on_a_shared_gpu() -> dict[str, str]:
    """Variables of ranks that share one GPU, each as if on a host of its own; skips where NCCL does not let them."""
    from ddpm_ds.training.start import (
        SHARED_GPU,  # imports PyTorch, which the process that only hands out tests has not
    )

    version = ctypes.c_int()  # of the library that is loaded; PyTorch names the one that it was built with
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    if version.value < 23000:
        pytest.skip(f"NCCL {version.value} does not let ranks share a GPU; 23000 does")
    return {"DS_ACCELERATOR": "cuda", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", SHARED_GPU: "1"}


def tiny_spec(**sections: dict[str, Any]) -> RunSpec:
    """A U-Net of a few thousand parameters that has everything: attention, skips over several stages, dropout."""
    values: dict[str, dict[str, Any]] = {
        "data": {"source": "digits", "image_size": 8, "channels": 1, "horizontal_flips": True},
        "unet": {"channels": 8, "multipliers": [1, 2], "blocks_per_level": 1, "attention_resolutions": [4]}
        | {"norm_groups": 4, "dropout": 0.1, "classes": 10},
        "diffusion": {},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"images": 64, "batch_images": 16, "seed": 3, "label_drop": 0.2},
        "logging": {"log_every_images": 16},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunSpec.model_validate({"name": "tiny", **values})


def tiny_text_spec(levels: int = 2, tokens: int = 5, **sections: dict[str, Any]) -> RunSpec:
    """The tiny U-Net, of two levels or one, with a caption of five tokens, pooled text and sizes; a third of the
    captions are dropped."""
    text = {"context_channels": 6, "tokens": tokens, "blocks": [1, 2][:levels], "middle_blocks": levels}
    text |= {"heads": [2, 4][:levels], "pooled_channels": 4, "size_channels": 4}
    values: dict[str, dict[str, Any]] = {
        "unet": {"multipliers": [1, 2][:levels], "attention_resolutions": [], "text": text},
        "data": {"source": "folder", "path": "pictures", "text": {"encoders": "pipeline", "drop": 0.3}},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return tiny_spec(**values)


def error_of(kind: Any, call: Callable[..., Any], *given: Any, **how: Any) -> str:
    """The error that a call raises, which is one line."""
    with pytest.raises(kind) as caught:
        call(*given, **how)
    assert str(caught.value).isprintable()
    return str(caught.value)


def place_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=2))
    return path

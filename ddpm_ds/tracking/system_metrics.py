"""System metrics of every host of a run - CPU, memory, disk, network, GPUs - by MLflow's classes and names.

    host b   child of its first rank ──▶ RUN_DIR/system_metrics/b.jsonl ──┐
    host a   child of rank 0 ──▶ RUN_DIR/system_metrics/a.jsonl ──────────┴──▶ child of rank 0 ──▶ trackers

Only rank 0's child talks to MLflow, so the other hosts need neither a connection to the tracking server nor its
password, and an SQLite file, which must not be written from several hosts, works as well. MLflow's own monitor needs
the server on every host and stops at its first failed request, so only its classes and environment variables are used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from ddpm_ds.command_line import limited_seconds, positive
from ddpm_ds.processes.ranks import NODE_ID, host_name
from ddpm_ds.tracking.run_folder import SYSTEM_METRICS, EventFile, lock
from ddpm_ds.tracking.tracker import Tracker, start_child

if TYPE_CHECKING:  # the child needs no PyTorch
    import torch.distributed as dist
    from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
INTERVAL, SAMPLES = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING"
SETTINGS = "system_metrics/settings"  # in the store
OFF = ("false", "0")
POLL_SECONDS = 0.05

Log = Callable[[str, str], None]
Number = TypeVar("Number", int, float)


@contextlib.contextmanager
def system_metrics(store: dist.Store | None, run_dir: Path, tracker: Tracker | None) -> Iterator[None]:
    """Have a child collect the system metrics of this host during training; entered on every rank.

    Rank 0's sender does so by itself, and other ranks than a host's first do nothing. The environment of rank 0, which
    alone has a ``tracker``, says for all hosts whether metrics are read and how often. ``store`` is that of the ranks,
    None for a single one.
    """
    child = None
    if store is not None and os.environ["RANK"] == "0":
        settings = {name: os.environ[name] for name in (SWITCH, INTERVAL, SAMPLES) if name in os.environ}
        store.set(SETTINGS, json.dumps(settings if tracker is not None else {SWITCH: "false"}))
    elif store is not None and os.environ["LOCAL_RANK"] == "0":
        while not store.check([SETTINGS]):  # waiting in the store would hold up this rank's heartbeat
            time.sleep(POLL_SECONDS)
        settings = {SWITCH: "true", INTERVAL: "10", SAMPLES: "1", **json.loads(store.get(SETTINGS))}
        if settings[SWITCH].lower() not in OFF:
            child = start_child(run_dir.resolve(), os.environ["RANK"], pipes=subprocess.DEVNULL, **settings)
    try:
        yield
    finally:
        if child is not None:
            child.kill()
            child.wait()


def collect(run_dir: Path, rank: int, ending: threading.Event, log: Log) -> None:
    """Write the means of several readings of this host into its file, at a fixed interval, until ``ending``.

    Metrics are ``system/HOST/...``, of rank 0's host ``system/...`` unless the environment names it. If two hosts have
    the same name, the second one's gets its rank appended. ``log`` shows a line, once for each topic.
    """
    host = host_name()
    try:
        _collect(run_dir / SYSTEM_METRICS, host, rank, ending, log)
    except Exception as error:  # whatever it is, training must not see it
        log(SYSTEM_METRICS, f"system metrics of {host} are no longer read ({error}); training continues")


def _collect(folder: Path, host: str, rank: int, ending: threading.Event, log: Log) -> None:
    if os.environ.get(SWITCH, "true").lower() in OFF:
        return
    interval, samples = _setting(INTERVAL, limited_seconds, "10"), _setting(SAMPLES, positive, "1")
    folder.mkdir(parents=True, exist_ok=True)
    for node in (host, f"{host}-rank{rank}"):
        path = folder / f"{node.replace('/', '_')}.jsonl"
        if (held := lock(path)) is not None:
            break
    prefix = f"system/{node}/" if rank or os.environ.get(NODE_ID) else "system/"
    file, monitors = EventFile(path, lambda line: log("disk", line)), _monitors(log)
    with held or contextlib.nullcontext():
        while True:
            for _ in range(samples):
                if ending.wait(interval):
                    return
                for monitor in monitors:
                    monitor.collect_metrics()
            means = {name: value for monitor in monitors for name, value in monitor.aggregate_metrics().items()}
            file.append({"metrics": {prefix + name: value for name, value in means.items()}})
            for monitor in monitors:
                monitor.clear_metrics()


def _monitors(log: Log) -> list[BaseMetricsMonitor]:
    """Return what reads this host; ``log`` is told when training uses GPUs that can't be read."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    psutil.cpu_percent()  # the first call only starts the counter
    monitors: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except Exception as error:  # no module, no driver, a driver of another version
        if os.environ.get("DS_ACCELERATOR") == "cuda":
            fix = "pip install nvidia-ml-py" if isinstance(error, ImportError) else "nvidia-smi says more"
            log("GPUs", f"system metrics of {host_name()} are without the GPUs ({error}); {fix}")
    return monitors


def _setting(name: str, parse: Callable[[str], Number], default: str) -> Number:
    try:
        return parse(os.environ.get(name, default))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name}: {error}") from None

"""System metrics of every host of a run - CPU, memory, disk, network, GPUs - in its MLflow run, by MLflow's names.

    host b   thread of its first rank ──▶ queue in the store on rank 0
    host a   thread of rank 0 ◀── the queue;  ──▶ the tracker, as system/b/...

Only rank 0 talks to MLflow, so the other hosts need neither a connection to the tracking server nor its password, and
an SQLite file, which must not be written from several hosts, works as well. Training never waits for this. MLflow's own
monitor needs the server on every host and stops at its first failed request, so only its names, numbers and environment
variables are used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import psutil
import torch.distributed as dist

from ddpm_ds.command_line import limited_seconds, positive
from ddpm_ds.processes.ranks import NODE_ID, host_name
from ddpm_ds.tracking.tracker import Tracker, print_to_stderr

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
INTERVAL, SAMPLES = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING"
SETTINGS, QUEUE = "system_metrics/settings", "system_metrics"  # in the store
POLL_SECONDS = 1.0
LEAVE_SECONDS = 1.0
"""Seconds to wait for each thread at the end of training; it may be waiting for the store."""

Log = Callable[[str], None]
Number = TypeVar("Number", int, float)


class SystemMetrics:
    """Reader of this host's metrics. ``log`` is told when training uses GPUs that can't be read."""

    def __init__(self, log: Log) -> None:
        psutil.cpu_percent()  # the first call only starts the counter
        self._network = psutil.net_io_counters()
        self._gpus: list[object] = []
        try:
            import pynvml as nvml

            nvml.nvmlInit()
            self._nvml = nvml
            self._gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except Exception as error:  # no module, no driver, a driver of another version
            if os.environ.get("DS_ACCELERATOR") == "cuda":
                fix = "pip install nvidia-ml-py" if isinstance(error, ImportError) else "nvidia-smi says more"
                log(f"system metrics are without the GPUs ({error}); {fix}")

    def read(self) -> dict[str, float]:
        """Return the current values; CPU utilisation is since the last call, traffic since the first."""
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(os.sep), psutil.net_io_counters()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
            "network_receive_megabytes": (network.bytes_recv - self._network.bytes_recv) / 1e6,
            "network_transmit_megabytes": (network.bytes_sent - self._network.bytes_sent) / 1e6,
        }
        for index, gpu in enumerate(self._gpus):
            name, nvml = f"gpu_{index}", self._nvml
            with contextlib.suppress(nvml.NVMLError):
                held = nvml.nvmlDeviceGetMemoryInfo(gpu)
                values[f"{name}_memory_usage_percentage"] = held.used / held.total * 100
                values[f"{name}_memory_usage_megabytes"] = held.used / 1e6
            with contextlib.suppress(nvml.NVMLError):
                values[f"{name}_utilization_percentage"] = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            with contextlib.suppress(nvml.NVMLError):
                milliwatts = nvml.nvmlDeviceGetPowerUsage(gpu)
                values[f"{name}_power_usage_watts"] = milliwatts / 1000
                values[f"{name}_power_usage_percentage"] = 100 * milliwatts / nvml.nvmlDeviceGetEnforcedPowerLimit(gpu)
        return values


@contextlib.contextmanager
def system_metrics(store: dist.Store | None, tracker: Tracker | None, log: Log = print_to_stderr) -> Iterator[None]:
    """Read the system metrics of this host during training and have rank 0 log them; entered on every rank.

    Does nothing on a rank that is not the first of its host. The environment of rank 0 says for all hosts whether
    metrics are read and how often.

    ``store`` is that of the ranks, None for a single one; ``tracker`` is that of rank 0. ``log`` shows one line to the
    user, and is called from another thread.
    """
    rank, host, ending = int(os.environ["RANK"]), host_name(), threading.Event()
    jobs: list[Callable[[], None]] = []
    if tracker is not None:
        settings = {name: os.environ[name] for name in (SWITCH, INTERVAL, SAMPLES) if name in os.environ}
        node = host if os.environ.get(NODE_ID) else None
        jobs.append(lambda: _read(settings, ending, lambda values: tracker.system_metrics(values, node), log))
        if store is not None:
            jobs.append(lambda: _collect(store, settings, tracker, ending))
    elif store is not None and rank != 0 and os.environ["LOCAL_RANK"] == "0":
        jobs.append(lambda: _pass_on(store, host, rank, ending, log))

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except dist.DistError:  # rank 0 has gone, with the store
            pass
        except Exception as error:  # whatever it is, training must not see it
            log(f"system metrics of {host} are no longer read ({error}); training continues")

    threads = [threading.Thread(target=run, args=(job,), name="system metrics", daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join(LEAVE_SECONDS)


def _read(
    settings: Mapping[str, str], ending: threading.Event, take: Callable[[dict[str, float]], None], log: Log
) -> None:
    """Pass on the mean of several readings at a fixed interval until training ends."""
    if settings.get(SWITCH, "true").lower() in ("false", "0"):
        return
    interval = _setting(settings, INTERVAL, limited_seconds, "10")
    samples = _setting(settings, SAMPLES, positive, "1")
    source = SystemMetrics(log)
    while True:
        readings = []
        for _ in range(samples):
            if ending.wait(interval):
                return
            readings.append(source.read())
        last = readings[-1]
        means = {name: statistics.fmean(each.get(name, last[name]) for each in readings) for name in last}
        traffic = {name: value for name, value in last.items() if name.startswith("network_")}
        take({name: round(mean, 1) for name, mean in means.items()} | traffic)


def _setting(settings: Mapping[str, str], name: str, parse: Callable[[str], Number], default: str) -> Number:
    try:
        return parse(settings.get(name, default))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name}: {error}") from None


def _pass_on(store: dist.Store, host: str, rank: int, ending: threading.Event, log: Log) -> None:
    """Put the readings of a host other than rank 0's into the queue."""
    while not store.check([SETTINGS]):
        if ending.wait(POLL_SECONDS):
            return
    origin = {"host": host, "rank": rank}
    _read(
        json.loads(store.get(SETTINGS)),
        ending,
        lambda values: store.queue_push(QUEUE, json.dumps({**origin, "metrics": values})),
        lambda line: log(f"{host}: {line}"),
    )


def _collect(store: dist.Store, settings: Mapping[str, str], tracker: Tracker, ending: threading.Event) -> None:
    """Log the contents of the queue on rank 0. If two hosts have the same name, the second gets its rank appended."""
    store.set(SETTINGS, json.dumps(settings))
    ranks: dict[str, int] = {}
    ended = False
    while not ended:
        ended = ending.wait(POLL_SECONDS)
        for _ in range(store.queue_len(QUEUE)):
            if not (told := store.queue_pop(QUEUE, block=False)):
                continue
            read = json.loads(told)
            host, rank = read["host"], read["rank"]
            node = host if ranks.setdefault(host, rank) == rank else f"{host}-rank{rank}"
            tracker.system_metrics(read["metrics"], node)

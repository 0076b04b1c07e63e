"""MLflow's system metrics of the host that this process runs on: CPU, memory, disk, network and GPUs.

Read in processes beside training, which may import MLflow: on rank 0's host in that of the tracker, on every other one
in a process of its own, started by :mod:`ddpm_ds.tracking.node_metrics` with the trainer's id. That writes one JSON
object per line, {"metrics": {name: value}} or {"say": line}, and ends when the trainer has.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from ddpm_ds.tracking.tracker import settle_side_process

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
PACE = ("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING")

NOWHERE = "http://localhost"
"""MLflow's monitor wants a tracker, which is never called: it is asked for values, not to log them."""


def switched_on() -> bool:
    """Whether the environment leaves system metrics on, as they are unless it says otherwise."""
    return os.environ.get(SWITCH, "true").lower() not in ("false", "0")


def samples(ending: threading.Event, say: Callable[[str], None]) -> Iterator[dict[str, float]]:
    """Until ``ending``: values by MLflow's names, such as ``cpu_utilization_percentage``, means over an interval.

    The environment sets the interval (``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL``, 10 s). ``say`` is told when
    training uses GPUs that can't be read.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor("", tracking_uri=NOWHERE)
    first = monitor.collect_metrics()  # only starts the counters
    if os.environ.get("DS_ACCELERATOR") == "cuda" and not any(name.startswith("gpu_") for name in first):
        installed = importlib.util.find_spec("pynvml") is not None
        why = "NVML does not answer" if installed else "nvidia-ml-py is missing (pip install nvidia-ml-py)"
        say(f"system metrics are without the GPUs: {why}")
    while True:
        for source in monitor.monitors:
            source.clear_metrics()
        for _ in range(monitor.samples_before_logging):
            if ending.wait(monitor.sampling_interval):
                return
            monitor.collect_metrics()
        yield monitor.aggregate_metrics()


def _end_with(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(1.0)
    os._exit(0)


def main() -> None:
    """Serve the process whose id is the first argument."""
    logging.disable(logging.CRITICAL)
    to_trainer = settle_side_process()
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()

    def write(name: str, value: object) -> None:
        to_trainer.write(json.dumps({name: value}) + "\n")

    try:
        for values in samples(threading.Event(), lambda line: write("say", line)):
            write("metrics", values)
    except Exception as error:
        write("say", f"system metrics are no longer read ({error}); training goes on")


if __name__ == "__main__":
    main()

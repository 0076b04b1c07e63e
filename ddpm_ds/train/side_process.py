"""Processes beside training, which may import MLflow: started to find our modules and to keep out of the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

MLFLOW = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # who sends retries by itself and can be woken while it waits
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment of MLflow's client where nobody has said otherwise: it answers soon, or says that it can't."""


def start(module: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Run ``module`` beside this process, whose id is its argument, with pipes to its standard input and output.

    ``environment`` goes before that of this process.
    """
    variables = {
        **MLFLOW,
        **os.environ,
        **(environment or {}),
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),  # finds the modules we found
        "PYTHONSAFEPATH": "1",  # and none in the working folder besides
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", module, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)


def settle() -> IO[str]:
    """Called first in such a process: leave signals to the trainer and let it go first.

    Returns what to write lines for the trainer to; standard output is silenced, since MLflow may print.
    """
    # Launchers and terminals signal the whole process group; this process ends when the trainer has.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    to_trainer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return to_trainer

"""Calls in processes of their own: Triton decides when it is imported whether it interprets kernels or builds them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def run_alone(module: str, call: str, **environment: str) -> None:
    """Call a function of ``tests.<module>`` in a process of its own, where Triton is installed."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-c",
        "import torch; from ddpm_ds.pipeline import import_deepspeed; import_deepspeed()\n"  # else MLflow comes with it
        f"import tests.{module} as module; torch.set_num_threads(1); module.{call}",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

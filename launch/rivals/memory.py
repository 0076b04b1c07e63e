"""Peak memory of each row, in processes that train nothing else.

In one process rows can't be told apart: what one has freed the next one takes. So every process starts a child for a
row; the children find each other at a port of their own, take a few steps and say what it took.
"""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import torch

from ddpm_ds.pipeline.build import decided_by_rank_0
from ddpm_ds.pipeline.warm_up import forget_peaks
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.train.meters import peak_memory_bytes
from rivals.rows import Row

CHILD_OPTION = "--memory-of"
"""Makes this program such a child; of a row's name."""
STEPS = 2
"""Steps of a child: the second has the optimizer's state and the gradients at once."""
PREFIX = "peak bytes: "


def peak_in_child(row: str) -> int:
    """Peak bytes of ``row`` in a child of this process; every process calls this at the same time.

    Raises:
        RuntimeError: a child failed; with the end of what it said.
    """
    port = decided_by_rank_0(free_port)
    done = subprocess.run(
        [sys.executable, *sys.argv, CHILD_OPTION, row],
        env={**os.environ, "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
    )
    found = [line.removeprefix(PREFIX) for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if done.returncode or len(found) != 1:
        raise RuntimeError(f"the process that measures the memory of {row} failed:\n{done.stderr[-2000:]}")
    return int(found[0])


class PeakMemory:
    """The most bytes that this process holds in the steps of a row, more than it held before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else psutil.Process().memory_info().rss

    def begin_step(self) -> None:
        """Forget the steps before, on a GPU: the first one tries algorithms."""
        forget_peaks(self._device)

    def bytes(self) -> int:
        """On the device; for a CPU the growth of the resident set."""
        return max(peak_memory_bytes(self._device) - self._before, 0)


def say_peak(row: Row, memory: PeakMemory) -> None:
    """The child's part, once ``row`` is built; ``memory`` was made before."""
    for _ in range(STEPS):
        memory.begin_step()
        row.step()
    print(f"{PREFIX}{memory.bytes()}", flush=True)

"""One thread a process: many tests start several processes, and idle threads that spin slow each other down."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

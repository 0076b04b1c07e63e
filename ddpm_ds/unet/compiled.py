"""``torch.compile`` of each layer's arithmetic, once per shape.

What is compiled is :meth:`compute`: a function of tensors and parameters alone, without the carry, whose length differs
from layer to layer, and without the drawing of masks, whose keys do. So layers of one shape share their code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpm_ds.errors import DsConfigError

CODES_PER_LAYER = 4
"""Versions that a layer may have: with and without gradients, and for the micro-batches of training and of sampling."""


def check_compiler(device: torch.device) -> None:
    """Whether ``compile`` can work on a device.

    Raises:
        DsConfigError: there is no compiler.
    """
    wanted = ("g++", "clang++") if device.type == "cpu" else ("gcc", "cc", "clang")
    named = os.environ.get("CXX" if device.type == "cpu" else "CC")
    if not any(shutil.which(program) for program in (named, *wanted) if program):
        raise DsConfigError(
            f'compile = true needs {wanted[0]} on the path, which this host lacks; install it or write "compile": false'
        )


def compile_layers(modules: Sequence[nn.Module], cache: Path) -> None:
    """Compile the layers in place when they are first called; code is kept in ``cache`` between runs.

    A ``TORCHINDUCTOR_CACHE_DIR`` in the environment wins. A layer is compiled anew for each shape of its input, so that
    a step after the first one of its kind compiles nothing.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second, which others need not wait

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") in ("", default_cache_dir()):  # PyTorch writes its default there
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    limit = max(torch._dynamo.config.recompile_limit, CODES_PER_LAYER * len(modules))
    torch._dynamo.config.recompile_limit = limit
    layer: Any
    for layer in modules:
        layer.compute = torch.compile(layer.compute, dynamic=False)

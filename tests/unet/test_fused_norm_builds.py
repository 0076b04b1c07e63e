"""Compilation of the fused normalisation's kernels for an H100 on any machine: the interpreter accepts more."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TENSORS = {"x", "y", "dy", "dx", "weight", "bias", "dweight", "dbias"}
OPTIONAL = {"add", "scale", "shift", "dadd", "dscale", "dshift"}
SUMS = {"means", "squares", "sums", "mean", "rstd", "mean_dh", "mean_dh_h", "per_image"}
SIZES = {"C": 192, "G": 32, "ROWS": 16, "COLUMNS": 64, "TILES": 4, "GROUPS": 4, "WIDTH": 8, "SILU": 1}


def build(given: bool) -> None:
    """Build every kernel for bf16; without optional tensors every size is 1, which Triton makes a constant."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ddpm_ds.unet import fused_norm, fused_norm_kernels

    launched = set(re.findall(r"\bkernels\.(\w+)\[", inspect.getsource(fused_norm)))
    assert len(launched) == 9
    for name_of_kernel in sorted(launched):
        kernel = getattr(fused_norm_kernels, name_of_kernel)
        signature: dict[str, str] = {}
        constants: dict[str, int | None] = {}
        for name in kernel.arg_names:
            if name in SIZES or (not given and name in OPTIONAL):
                signature[name], constants[name] = "constexpr", SIZES.get(name)
            elif name in TENSORS | OPTIONAL | SUMS:
                signature[name] = "*fp32" if name in SUMS else "*bf16"
            elif name == "epsilon":
                signature[name] = "fp32"
            elif given:
                signature[name] = "i32"
            else:
                signature[name], constants[name] = "constexpr", 1
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        built = compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
        assert built.asm["cubin"]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("given", [True, False])
def test_every_kernel_is_built_for_an_h100(tmp_path: Path, given: bool) -> None:
    program = f"import tests.unet.test_fused_norm_builds as builds; builds.build({given})"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

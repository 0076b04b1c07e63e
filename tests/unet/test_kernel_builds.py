"""Compilation of the Triton kernels for an H100 on any machine: the interpreter accepts more than the compiler."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.alone import run_alone

TENSORS = {"x", "y", "dy", "dx", "weight", "bias", "dweight", "dbias"}
OPTIONAL = {"add", "scale", "shift", "dadd", "dscale", "dshift"}
SUMS = {"means", "squares", "sums", "mean", "rstd", "mean_dh", "mean_dh_h", "per_image"}
SIZES = {"C": 192, "G": 32, "ROWS": 16, "COLUMNS": 64, "TILES": 4, "GROUPS": 4, "WIDTH": 8, "SILU": 1}


def built(kernel: Any, signature: dict[str, str], constants: dict[str, Any], hints: Any = None) -> dict[str, Any]:
    """The code of a kernel, with constants by name."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    code = compile(ASTSource(kernel, signature, places, hints), target=GPUTarget("cuda", 90, 32)).asm
    assert code["cubin"]
    return code


def build_norms(given: bool) -> None:
    """Build every kernel of the normalisation for bf16.

    Without optional tensors every size is 1, which Triton makes a constant.
    """
    from ddpm_ds.unet import fused_norm, fused_norm_kernels

    launched = set(re.findall(r"\bkernels\.(\w+)", inspect.getsource(fused_norm)))
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
        built(kernel, signature, constants)


def build_masks() -> None:
    """Build the kernel of the masks, for masks of a multiple of 16 elements and for others."""
    from ddpm_ds.unet.keyed_mask import ALIGNED, HASH_MULTIPLIERS, WORDS, write_keep_masks

    names = write_keep_masks.arg_names
    types = {"images": "*i64", "rows": "*i64", "mask_of_block": "*i32", "keep": "*i1"}
    for aligned in (ALIGNED, 1):
        values = dict(zip(names[6:], (*HASH_MULTIPLIERS, WORDS, aligned), strict=True))
        signature = types | dict.fromkeys(names[4:6], "i32") | dict.fromkeys(values, "constexpr")
        hints = {(names.index(name),): [["tt.divisibility", 16]] for name in ("rows", "mask_of_block", "keep")}
        code = built(write_keep_masks, signature, values, hints)
        assert ("st.global.v4.b32" in code["ptx"]) == (aligned == 16), "a store of 16 bytes a thread"


def build_draws() -> None:
    """Build the kernel of the draws for a small seed and a large one."""
    from ddpm_ds.ground.keyed_draws import BLOCKS, write_draws

    *names, constant = write_draws.arg_names
    pointers = {"images": "*i64", "codes": "*i64", "words": "*i64", "normals": "*fp32", constant: "constexpr"}
    for wide in ("i32", "i64"):
        signature = dict.fromkeys(names, "i32") | {"seed": wide} | pointers
        code = built(write_draws, signature, {constant: BLOCKS})
        assert "sqrt.rn.f32" in code["ptx"], "another root rounds otherwise than PyTorch's"


@pytest.mark.long
def test_every_kernel_is_built_for_an_h100(tmp_path: Path) -> None:
    calls = "build_norms(True), module.build_norms(False), module.build_masks(), module.build_draws()"
    run_alone("unet.test_kernel_builds", calls, TRITON_CACHE_DIR=str(tmp_path))

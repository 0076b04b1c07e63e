"""A kernel that breaks the GPU of one rank ends all ranks, and none of them asks a GPU for anything on its way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.ranks import Ranks

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).with_name("broken_gpu.py")


def test_a_gpu_that_a_kernel_has_broken_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    with Ranks(tmp_path / "run", config="zero1_fp32.json", script=SCRIPT) as ranks:
        assert ranks.codes() == [2, 2], ranks.said[-4000:]
    line = (
        'ddpm_ds: error: kernels = "auto": the fused kernels have broken the GPU of rank 1: an illegal memory access '
        'was encountered; set "kernels" to "reference"'
    )
    said = {one for one in ranks.said.splitlines() if one.startswith("ddpm_ds: error")}
    assert said == {line}, ranks.said[-4000:]
    assert "Traceback" not in ranks.said

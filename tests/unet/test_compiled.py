"""Compiled layers compute what they did, share their code by shape, and are compiled in their first step alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ddpm_ds.errors import DsConfigError
from ddpm_ds.unet.model import check_compiler, compile_layers

PROGRAM = """
import sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from ddpm_ds.unet.model import compile_layers
from ddpm_ds.unet.operations import set_image_index
from tests.unet.variants import batch, layers_of, random_unet

torch.set_num_threads(1)
layers = layers_of("bare")
ours, plain = random_unet(layers), random_unet(layers)
compile_layers(list(ours.layers), Path(sys.argv[1]))
graphs = []
for step in range(3):
    for unet in (ours, plain):
        unet.zero_grad()
        unet(*batch("bare", seed=step)).square().mean().backward()
    graphs.append(counters["stats"]["unique_graphs"])
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-8
assert graphs[0] == graphs[2], f"compiled again: {graphs}"
shapes = len({type(layer).__name__ + str([p.shape for p in layer.parameters()]) for layer in ours.layers})
assert graphs[0] == shapes, f"{graphs[0]} graphs for {shapes} shapes of layers"
found = counters["inductor"]
print("kept", found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


@pytest.mark.needs_programs("g++|clang++")
def test_compiled_for_real_once_per_shape_and_kept_for_the_next_run(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=500,
        ).stdout
        for _ in range(2)
    ]
    (_, _, built), (_, kept, built_again) = map(str.split, said)
    assert int(built) > 0 and int(kept) >= int(built) and built_again == "0"


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "ours"), (default_cache_dir(), "ours"), ("theirs", "theirs")],
    ids=["unset", "set by PyTorch", "set by the user"],
)
def test_code_is_kept_where_the_user_says_else_in_our_folder(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
    compile_layers([], Path("ours"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == after


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(DsConfigError, match=r'compile = true needs g\+\+ .* install it or write "compile": false'):
        check_compiler(torch.device("cpu"))

"""The modules of the list: their first weights, the plain U-Net, and layers that are compiled."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ddpm_ds.ground.errors import DsConfigError
from ddpm_ds.unet.model import UNet, build_layer, check_compiler, compile_layers
from tests.launching import PATIENCE_SECONDS
from tests.unet.variants import batch, layers_of


def test_weights_are_a_function_of_seed_and_index_alone_and_differ_in_either() -> None:
    layers = layers_of("classes")
    torch.manual_seed(123)
    before = torch.get_rng_state()
    unet = UNet(layers, 5)
    assert torch.equal(torch.get_rng_state(), before), "torch's generator was moved"
    torch.manual_seed(124)
    for index in reversed(range(len(layers))):
        alone = build_layer(layers[index], index, 5).state_dict()
        assert all(torch.equal(tensor, unet.layers[index].state_dict()[name]) for name, tensor in alone.items())
    first, second = (index for index, layer in enumerate(layers) if layer.name.startswith("down.1.block"))
    places = (first, 5), (second, 5), (first, 6), (first, 2**31 - 1)
    drawn = [build_layer(layers[first], *place).state_dict()["conv1.weight"] for place in places]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])


def test_weights_start_as_in_ddpm() -> None:
    layers = layers_of("ddpm")
    unet = UNet(layers, 0)
    for name, parameter in unet.layers.named_parameters():
        norm = ".norm" in name
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif norm:
            assert (parameter == 1).all(), name
        elif ".conv2." in name or ".projection." in name or name == f"{len(layers) - 1}.conv.weight":
            assert (parameter == 0).all(), name
        else:
            parts = 3 if ".qkv." in name else 1
            field = parameter[0, :, :, 0].numel() if parameter.ndim == 4 else 1
            bound = math.sqrt(6 / (parameter.shape[-1] * field + parameter.shape[0] * field / parts))
            assert 0.9 * bound < parameter.abs().max().item() <= bound, name
    assert (unet(*batch("ddpm")) == 0).all()
    vector = UNet(layers_of("vector"), 5).get_parameter("layers.0.condition_embedding.weight")
    assert (vector == 0).all(), "a condition's vector adds nothing at first"


PROGRAM = """
import sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from ddpm_ds.unet.model import compile_layers
from ddpm_ds.unet.weight_gradients import WaitingGradients, weighted_parts
from tests.unet.variants import accumulate, batch, layers_of, random_unet, rounding

torch.set_num_threads(1)
layers = layers_of("bare")
ours, plain = random_unet(layers), random_unet(layers)
some = ours.layers[2:4]  # two blocks of one shape
compile_layers(list(some), Path(sys.argv[1]))
waiting = WaitingGradients({(0, 0)})  # weight gradients of the first of two micro-batches wait
parts = [part for layer in ours.layers for part in weighted_parts(layer)]
for part in parts:
    part.waiting = waiting
graphs = []
for step in range(int(sys.argv[2])):
    for unet in (ours, plain):
        unet.zero_grad()
        for number in range(2):
            waiting.begin(0, number)
            unet(*batch("bare", seed=2 * step + number)).square().mean().backward()
    own = [part for layer in some for part in weighted_parts(layer)]
    queued = [tensor for part in own for tensor in waiting._queued[0][part][1:]]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in queued), "keeps more alive"
    waiting.compute(parts, [0], accumulate)
    graphs.append(counters["stats"]["unique_graphs"])
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 2 * rounding(layers) * (other.grad.norm() + 1e-3)
assert graphs[0] == graphs[-1], f"compiled again: {graphs}"
shapes = len({type(layer).__name__ + str([p.shape for p in layer.parameters()]) for layer in some})
assert graphs[0] == 2 * shapes < 2 * len(some), f"{graphs[0]} graphs for {shapes} shapes of layers"
found = counters["inductor"]
print("kept", found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


@pytest.mark.launch
@pytest.mark.needs_programs("g++|clang++")
def test_compiled_for_real_once_per_shape_and_where_weight_gradients_wait_and_kept_for_the_next_run(
    tmp_path: Path,
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # others would be processes that import PyTorch
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), steps],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        ).stdout
        for steps in "31"
    ]
    (_, _, built), (_, kept, built_again) = map(str.split, printed)
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

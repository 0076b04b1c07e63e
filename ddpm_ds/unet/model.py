"""Modules for the list of layers, the plain U-Net that walks it in one process, ``torch.compile`` of the layers, and
the choice of kernels for normalisations and dropouts, ours or PyTorch's, as measured at start.
"""

import functools
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ddpm_ds.cuda_graphs import Graphs
from ddpm_ds.device import runs_triton, wait_for_device
from ddpm_ds.errors import DeviceLostError, DsConfigError
from ddpm_ds.unet import operations
from ddpm_ds.unet.blocks import CarryLayer, keep_part, module_of, set_context, transformer_blocks, walk
from ddpm_ds.unet.fused_norm import whole
from ddpm_ds.unet.layers import BlockLayer, Layer, OutputLayer
from ddpm_ds.unet.tensor_group import TensorGroup
from ddpm_ds.unet.weight_gradients import Tapped, weighted_parts

AskedKernels = Literal["auto", "fused", "masks", "reference"]
WARM_UP, RUNS = 3, 10
"""Number of warm-up runs, and of timed runs, of which the fastest counts."""


def build_layer(layer: Layer, index: int, seed: int) -> nn.Module:
    """Return the module of layer `index` of the list, in fp32 on the CPU.

    Its weights are a function of (seed, index) alone, so every stage of every layout starts from the same
    U-Net. torch's global generator is neither read nor moved.
    """
    with torch.device("cpu"):
        module = module_of(layer, index, seed)
    # torch's CPU generator takes 32 bits of a seed, so the pair is hashed rather than packed.
    entropy = np.random.SeedSequence((seed, index)).generate_state(1)
    operations.draw_weights(module, torch.Generator().manual_seed(int(entropy[0])))
    return module


def parameter_shapes(layers: Sequence[Layer], *, split: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the U-Net by global name, in layer order, without allocating memory; in
    layers that are ``split`` those of a rank's parts.
    """
    return {
        f"{index}.{name}": shape for index, layer in enumerate(layers) for name, shape in _shapes(layer, split).items()
    }


@functools.lru_cache(maxsize=1024)
def _shapes(layer: Layer, split: bool) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module = module_of(layer, 0, 0)
        if split:
            keep_part(module, layer, TensorGroup(0, layer.shards))
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class UNet(nn.Module):
    """U-Net in one process, the reference that every pipeline must equal.

    The names in ``self.layers``, such as ``4.conv1.weight``, are the parameters' names in every layout.
    """

    def __init__(self, layers: Sequence[Layer], seed: int, part: range | None = None) -> None:
        """Build the layers, or a ``part`` of the list alone, which then maps carry to carry."""
        super().__init__()
        self.layers = nn.ModuleList()
        for index in range(len(layers)) if part is None else part:
            self.layers.add_module(str(index), build_layer(layers[index], index, seed))

    def forward(
        self,
        x_t: Tensor,
        t: Tensor,
        *told: Tensor,
        images: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Predict from x_t (N, C, H, W) at timesteps t (N,): (N, C, H, W) in the dtype of the weights.

        ``told`` are the other inputs of the first layer (:class:`ddpm_ds.unet.blocks.Embed`): labels, the level of a
        condition and a vector, as far as the U-Net has them, each of which may be left out. ``images`` (N,) int64 are
        the image indices, which dropout needs in training. ``context`` (N, tokens, channels) is the encoded text of a
        U-Net with cross-attention.
        """
        if images is not None:
            operations.set_image_index(self.layers, images)
        set_context(transformer_blocks(self.layers), context)
        prediction: Tensor = walk(self.layers, (x_t, t, *told))
        return prediction


def check_compiler(device: torch.device) -> None:
    """Raise DsConfigError if ``compile`` has no compiler for a device."""
    wanted = ("g++", "clang++") if device.type == "cpu" else ("gcc", "cc", "clang")
    named = os.environ.get("CXX" if device.type == "cpu" else "CC")
    if not any(shutil.which(program) for program in (named, *wanted) if program):
        raise DsConfigError(
            f'compile = true needs {wanted[0]} on the path, which this host lacks; install it or write "compile": false'
        )


CODES_PER_LAYER = 5
"""Maximum compiled versions of a layer: with and without gradients, each for micro-batches of training and of sampling,
and with deferred weight gradients, for training alone.
"""


def compile_layers(modules: Sequence[nn.Module], cache: Path) -> None:
    """Make the layers compile at their first call; code is cached in ``cache`` between runs.

    Only :meth:`compute` is compiled, a function of tensors and parameters alone. The carry, the drawing of masks and
    the queue of weight gradients differ between layers and stay outside, so that layers of one shape share code. A
    ``TORCHINDUCTOR_CACHE_DIR`` in the environment takes precedence. A layer is compiled for each shape of its input,
    and once more for deferred weight gradients.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second to import

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") in ("", default_cache_dir()):  # PyTorch writes its default there
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    limit = max(torch._dynamo.config.recompile_limit, CODES_PER_LAYER * len(modules))
    torch._dynamo.config.recompile_limit = limit
    layer: Any
    for layer in modules:
        for name in layer.pieces if isinstance(layer, CarryLayer) else CarryLayer.pieces:
            within = layer.parts_of(name) if isinstance(layer, CarryLayer) else weighted_parts(layer)
            parts = [part for part in within if not isinstance(part, operations.EmbeddingProjection)]
            written = getattr(layer, name)
            setattr(layer, name, Tapped(written, torch.compile(written, dynamic=False), parts))


@dataclass(frozen=True)
class NormShape:
    """Shape of a normalisation with SiLU, and of the embedding around it."""

    channels: int
    size: tuple[int, int]
    """Height and width."""
    groups: int
    epsilon: float
    embedding: Literal["none", "add", "scale_shift"]


def norm_shapes(layers: Sequence[Layer]) -> Counter[NormShape]:
    """Count the normalisations of a U-Net that are followed by SiLU, by shape."""
    shapes: Counter[NormShape] = Counter()
    for layer in layers:
        match layer:
            case BlockLayer():
                of_layer = (layer.groups, layer.epsilon)
                shapes[NormShape(layer.width, layer.in_size, *of_layer, "none")] += 1
                embedding: Literal["add", "scale_shift"] = "scale_shift" if layer.scale_shift else "add"
                shapes[NormShape(layer.out_channels, layer.out_size, *of_layer, embedding)] += 1
            case OutputLayer():
                shapes[NormShape(layer.in_channels, layer.in_size, layer.groups, layer.epsilon, "none")] += 1
    return shapes


def mask_sizes(layers: Sequence[Layer]) -> Counter[int]:
    """Count the dropout masks of a U-Net by their elements per image."""
    return Counter(math.prod(layer.output_shape) for layer in layers if isinstance(layer, BlockLayer) and layer.dropout)


def check_kernels(asked: AskedKernels, device: torch.device) -> None:
    """Check, before anything starts, that the requested kernels can run on a device.

    Raises:
        DsConfigError: fused kernels were requested without CUDA or without Triton.
    """
    if asked in ("fused", "masks") and not runs_triton(device):
        missing = "CUDA, and this run is on the CPU" if device.type != "cuda" else "Triton, which is not installed"
        raise DsConfigError(f'kernels = "{asked}" needs {missing}; use "auto" or "reference"')


@dataclass(frozen=True)
class KernelTimes:
    """Times of the kernels on the device of one rank, in seconds; 0 if nothing was timed."""

    reference_seconds: float = 0.0
    fused_seconds: float = 0.0
    failure: str = ""
    """Reason why the fused kernels don't run; empty if they do."""
    device_lost: bool = False
    """Whether the failure of the fused kernels made the device unusable."""


def choose_kernels(
    asked: AskedKernels,
    layers: Sequence[Layer],
    device: torch.device,
    dtype: torch.dtype,
    images: int,
    gather: Callable[[KernelTimes], Sequence[KernelTimes]] = lambda trial: [trial],
    *,
    captured: bool = False,
) -> tuple[operations.Kernels, str]:
    """Return the kernels for these layers and a line with the reason; ``auto`` measures on ``images`` images.

    The measurement is the sum over the normalisations: of the device's time if steps will be ``captured`` as CUDA
    graphs, else host time included. Dropout masks take a dozen passes over memory without their own kernel, so they use
    it wherever it runs. ``gather`` returns the trials of all ranks, so that all choose alike.

    Raises:
        DsConfigError: fused kernels were requested but don't run on some rank.
        DeviceLostError: fused kernels have made the device of some rank unusable.
    """
    if asked == "reference":
        return asked, "kernels: reference (as asked)"
    if device.type != "cuda":
        check_kernels(asked, device)
        return "reference", "kernels: reference (the fused ones need CUDA and Triton)"
    trials = gather(try_kernels(asked, layers, device, dtype, images, captured=captured))
    failed = [(rank, trial) for rank, trial in enumerate(trials) if trial.failure]
    for rank, trial in failed:
        if trial.device_lost:
            raise DeviceLostError(
                f'kernels = "{asked}": the fused kernels have broken the GPU of rank {rank}: {trial.failure}; set '
                '"kernels" to "reference"'
            )
    if failed:
        where = f"rank {failed[0][0]}: {failed[0][1].failure}"
        if asked != "auto":
            raise DsConfigError(f'kernels = "{asked}" fails on {where}; use "auto" or "reference"')
        return "reference", f"kernels: reference (the fused ones fail on {where})"
    if asked != "auto":
        return asked, f"kernels: {asked} (as asked)"
    fused, reference = (sum(getattr(trial, f"{kind}_seconds") for trial in trials) for kind in ("fused", "reference"))
    over = f"over the normalisations of this U-Net, measured{' in CUDA graphs' if captured else ''}"
    if fused < reference:
        return "fused", f"kernels: fused ({reference / fused:.2f} times the speed of the reference {over})"
    slower = f"the reference has {fused / reference:.2f} times the speed of the fused ones {over}"
    if mask_sizes(layers):
        return "masks", f"kernels: masks, dropout's alone ({slower})"
    return "reference", f"kernels: reference ({slower})"


def try_kernels(
    asked: AskedKernels,
    layers: Sequence[Layer],
    device: torch.device,
    dtype: torch.dtype,
    images: int,
    *,
    captured: bool = False,
) -> KernelTimes:
    """Run the fused kernels of these layers on this process's CUDA device and, for ``auto``, time both kinds.

    Waits for the device, so no message may be under way. After a CUDA error such as an illegal address, everything on
    the device fails for this process; after a refusal by Triton or at launch, it does not.
    """
    if not runs_triton(device):
        return KernelTimes(failure="Triton is not installed")
    time_norms = partial(norm_seconds, norm_shapes(layers), device, dtype, images, captured=captured)
    probe = torch.ones(1, device=device)  # made first, so that a lack of memory is not taken for a lost device
    reference = time_norms("reference") if asked == "auto" else 0.0
    try:
        mask_seconds(mask_sizes(layers), device, images, "fused")
        return KernelTimes(reference, time_norms("fused") if asked != "masks" else 0.0)
    except Exception as error:  # Triton builds at first use and fails in many ways, without a compiler for one
        failure = " ".join(str(error).split())[:120] or type(error).__name__
    return KernelTimes(failure=failure, device_lost=not answers(probe))


def answers(probe: Tensor) -> bool:
    """Return whether the device of a tensor still works."""
    try:
        probe.neg_()
        torch.cuda.synchronize(probe.device)
    except RuntimeError:
        return False
    return True


def norm_seconds(
    shapes: Counter[NormShape],
    device: torch.device,
    dtype: torch.dtype,
    images: int,
    kernels: operations.Kernels,
    *,
    captured: bool = False,
) -> float:
    """Return the seconds of forward and backward of all the normalisations of a U-Net, each measured alone."""
    time_one = partial(one_norm_seconds, device=device, dtype=dtype, images=images, kernels=kernels, captured=captured)
    return sum(time_one(shape) * count for shape, count in shapes.items())


def one_norm_seconds(
    shape: NormShape,
    device: torch.device,
    dtype: torch.dtype,
    images: int,
    kernels: operations.Kernels,
    *,
    captured: bool = False,
) -> float:
    """Return the seconds of forward and backward of one normalisation on channels-last images, the fastest run's."""
    norm = operations.GroupNorm(shape.groups, shape.channels, shape.epsilon).to(device, dtype)
    norm.kernels = kernels
    x, dy = (_pictures(shape, device, dtype, images) for _ in range(2))
    names = {"none": (), "add": ("add",), "scale_shift": ("scale", "shift")}[shape.embedding]
    vectors = {name: torch.randn(images, shape.channels, device=device, dtype=dtype) for name in names}
    leaves = [x, norm.weight, norm.bias, *vectors.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    return seconds(
        lambda: torch.autograd.grad(operations.norm_silu(norm, x, **vectors), leaves, dy), device, captured=captured
    )


def mask_seconds(sizes: Counter[int], device: torch.device, images: int, kernels: operations.Kernels) -> float:
    """Return the seconds of all the dropout masks of a U-Net, drawn together."""
    dropouts = [operations.KeyedDropout(0.5, 0, layer, (size, 1, 1)) for layer, size in enumerate(sizes.elements())]
    operations.use_kernels(dropouts, kernels)
    operations.set_image_index(dropouts, torch.arange(images, device=device))
    return seconds(partial(operations.draw_masks, dropouts), device) if dropouts else 0.0


def copy_bandwidth_share(shape: NormShape, device: torch.device, dtype: torch.dtype, images: int) -> float:
    """Return the share of the device's copy bandwidth that the fused kernels reach in forward and backward together.

    It compares the bytes that must move with a plain copy of x. If images are held whole, forward reads x and writes y,
    and backward reads x and dy and writes dx; otherwise every input is read twice.
    """
    x = _pictures(shape, device, dtype, images)
    copied = torch.empty_like(x)
    copy = seconds(lambda: copied.copy_(x), device)
    passes = 5 if whole(math.prod(shape.size), shape.channels, shape.groups, x.element_size()) is not None else 8
    return passes / 2 * copy / one_norm_seconds(shape, device, dtype, images, "fused", captured=True)


def seconds(work: Callable[[], object], device: torch.device, *, captured: bool = False) -> float:
    """Return the seconds of some work on a CUDA device, the fastest run's: the device's own if the work is ``captured``
    as a CUDA graph, else host time included.
    """
    stream, outside = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
        graphs = Graphs(device)
        if captured:
            graphs.capture(work)
            graphs.replay()
        marks = []
        wait_for_device(device)
        for _ in range(RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            (graphs.replay if captured else work)()
            end.record()
            marks.append((begin, end))
        wait_for_device(device)
        graphs.reset()
    outside.wait_stream(stream)
    return min(begin.elapsed_time(end) for begin, end in marks) / 1000


def _pictures(shape: NormShape, device: torch.device, dtype: torch.dtype, images: int) -> Tensor:
    return torch.randn(images, shape.channels, *shape.size, device=device, dtype=dtype).to(
        memory_format=torch.channels_last
    )

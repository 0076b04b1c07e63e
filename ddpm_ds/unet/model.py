"""Modules of the list of layers, the plain U-Net, ``torch.compile`` of the layers, and the choice of kernels."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ddpm_ds.ground.device import runs_triton
from ddpm_ds.ground.errors import DsConfigError
from ddpm_ds.unet import operations
from ddpm_ds.unet.blocks import CarryLayer, set_context, transformer_blocks, walk
from ddpm_ds.unet.layers import BlockLayer, Layer
from ddpm_ds.unet.space import Band, SpaceGroup, leave_uncompiled
from ddpm_ds.unet.tensor_group import ALONE, TensorGroup
from ddpm_ds.unet.weight_gradients import Tapped, weighted_parts

AskedKernels = Literal["auto", "fused", "reference"]
C_COMPILERS = ("CC", "gcc", "cc", "clang")  # the environment variable that names one, and programs that may be one


def build_layer(
    layer: Layer,
    index: int,
    seed: int,
    tensor: TensorGroup = ALONE,
    space: SpaceGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    drawn: bool = True,
) -> CarryLayer:
    """Return the module of layer `index` of the list, in fp32 on a device, or this rank's part of a shared layer.

    Its weights are a function of (seed, index) alone, so all layouts start from the same U-Net. torch's generator is
    neither read nor moved. Unless they are ``drawn``, the caller writes all weights.
    """
    drops = (index, seed) if isinstance(layer, BlockLayer) else ()
    with torch.device(device):
        module = CarryLayer.of_kind[type(layer)](layer, *drops)
    if drawn:
        # torch's CPU generator takes 32 bits of a seed, so the pair is hashed rather than packed.
        entropy = np.random.SeedSequence((seed, index)).generate_state(1)
        operations.draw_weights(module, torch.Generator().manual_seed(int(entropy[0])))
    if layer.shards > 1 and tensor is not ALONE:
        module.split(tensor)
    if space is not None:
        module.share(space)
    trained = {one.name for one, _ in layer.trained_elements}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    return module


class UNet(nn.Module):
    """U-Net in one process, which every pipeline must equal; its ``layers`` name parameters as every layout does.

    With ``space`` the ranks of that group compute it together, each its rows of the whole images. Such a U-Net has no
    weights until they are assigned.
    """

    def __init__(self, layers: Sequence[Layer], seed: int, space: SpaceGroup | None = None) -> None:
        super().__init__()
        how: dict[str, Any] = {} if space is None else {"space": space, "device": "meta", "drawn": False}
        self.layers = nn.ModuleList(build_layer(layer, index, seed, **how) for index, layer in enumerate(layers))
        self._band = None if space is None else Band(space, layers[0].rows.arriving)

    def forward(
        self, x_t: Tensor, t: Tensor, *others: Tensor, images: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Predict from x_t (N, C, H, W) at timesteps t (N,): (N, C, H, W) in the dtype of the weights.

        ``others`` are the other inputs of the first layer (:class:`ddpm_ds.unet.blocks.Embed`): labels, the level of a
        condition and a vector, each of which may be left out. ``images`` (N,) int64 are the image indices, which
        dropout needs in training. ``context`` (N, tokens, channels) is the encoded text for cross-attention.
        """
        if images is not None:
            operations.set_image_index(self.layers, images)
        set_context(transformer_blocks(self.layers), context)
        own = x_t if self._band is None else self._band.cut(x_t)
        prediction: Tensor = walk(self.layers, (own, t, *others))
        return prediction if self._band is None else self._band.image(prediction)


def check_compiler(device: torch.device) -> None:
    """Raise DsConfigError if ``compile`` has no compiler for a device."""
    variable, *wanted = ("CXX", "g++", "clang++") if device.type == "cpu" else C_COMPILERS
    if not _compiler(variable, *wanted):
        raise DsConfigError(
            f'compile = true needs {wanted[0]} on the path, which this host lacks; install it or write "compile": false'
        )


def _compiler(variable: str, *programs: str) -> bool:
    """Return whether a compiler that an environment variable names, or one of some programs, is on the path."""
    return any(shutil.which(program) for program in (os.environ.get(variable), *programs) if program)


CODES_PER_LAYER = 5
"""Maximum compiled versions of a layer: with and without gradients, in training and sampling, and deferred."""


def compile_layers(modules: Sequence[nn.Module], cache: Path) -> None:
    """Make the layers compile at their first call; code is cached in ``cache`` between runs.

    Only :meth:`compute` is compiled, a function of tensors and parameters alone. The carry, the drawing of masks and
    the queue of weight gradients differ between layers and stay outside, so that layers of one shape share code. A
    ``TORCHINDUCTOR_CACHE_DIR`` in the environment takes precedence. A layer is compiled for each shape of its input.
    Where ranks share images, the pieces between their swaps are compiled.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second to import

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") in ("", default_cache_dir()):  # PyTorch writes its default there
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    limit = max(torch._dynamo.config.recompile_limit, CODES_PER_LAYER * len(modules))
    torch._dynamo.config.recompile_limit = limit
    leave_uncompiled()
    for layer in modules:
        assert isinstance(layer, CarryLayer)
        for part in weighted_parts(layer) if layer.arriving is not None else ():
            part.beside = None  # taps give a layer's weight gradients together, after its swaps
        for name in layer.pieces:
            parts = [part for part in layer.parts_of(name) if not isinstance(part, operations.EmbeddingProjection)]
            written = getattr(layer, name)
            setattr(layer, name, Tapped(written, torch.compile(written, dynamic=False), parts))


def choose_kernels(asked: AskedKernels, device: torch.device, *, captured: bool = False) -> operations.Kernels:
    """Return the kernels of layers whose steps are ``captured`` as CUDA graphs or launched one by one.

    ``auto`` takes the fused normalisations in graphs alone, since they take the host longer to launch than PyTorch's.
    Dropout's masks take a dozen passes over memory without their own kernel, so they use it wherever it runs. ``fused``
    raises DsConfigError if the device or its host lacks something that these kernels need.
    """
    missing = ""
    if device.type != "cuda":
        missing = "CUDA, and this run is on the CPU"
    elif not runs_triton(device):
        missing = "Triton, which is not installed"
    elif not _compiler(*C_COMPILERS):
        missing = "a C compiler, which this host lacks"
    if asked == "fused" and missing:
        raise DsConfigError(f'kernels = "fused" needs {missing}; use "auto" or "reference"')
    if asked != "auto":
        return asked
    return "reference" if missing else "fused" if captured else "masks"

"""Layers run once before they are needed, so that compiling, choosing kernels and loading them happens on all ranks at
the same time, and while no rank waits for a message of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpm_ds.unet.blocks import newest_skip_is_h, unpack
from ddpm_ds.unet.layers import EmbedLayer, Layer, boundary_shapes
from ddpm_ds.unet.operations import set_image_index


def warm_up(
    modules: dict[int, nn.Module],
    layers: Sequence[Layer],
    images: int,
    *,
    stage_begins: Sequence[int],
    gradients: bool,
    recompute: bool,
) -> None:
    """Run each of ``modules``, by their index in ``layers``, on ``images`` images of zeros, one after the other.

    With ``gradients`` backwards as well; no gradient is kept and no hook of a parameter runs. A layer at which a stage
    begins (``stage_begins``) gets an image that needs a gradient. With ``recompute`` the backward runs each layer
    forwards once more, in the thread that differentiates: cuDNN's choices of algorithms are kept by thread.
    """
    for index, module in modules.items():
        parameters = list(module.parameters())
        set_image_index([module], torch.arange(images, device=parameters[0].device))
        inputs = _zeros(layers, index, images, parameters[0])
        if not gradients:
            with torch.no_grad():
                module(inputs)
            continue
        leaves = [tensor for tensor in inputs if tensor.is_floating_point()] if index else []
        for leaf in leaves[index == 1 and index not in stage_begins :]:  # conv_in's image is nobody's output
            leaf.requires_grad_()
        if recompute:
            outputs = checkpoint(module, inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            outputs = module(inputs)
        roots = [tensor for tensor in ([outputs] if isinstance(outputs, Tensor) else outputs) if tensor.requires_grad]
        wanted = [*(leaf for leaf in leaves if leaf.requires_grad), *parameters]
        torch.autograd.grad(roots, wanted, [torch.zeros_like(root) for root in roots], allow_unused=True)


def forget_peaks(device: torch.device) -> None:
    """Count the peaks of a CUDA device from here on; those of a CPU's process can't be reset.

    While cuDNN tries its algorithms it takes as much of the device as is free, and gives it back.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _zeros(layers: Sequence[Layer], index: int, images: int, like: Tensor) -> tuple[Tensor, ...]:
    """What layer ``index`` is given: a carry, or the image, timesteps and labels."""
    layer = layers[index]
    if isinstance(layer, EmbedLayer):
        numbers = torch.zeros(images, dtype=torch.int64, device=like.device)
        image = torch.zeros((images, *layer.output_shape), device=like.device)
        return (image, numbers) if layer.classes is None else (image, numbers, numbers)
    shapes = ((images, *shape) for shape in boundary_shapes(layers, index))
    tensors = tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes)
    tensors = tuple(
        tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor for tensor in tensors
    )
    return unpack(tensors, newest_skip_is_h(layers, index))

"""Modules for the list of layers, and the plain U-Net that walks it in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ddpm_ds.unet.blocks import Attention, Downsample, Embed, Input, Output, ResidualBlock, Upsample
from ddpm_ds.unet.carry import Carry
from ddpm_ds.unet.layers import (
    AttentionLayer,
    BlockLayer,
    DownsampleLayer,
    EmbedLayer,
    InputLayer,
    Layer,
    OutputLayer,
    UpsampleLayer,
)
from ddpm_ds.unet.operations import draw_weights, set_image_index


def build_layer(layer: Layer, index: int, seed: int) -> nn.Module:
    """The module of layer `index` of the list, in fp32 on the CPU.

    Its weights are a function of (seed, index) alone, so every stage of every layout starts from the same
    U-Net. torch's global generator is neither read nor moved.
    """
    with torch.device("cpu"):
        module = _module(layer, index, seed)
    # torch's CPU generator takes 32 bits of a seed, so the pair is hashed rather than packed.
    entropy = np.random.SeedSequence((seed, index)).generate_state(1)
    draw_weights(module, torch.Generator().manual_seed(int(entropy[0])))
    return module


def parameter_shapes(layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the whole U-Net by global name, in the order of the layers; nothing is allocated."""
    with torch.device("meta"):
        modules = [_module(layer, index, 0) for index, layer in enumerate(layers)]
    return {
        f"{index}.{name}": tuple(parameter.shape)
        for index, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


def _module(layer: Layer, index: int, seed: int) -> nn.Module:
    match layer:
        case EmbedLayer():
            return Embed(layer)
        case InputLayer():
            return Input(layer)
        case BlockLayer():
            return ResidualBlock(layer, index, seed)
        case AttentionLayer():
            return Attention(layer)
        case DownsampleLayer():
            return Downsample(layer)
        case UpsampleLayer():
            return Upsample(layer)
        case OutputLayer():
            return Output(layer)
    raise TypeError(f"no module for layer {layer.name} of type {type(layer).__name__}")


class UNet(nn.Module):
    """The U-Net in one process: the reference that every pipeline must equal.

    The names in ``self.layers``, such as ``4.conv1.weight``, are the parameters' names in every layout.
    """

    def __init__(self, layers: Sequence[Layer], seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build_layer(layer, index, seed) for index, layer in enumerate(layers))

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None, images: Tensor | None = None) -> Tensor:
        """Predict from x_t (N, C, H, W) at timesteps t (N,): (N, C, H, W) in the dtype of the weights.

        labels (N,) int64 for a class-conditional U-Net; images (N,) int64, which dropout needs in training.
        """
        if images is not None:
            set_image_index(self.layers, images)
        *layers, last = self.layers
        carry: Carry = (x_t, t) if labels is None else (x_t, t, labels)
        for layer in layers:
            carry = layer(carry)
        return last(carry)

"""Small U-Nets that between them use every option of the spec, for RGB images of 16x16, or of 8x16 pixels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddpm_ds.unet.blocks import CarryLayer, set_context, transformer_blocks
from ddpm_ds.unet.layers import SIZES, Layer, TransformerBlockLayer, unet_layers
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.operations import set_image_index
from ddpm_ds.unet.spec import CrossAttentionSpec, Interface, UnetSpec
from ddpm_ds.unet.tensor_group import TensorGroup

INTERFACE = Interface(channels=3, size=(16, 16))
RECTANGLES = Interface(channels=3, size=(8, 16))


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add a weight gradient as a backward does, so that the weight's hooks run once."""
    torch.autograd.backward([get_gradient_edge(weight)], [gradient])


def small(**values: Any) -> UnetSpec:
    """A U-Net of two levels, but for these values."""
    return UnetSpec(**{"channels": 16, "multipliers": (1, 2), "norm_groups": 8, **values})


TEXT = CrossAttentionSpec(context_channels=24, tokens=5, blocks=(1, 0), heads=(2, 4))
TEXT_TIME = CrossAttentionSpec(
    context_channels=12, tokens=7, blocks=(0, 2), middle_blocks=3, heads=(1, 4), pooled_channels=10, size_channels=8
)
VARIANTS = {
    "ddpm": small(multipliers=(1, 2, 2, 2), attention_resolutions=(8,)),  # google/ddpm-cifar10-32, shrunk
    "symmetric": small(downsample_padding="symmetric"),
    "cos_sin": small(sinusoid_order="cos_sin", sinusoid_shift=0),
    "heads": small(multipliers=(1, 3, 2), attention_resolutions=(16, 4), norm_groups=4, head_channels=8),
    "scale_shift": small(time_conditioning="scale_shift"),
    "classes": small(multipliers=(2, 1), classes=10, attention_resolutions=(8,)),
    "bare": small(multipliers=(1,), blocks_per_level=1, norm_groups=2, middle_attention=False),
    "wide_embedding": small(channels=15, blocks_per_level=3, norm_groups=5, norm_epsilon=1e-2, embedding_channels=48),
    "dropout": small(blocks_per_level=1, dropout=0.2),
    "levels": small(multipliers=(1, 2, 1), attention_levels=(0, 2), downsample_padding="symmetric"),
    "level": small(sinusoid_order="cos_sin"),
    "vector": small(classes=3),
    # SD's and SDXL's kinds, shrunk
    "text": small(blocks_per_level=1, text=TEXT),
    "text_time": small(blocks_per_level=1, classes=3, text=TEXT_TIME),
}
INTERFACES = {
    "level": Interface(channels=3, size=(16, 16), condition_channels=4, condition_level=True),
    "vector": Interface(channels=3, size=(16, 16), condition_channels=2, numbers=5),
}
"""What the variants with a condition take and predict."""


def interface_of(name: str) -> Interface:
    """The images of a variant: rectangles where attention is named by level."""
    return INTERFACES.get(name, RECTANGLES if VARIANTS[name].attention_levels else INTERFACE)


def layers_of(name: str) -> tuple[Layer, ...]:
    return unet_layers(VARIANTS[name], interface_of(name))


def rounding(layers: tuple[Layer, ...]) -> float:
    """Relative error that two fp32 walks through the layers may differ by for the order of their sums.

    An output of a layer is a sum of up to 9 products per channel, in two convolutions; each addition rounds by half a
    unit of the last place at most, to either side. Four standard deviations of that random walk.
    """
    additions = sum(2 * 9 * (layer.in_channels + layer.skip_channels) for layer in layers)
    return 4 * additions**0.5 * 2.0**-24


def narrowing(roundings: int, dtype: torch.dtype) -> float:
    """Four standard deviations of the relative error of rounding so often to a data type, half a unit each time."""
    return 4 * roundings**0.5 * torch.finfo(dtype).eps / 2


def split_layer(module: nn.Module, group: TensorGroup) -> CarryLayer:
    """A layer after it is split among a group's ranks."""
    assert isinstance(module, CarryLayer)
    module.split(group)
    return module


def random_unet(layers: tuple[Layer, ...], seed: int = 0) -> UNet:
    """A U-Net without zeros in its weights, which would hide most of it; images 7 and 8 come next, with their text."""
    unet = UNet(layers, seed)
    randomise(unet, seed)
    set_image_index(unet.layers, torch.tensor([7, 8]))
    set_context(transformer_blocks(unet.layers), context(layers))
    return unet


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(noise * parameter[0].numel() ** -0.5)


def batch(name: str, seed: int = 1) -> tuple[Tensor, ...]:
    """Two images x_t with their condition, their t and the variant's other inputs: labels, of which the last is "no
    label", a level, and a vector."""
    generator, interface = torch.Generator().manual_seed(seed), interface_of(name)
    channels = interface.channels + interface.condition_channels
    x_t = torch.randn(2, channels, *interface.size, generator=generator)
    t = torch.randint(0, 1000, (2,), generator=generator)
    classes = VARIANTS[name].classes
    others = [] if classes is None else [torch.tensor([3, classes])]
    others += [torch.tensor([0.0, 321.5])] if interface.condition_level else []
    others += [torch.randn(2, interface.numbers, generator=generator)] if interface.numbers else []
    if (text := VARIANTS[name].text) is not None and text.pooled_channels:
        sizes = torch.randint(0, 1000, (2, SIZES), generator=generator)
        others.append(torch.cat((torch.randn(2, text.pooled_channels, generator=generator), sizes), dim=1))
    return (x_t, t, *others)


def context(layers: tuple[Layer, ...], seed: int = 2) -> Tensor | None:
    """The encoded text of two images, for a U-Net that reads it."""
    for layer in layers:
        if isinstance(layer, TransformerBlockLayer):
            generator = torch.Generator().manual_seed(seed)
            return torch.randn(2, layer.tokens, layer.context_channels, generator=generator)
    return None

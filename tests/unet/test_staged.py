"""Rung b of the ladder of trust: the list cut anywhere is the list."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ddpm_ds.unet.blocks import Carry, pack, unpack
from ddpm_ds.unet.layers import boundary_shapes
from tests.unet.variants import VARIANTS, batch, layers_of, random_unet, rounding

INSIDE = ("ddpm", "symmetric", "cos_sin", "scale_shift", "level", "vector")
"""Variants whose carry is that of another, or has less in it."""
FORMATS = {2: torch.contiguous_format, 4: torch.channels_last}


def walk(modules: nn.ModuleList, carry: Carry) -> Carry:
    for module in modules:
        carry = module(carry)
    return carry


def finish(modules: nn.ModuleList, carry: Carry) -> Tensor:
    """The prediction, by the layers up to the last one."""
    return modules[-1](walk(modules[:-1], carry))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(pytest.param(name, torch.float32, marks=pytest.mark.long if name in INSIDE else ()) for name in VARIANTS),
        ("heads", torch.float16),
    ],
    ids=str,
)
def test_a_forward_cut_anywhere_is_the_forward_bit_for_bit(name: str, precision: torch.dtype) -> None:
    layers = layers_of(name)
    modules = random_unet(layers).to(precision).layers
    carry = batch(name)
    with torch.no_grad():
        whole = finish(modules, carry)
        for cut in range(1, len(layers)):
            carry = modules[cut - 1](carry)
            sent = pack(carry, layers[cut - 1])
            assert tuple(tensor.shape[1:] for tensor in sent) == boundary_shapes(layers, cut)
            assert len({tensor.data_ptr() for tensor in sent}) == len(sent), "a tensor is sent twice"
            assert all(tensor.dtype is precision for tensor in sent)
            assert all(tensor.is_contiguous(memory_format=FORMATS[tensor.ndim]) for tensor in sent)
            received = tuple(tensor.clone() for tensor in sent)
            rest = finish(modules[cut:], unpack(received, layers[cut - 1]))
            assert torch.equal(rest, whole), f"cut before {layers[cut].name}"


def norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors])


@pytest.mark.parametrize(
    "name",
    [
        "scale_shift",
        "dropout",
        "text_time",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("heads", "text")),
    ],
)
def test_gradients_through_any_cut_are_the_gradients(name: str) -> None:
    layers = layers_of(name)
    modules = random_unet(layers).layers
    names = [name for name, _ in modules.named_parameters()]
    parameters = list(modules.parameters())
    expected = torch.autograd.grad(finish(modules, batch(name)).square().mean(), parameters)
    allowed = 2 * rounding(layers) * (norms(expected) + 1e-3)

    for cut in range(1, len(layers)):
        modules.zero_grad()
        sent = pack(walk(modules[:cut], batch(name)), layers[cut - 1])
        received = tuple(tensor.detach().requires_grad_() for tensor in sent)
        finish(modules[cut:], unpack(received, layers[cut - 1])).square().mean().backward()
        # x_t needs no gradient, and emb gets none from a stage that has only the last layer.
        pairs = [(s, r.grad) for s, r in zip(sent, received, strict=True) if s.requires_grad and r.grad is not None]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        differences = [gradient - wanted for gradient, wanted in zip(found, expected, strict=True)]
        too_large = [name for name, is_fine in zip(names, norms(differences) <= allowed, strict=True) if not is_fine]
        assert not too_large, f"cut before {layers[cut].name}"

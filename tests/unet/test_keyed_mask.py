"""Dropout's masks by one kernel are those of ``keyed.keep_mask``, bit for bit, as built on a GPU. In Triton's
interpreter ``test_interpreted.py`` compares them, on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ddpm_ds.ground.keyed import Stream, keep_mask
from ddpm_ds.pipeline.module import UnetPipelineModule
from ddpm_ds.unet.operations import Kernels, KeyedDropout, draw_masks, set_image_index, use_kernels
from tests.unet.variants import batch, layers_of, random_unet

BLOCK = 2048
"""Number of elements per program of the kernel."""


@dataclass(frozen=True)
class Case:
    seed: int = 3
    stream: int = Stream.DROPOUT
    images: tuple[int, ...] = (5,)
    count: int = 40
    drop: float = 0.3
    first: int = 0


CASES = {
    **{f"{count}-elements": Case(count=count, images=(0, 1)) for count in (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 8191)},
    **{f"seed-{seed}-stream-{stream}": Case(seed, stream) for seed, stream in ((0, 0), (1, 1), (2**31, 17))},
    "highest-key": Case(2**32 - 1, 2**32 - 1, count=200),
    **{f"rate-{drop:g}": Case(drop=drop, count=3000) for drop in (0.0, 2**-17, 2**-16, 0.1, 0.5, 0.999)},
    "highest-rate": Case(drop=1.0 - 1e-12, count=2**14),  # one element is kept
    "from-a-later-row": Case(count=3000, first=2 * BLOCK + 6, images=(4, 2**40)),
    "images-beyond-32-bits": Case(images=(2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**63 - 1, 5, 5)),
}


def differing(device: str) -> list[str]:
    """Cases in which the kernel's mask is not the reference's, drawn alone and together with another mask."""
    from ddpm_ds.unet.keyed_mask import WORDS, Mask, fused_keep_masks

    assert BLOCK == 2 * WORDS
    found = []
    for name, case in CASES.items():
        images = torch.tensor(case.images, device=device)
        wanted = Mask(case.seed, case.stream, (case.count, 1, 1), case.drop, case.first)
        other = Mask(case.seed, 7, (3, 5, 7), 0.25)
        masks = [*fused_keep_masks(images, [wanted]), *fused_keep_masks(images, [other, wanted, other])]
        whole = keep_mask(case.seed, case.stream, images, case.first + case.count, case.drop)
        expected = whole[:, case.first :]
        beside = keep_mask(case.seed, 7, images, 105, 0.25)
        for mask, of_mask in zip(masks, (expected, beside, expected, beside), strict=True):
            if not torch.equal(mask.permute(0, 2, 3, 1).flatten(1), of_mask) and name not in found:
                found.append(name)
    return found


def drawn_alike(device: str) -> dict[str, bool]:
    """Compare the masks that dropouts draw with both kernels: bits and memory format."""
    shapes = ((6, 5, 3), (16, 4, 4), (8, 2, 2))
    ways = [[KeyedDropout(0.4, 7, layer, shape) for layer, shape in enumerate(shapes)] for _ in range(2)]
    use_kernels(ways[1], "fused")
    for dropouts in ways:
        dropouts[1].rate = 0.0
        set_image_index(dropouts, torch.arange(2**33, 2**33 + 8, device=device)[::2])
    reference, fused = map(draw_masks, ways)
    assert reference[1] is fused[1] is None
    own = [[mask for mask in masks if mask is not None] for masks in (reference, fused)]
    return {
        "bits": all(map(torch.equal, own[0], own[1])),
        "channels-last": all(mask.is_contiguous(memory_format=torch.channels_last) for mask in own[1]),
    }


def launches(interval: int) -> list[int]:
    """Masks of each launch in a forward and backward of a stage that recomputes groups of layers, or no layer."""
    from ddpm_ds.unet import keyed_mask

    found, drawn = [], keyed_mask.fused_keep_masks

    def counted(images: torch.Tensor, masks: list[keyed_mask.Mask]) -> list[torch.Tensor]:
        found.append(len(masks))
        return drawn(images, masks)

    layers = layers_of("dropout")
    unet = random_unet(layers)
    stage: Any = SimpleNamespace(
        unet_layers=layers, forward_funcs=list(unet.layers), first=0, stop=len(layers),
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    )  # fmt: skip
    for name in ("_walk", "_recomputed"):
        setattr(stage, name, getattr(UnetPipelineModule, name).__get__(stage))
    gradients = []
    both: tuple[Kernels, Kernels] = ("reference", "masks")
    for kernels in both:
        use_kernels(unet.layers, kernels)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keyed_mask, "fused_keep_masks", counted)
            loss = UnetPipelineModule.forward(stage, batch("dropout")).square().mean()  # type: ignore[union-attr]
            gradients.append(torch.autograd.grad(loss, [*unet.parameters()]))
    assert all(map(torch.equal, *gradients))
    return found


@pytest.mark.parametrize("values", [{"seed": 2**32}, {"stream": -1}, {"drop": 1.0}, {"drop": -0.1}])
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    pytest.importorskip("triton")
    from ddpm_ds.unet.keyed_mask import Mask, fused_keep_masks

    wanted: dict[str, Any] = {"seed": 0, "stream": 0, "shape": (1, 1, 1), "drop": 0.1}
    with pytest.raises(ValueError, match="must be"):
        fused_keep_masks(torch.arange(1), [Mask(**wanted | values)])


@pytest.mark.gpu
def test_on_a_gpu_every_mask_is_the_reference_bit_for_bit() -> None:
    assert differing("cuda") == []
    assert all(drawn_alike("cuda").values())


@pytest.mark.gpu
def test_on_a_gpu_a_mask_beyond_31_bits_of_elements_is_right_to_its_end() -> None:
    from ddpm_ds.unet.keyed_mask import Mask, fused_keep_masks

    images, count = torch.tensor([4, 9], device="cuda"), 2**30 + 2**20 + 1
    (mask,) = fused_keep_masks(images, [Mask(0, Stream.DROPOUT, (count, 1, 1), 0.1)])
    for image, row in zip(images, mask.flatten(1), strict=True):
        assert torch.equal(row, keep_mask(0, Stream.DROPOUT, image[None], count, 0.1)[0])

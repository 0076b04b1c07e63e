"""Dropout's masks by one kernel are those of ``keyed.keep_mask``, bit for bit, as built on a GPU. In Triton's
interpreter ``test_interpreted.py`` compares them, on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ddpm_ds.keyed import Stream, keep_mask
from ddpm_ds.unet.operations import KeyedDropout, use_kernels

BLOCK = 2048
"""Number of elements per program of the kernel."""


@dataclass(frozen=True)
class Case:
    seed: int = 3
    stream: int = Stream.DROPOUT
    images: tuple[int, ...] = (5,)
    count: int = 40
    drop: float = 0.3


CASES = {
    **{f"{count}-elements": Case(count=count, images=(0, 1)) for count in (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 8191)},
    **{f"seed-{seed}-stream-{stream}": Case(seed, stream) for seed, stream in ((0, 0), (1, 1), (2**31, 17))},
    "highest-key": Case(2**32 - 1, 2**32 - 1, count=200),
    **{f"rate-{drop:g}": Case(drop=drop, count=3000) for drop in (0.0, 2**-17, 2**-16, 0.1, 0.5, 0.999)},
    "highest-rate": Case(drop=1.0 - 1e-12, count=2**18),
    "images-beyond-32-bits": Case(images=(2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**63 - 1, 5, 5)),
}


def differing(device: str) -> list[str]:
    """Cases in which the kernel's mask is not the reference's."""
    from ddpm_ds.unet.keyed_mask import WORDS, fused_keep_mask

    assert BLOCK == 2 * WORDS
    found = []
    for name, case in CASES.items():
        images = torch.tensor(case.images, device=device)
        arguments = (case.seed, case.stream, images, case.count, case.drop)
        if not torch.equal(fused_keep_mask(*arguments), keep_mask(*arguments)):
            found.append(name)
    return found


def drawn_alike(device: str) -> dict[str, bool]:
    """Compare the masks that a dropout draws with both kernels: bits, memory format, eager and compiled."""
    shape, dropouts = (6, 5, 3), [KeyedDropout(0.4, 7, 2) for _ in range(2)]
    use_kernels(dropouts[1:], "fused")
    for dropout in dropouts:
        dropout.images = torch.arange(2**33, 2**33 + 8, device=device)[::2]
    reference, fused = (dropout.draw(shape) for dropout in dropouts)
    compiled = torch.compile(dropouts[1].draw, fullgraph=True, backend="aot_eager")(shape)
    assert reference is not None and fused is not None and compiled is not None
    return {
        "bits": torch.equal(reference, fused),
        "channels-last": fused.is_contiguous(memory_format=torch.channels_last),
        "compiled": torch.equal(reference, compiled),
    }


@pytest.mark.parametrize("values", [{"seed": 2**32}, {"stream": -1}, {"drop": 1.0}, {"drop": -0.1}])
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    pytest.importorskip("triton")
    from ddpm_ds.unet.keyed_mask import fused_keep_mask

    arguments: dict[str, Any] = {"seed": 0, "stream": 0, "images": torch.arange(1), "count": 1, "drop": 0.1}
    with pytest.raises(ValueError, match="must be"):
        fused_keep_mask(**arguments | values)


@pytest.mark.gpu
def test_on_a_gpu_every_mask_is_the_reference_bit_for_bit() -> None:
    assert differing("cuda") == []
    assert all(drawn_alike("cuda").values())


@pytest.mark.gpu
def test_on_a_gpu_a_mask_beyond_31_bits_of_elements_is_right_to_its_end() -> None:
    from ddpm_ds.unet.keyed_mask import fused_keep_mask

    images, count = torch.tensor([4, 9], device="cuda"), 2**30 + 2**20 + 1
    mask = fused_keep_mask(0, Stream.DROPOUT, images, count, 0.1)
    for image, row in zip(images, mask, strict=True):
        assert torch.equal(row, keep_mask(0, Stream.DROPOUT, image[None], count, 0.1)[0])

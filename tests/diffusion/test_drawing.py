"""A drawn image is a function of seed, index and label alone, whoever asks the U-Net and in whatever batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.config.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.keyed import Stream
from tests.diffusion.sampling import sample

SHAPE = (3, 6, 5)
NO_LABEL = 10
KINDS: dict[str, dict[str, Any]] = {
    "ddpm": {"kind": "ddpm", "steps": 6},
    "ddim": {"kind": "ddim", "steps": 6, "eta": 0.7},
    "dpm_solver": {"kind": "dpm_solver", "steps": 6, "clip": "dynamic"},
}


def sampler_of(diffusion: DiffusionSpec | None = None, **values: Any) -> Sampler:
    return Sampler(SamplerSpec(**values), diffusion or DiffusionSpec())


def drawing_of(sampler: Sampler, index: Tensor, **values: Any) -> Drawing:
    defaults: dict[str, Any] = {"seed": 5, "shape": SHAPE, "labels": None, "guidance": 1.0, "no_label": NO_LABEL}
    return Drawing(sampler, index=index, **(defaults | values))


def unet(x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
    """A stand-in for a U-Net, whose prediction depends on all it is given.

    It is a multiple of 2^-8 below 1, so that guidance by 3 or a half is exact whatever the order of its operations.
    """
    label = torch.zeros_like(t) if labels is None else labels
    mixed = 0.8 * x_t + 1e-4 * t[:, None, None, None] + 0.05 * label[:, None, None, None]
    return mixed.clamp(-1.0, 1.0).mul(256).round() / 256


def drawn(drawing: Drawing) -> Tensor:
    for _ in range(drawing.calls):
        drawing.take(unet(*drawing.inputs()))
    return drawing.images()


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_the_same_in_any_batch(kind: str, guidance: float) -> None:
    sampler = sampler_of(**KINDS[kind])
    index, labels = torch.tensor([7, 0, 123_456_789_012, 3, 9]), torch.tensor([1, 2, 3, 4, 10])
    whole = drawn(drawing_of(sampler, index, labels=labels, guidance=guidance))
    assert whole.shape == (5, *SHAPE) and whole.dtype == torch.uint8
    assert len(whole.unique(dim=0)) == 5 and whole.float().std() > 20
    for some in ([0], [4, 2], [3, 1, 0, 2, 4]):
        part = drawn(drawing_of(sampler, index[some], labels=labels[some], guidance=guidance))
        # Logarithm and sine of the noise may be computed otherwise at the end of a vector: a byte more or less.
        assert (part.int() - whole[some].int()).abs().max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_is_the_sampler_with_keyed_noise(kind: str) -> None:
    sampler, index = sampler_of(**KINDS[kind]), torch.tensor([4, 8])

    def noise(stream: int) -> Tensor:
        return keyed.normal(5, stream, index, 3 * 6 * 5).reshape(2, *SHAPE)

    expected = sample(
        sampler, lambda x_t, t: unet(x_t, torch.tensor([t, t])), noise(Stream.SAMPLE), lambda t: noise(2**21 + 1 + t)
    )
    drawing = drawing_of(sampler, index)
    assert drawing.calls == len(sampler.times) == 6
    for t in sampler.times:
        with pytest.raises(AssertionError, match="of 6 predictions are still to take"):
            drawing.images()
        x_t, asked = drawing.inputs()
        assert x_t.dtype == torch.float32 and asked.dtype == torch.int64 and asked.tolist() == [t, t]
        drawing.take(unet(x_t, asked))
    found = drawing.images()
    assert not torch.equal(found, drawn(drawing_of(sampler, index, seed=6)))
    assert torch.equal(found, ((expected + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))


# Labels and guidance


@pytest.mark.parametrize(
    ("guidance", "expected"), [(1.0, [3, 4]), (0.0, [10, 10]), (3.0, [3, 4, 10, 10]), (0.5, [3, 4, 10, 10])]
)
def test_guidance_asks_with_and_without_labels_only_where_it_needs_both(guidance: float, expected: list[int]) -> None:
    drawing = drawing_of(sampler_of(), torch.arange(2), labels=torch.tensor([3, 4]), guidance=guidance)
    x_t, t, labels = drawing.inputs()
    assert x_t.dtype == torch.float32 and labels.tolist() == expected and len(x_t) == len(t) == len(expected)
    assert torch.equal(x_t[:2], x_t[-2:])
    assert [len(part) for part in drawing_of(sampler_of(), torch.arange(2), guidance=guidance).inputs()] == [2, 2]


@pytest.mark.parametrize("guidance", [0.5, 3.0])
def test_guidance_goes_from_the_prediction_without_label_through_that_with_it(guidance: float) -> None:
    sampler, index = sampler_of(steps=4), torch.arange(2)
    guided = drawing_of(sampler, index, labels=torch.tensor([3, 4]), guidance=guidance)
    plain = drawing_of(sampler, index)
    for _ in range(4):
        assert torch.equal(guided.inputs()[0][:2], plain.inputs()[0])
        guided.take(unet(*guided.inputs()))
        x_t, t = plain.inputs()
        with_label, without = unet(x_t, t, torch.tensor([3, 4])), unet(x_t, t, torch.tensor([10, 10]))
        assert not torch.equal(with_label, without)
        plain.take((1 - guidance) * without + guidance * with_label)
    assert torch.equal(guided.images(), plain.images())


# Pixels


def finished(x0: Tensor) -> Tensor:
    """The images whose x0 is predicted in the only step."""
    sampler = sampler_of(DiffusionSpec(objective="x0"), steps=1, clip="none")
    drawing = drawing_of(sampler, torch.arange(len(x0)), shape=tuple(x0.shape[1:]))
    drawing.take(x0)
    return drawing.images()


def test_pixels_undo_what_training_does_to_bytes_are_rounded_and_kept_in_range() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    x0 = Diffusion(DiffusionSpec(), 0, "cpu").prepare(pixels, torch.tensor([0]), flips=False)
    assert torch.equal(finished(x0), pixels)
    values = [-7.0, -1.0, -1.0 + 0.6 / 127.5, 0.1, 1.0 - 0.6 / 127.5, 1.0, float("inf"), float("nan")]
    assert finished(torch.tensor(values).reshape(1, 1, 2, 4)).flatten().tolist() == [0, 0, 1, 140, 254, 255, 255, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_part_of_a_drawing_reads_back_from_the_device(kind: str) -> None:
    # A tensor on the meta device has no values: anything that waits for one raises.
    index, labels = torch.arange(2, device="meta"), torch.arange(2, device="meta")
    images = drawn(drawing_of(sampler_of(**KINDS[kind]), index, labels=labels, guidance=3.0))
    assert images.shape == (2, *SHAPE) and images.dtype == torch.uint8 and images.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_on_cuda_neither_synchronises_nor_differs(kind: str) -> None:
    sampler, index, labels = sampler_of(**KINDS[kind]), torch.arange(4), torch.arange(4)
    on_cpu = drawn(drawing_of(sampler, index, labels=labels, guidance=3.0))
    index, labels = index.cuda(), labels.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_cuda = drawn(drawing_of(sampler, index, labels=labels, guidance=3.0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (on_cuda.cpu().int() - on_cpu.int()).abs().max() <= 1

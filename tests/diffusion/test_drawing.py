"""A drawn image is a function of seed, index and label alone, whoever asks the U-Net and in whatever batch."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpm_ds.data.latents import to_pixels
from ddpm_ds.diffusion.condition import Condition, Scale
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.diffusion.spec import DiffusionSpec
from ddpm_ds.ground import keyed
from ddpm_ds.ground.keyed import Stream
from tests.diffusion.sampling import EDM, FLOW, sample, sampler_of

SHAPE = (3, 6, 5)
NO_LABEL = 10
KINDS: dict[str, dict[str, Any]] = {
    "ddpm": {"kind": "ddpm", "steps": 6},
    "ddim": {"kind": "ddim", "steps": 6, "eta": 0.7},
    "dpm_solver": {"kind": "dpm_solver", "steps": 6, "clip": "dynamic"},
    "edm": {"kind": "ddpm", "steps": 6},
    "flow": {"kind": "ddpm", "steps": 6},
}


def drawn_by(kind: str, **values: Any) -> Sampler:
    """The sampler of that kind, with the process that it is for."""
    return sampler_of({"edm": EDM, "flow": FLOW}.get(kind), **KINDS[kind], **values)


def drawing_of(sampler: Sampler, index: Tensor, **values: Any) -> Drawing:
    defaults: dict[str, Any] = {"seed": 5, "shape": SHAPE, "labels": None, "no_label": NO_LABEL}
    return Drawing(sampler, index=index, **(defaults | values))


def unet(x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
    """A stand-in for a U-Net, whose prediction depends on all it is given.

    It is a multiple of 2^-8 below 1, so that guidance by 3 or a half is exact whatever the order of its operations.
    """
    label = torch.zeros_like(t) if labels is None else labels
    mixed = 0.8 * x_t + 1e-4 * t[:, None, None, None] + 0.05 * label[:, None, None, None]
    return mixed.clamp(-1.0, 1.0).mul(256).round() / 256


def pixels_of(drawing: Drawing) -> Tensor:
    """The finished images (N, C, H, W) as uint8 pixels."""
    return to_pixels(None)(drawing.images())


def drawn(drawing: Drawing) -> Tensor:
    for _ in range(drawing.calls):
        drawing.take(unet(*drawing.inputs()))
    return pixels_of(drawing)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_the_same_in_any_batch(kind: str, guidance: float) -> None:
    sampler = drawn_by(kind, guidance=guidance)
    index, labels = torch.tensor([7, 0, 123_456_789_012, 3, 9]), torch.tensor([1, 2, 3, 4, 10])
    whole = drawn(drawing_of(sampler, index, labels=labels))
    assert whole.shape == (5, *SHAPE) and whole.dtype == torch.uint8
    assert len(whole.unique(dim=0)) == 5 and whole.float().std() > 20
    for some in ([0], [4, 2], [3, 1, 0, 2, 4]):
        part = drawn(drawing_of(sampler, index[some], labels=labels[some]))
        # Logarithm and sine of the noise may be computed otherwise at the end of a vector: a byte more or less.
        assert (part.int() - whole[some].int()).abs().max() <= 1


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "dpm_solver"])
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
    found = pixels_of(drawing)
    assert not torch.equal(found, drawn(drawing_of(sampler, index, seed=6)))
    assert torch.equal(found, ((expected + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))


# Labels and guidance


def sigmas_of(process: str, steps: int) -> list[float]:
    """Noise over signal at each visit, from the papers: DDPM, eq. 4, and Karras et al. 2022, eq. 5."""
    if process == "ddpm":
        alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
        return [math.sqrt(1 / alpha_bar[1000 * (steps - number) // steps - 1] - 1) for number in range(steps)]
    high, low = 80 ** (1 / 7), 0.002 ** (1 / 7)
    return [round((high + number / (steps - 1) * (low - high)) ** 7, 12) for number in range(steps)]


@pytest.mark.parametrize("guidance", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("process", "between"), [("ddpm", (0.5, 3.0)), ("edm", (0.1, 20.0)), ("edm", (0.002, 80.0))])
def test_guidance_goes_from_the_prediction_without_label_through_that_with_it_within_its_interval(
    process: str, between: tuple[float, float], guidance: float
) -> None:
    """Kynkäänniemi et al. 2024: the weight is w at sigmas above the first and up to the second, and 1 elsewhere."""
    values: dict[str, Any] = {"kind": "ddim", "steps": 10}
    diffusion = EDM if process == "edm" else DiffusionSpec()
    sampler = sampler_of(diffusion, **values, guidance=guidance, guidance_between=between)
    index, labels, none = torch.arange(2), torch.tensor([3, 4]), torch.tensor([10, 10])
    guided, plain = drawing_of(sampler, index, labels=labels), drawing_of(sampler_of(diffusion, **values), index)
    weights = [guidance if between[0] < sigma <= between[1] else 1.0 for sigma in sigmas_of(process, 10)]
    assert set(weights) == {1.0, guidance} and len(weights) == guided.calls
    assert guided.evaluations == tuple(2 if weight in (0.5, 3.0) else 1 for weight in weights)
    assert sum(guided.evaluations) <= sampler.spec.evaluations_of(diffusion)
    for weight in weights:
        asked = guided.inputs()
        assert [len(part) for part in asked] == [4 if weight in (0.5, 3.0) else 2] * 3
        guided.take(unet(*asked))
        x_t, t = plain.inputs()
        plain.take(weight * unet(x_t, t, labels) + (1 - weight) * unet(x_t, t, none))
    assert torch.equal(pixels_of(guided), pixels_of(plain))


def test_noise_alone_counts_as_the_highest_level() -> None:
    assert [sampler_of(FLOW, steps=4, guidance=2.0, guidance_between=(low, 1e6)).guided for low in (0.0, 0.9, 4.0)] == [
        (True,) * 4,  # sigma is time / (1 - time) at 1, 3/4, 1/2 and 1/4
        (True, True, True, False),
        (True, False, False, False),
    ]


def worse(x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
    """Another U-Net that takes the same."""
    return unet(0.7 * x_t + 0.1, t, labels)


@pytest.mark.parametrize("guidance", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("labels", [None, torch.tensor([3, 4])], ids=["without classes", "classes"])
def test_another_u_net_guides_as_in_autoguidance_of_karras_et_al(labels: Tensor | None, guidance: float) -> None:
    """Karras et al. 2024: D_w = w D_1 + (1 - w) D_0, here in Euler's steps."""
    between = (0.05, 60.0)
    sampler = sampler_of(EDM, kind="ddim", steps=6, clip="none", guidance=guidance, guidance_between=between)
    index, asked = torch.arange(2), []

    def guide(*inputs: Tensor, context: Tensor | None) -> Tensor:
        asked.append(inputs)
        return worse(*inputs)

    drawing = drawing_of(sampler, index, labels=labels, guide=guide)
    found = drawn(drawing)
    sigmas = sigmas_of("edm", 6)
    inside = [between[0] < sigma <= between[1] for sigma in sigmas]
    assert len(asked) == sum(inside) == 4 and sum(drawing.evaluations) == 6 + 4
    assert all(len(inputs[0]) == 2 and (labels is None or inputs[2] is labels) for inputs in asked)

    def denoised(network: Callable[..., Tensor], x: Tensor, sigma: float) -> Tensor:
        root, t = math.sqrt(sigma**2 + 0.25), torch.full((2,), math.log(sigma) / 4)
        prediction = network((x / root).float(), t, labels).double()
        return 0.25 / root**2 * x - sigma * 0.5 / root * prediction  # c_skip x + c_out F, where F is -v

    def guided(x: Tensor, sigma: float) -> Tensor:
        weight = guidance if between[0] < sigma <= between[1] else 1.0
        return weight * denoised(unet, x, sigma) + (1 - weight) * denoised(worse, x, sigma)

    x = 80.0 * keyed.normal(5, Stream.SAMPLE, index, 3 * 6 * 5).reshape(2, *SHAPE).double()
    for sigma, end in pairwise(sigmas):
        x = x + (end - sigma) * (x - guided(x, sigma)) / sigma
    x = guided(x, sigmas[-1])  # the step to 0
    wanted = ((x + 1) * 127.5).round().clamp(0, 255)
    # predictions are rounded to steps of 2^-8 after float32's rounding of x, so that a few differ by a step
    assert ((found - wanted).abs() > 1).double().mean() < 0.02 and len(found.unique()) > 20


@pytest.mark.parametrize(("text", "image", "wanted"), [(7.5, 1.5, 16.5), (7.5, 1.0, 16.0), (1.0, 1.5, 3.5), (1, 0, 2)])
def test_a_text_and_an_image_guide_as_in_instruct_pix2pix(text: float, image: float, wanted: float) -> None:
    """Of the predictions 3 with both, 1 without text and 0 without both."""
    values: dict[str, Any] = {"guidance": text, "condition_guidance": image}
    sampler = sampler_of(DiffusionSpec(objective="x0"), kind="ddim", steps=1, clip="none", **values)
    given = [Condition(torch.full((2, 1, 6, 5), number), ()) for number in (3.0, 1.0, 0.0)]
    drawing = drawing_of(sampler, torch.arange(2), conditions=given)
    x, _ = drawing.inputs()
    count = sampler.spec.predictions
    assert len(x) == 2 * count == 2 * drawing.evaluations[0] and torch.equal(x[:2, :3], x[-2:, :3])
    drawing.take(x[:, 3:].expand(-1, 3, -1, -1))
    assert torch.equal(drawing.images(), torch.full((2, *SHAPE), wanted))


# Pixels


def finished(x0: Tensor) -> Tensor:
    """The images whose x0 is predicted in the only step."""
    sampler = sampler_of(DiffusionSpec(objective="x0"), steps=1, clip="none")
    drawing = drawing_of(sampler, torch.arange(len(x0)), shape=tuple(x0.shape[1:]))
    drawing.take(x0)
    return pixels_of(drawing)


def test_pixels_undo_what_training_does_to_bytes_are_rounded_and_kept_in_range() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    x0 = Scale().to_unit(pixels)
    assert torch.equal(finished(x0), pixels)
    values = [-7.0, -1.0, -1.0 + 0.6 / 127.5, 0.1, 1.0 - 0.6 / 127.5, 1.0, float("inf"), float("nan")]
    assert finished(torch.tensor(values).reshape(1, 1, 2, 4)).flatten().tolist() == [0, 0, 1, 140, 254, 255, 255, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_part_of_a_drawing_reads_back_from_the_device(kind: str) -> None:
    # A tensor on the meta device has no values: anything that waits for one raises.
    index, labels = torch.arange(2, device="meta"), torch.arange(2, device="meta")
    images = drawn(drawing_of(drawn_by(kind, guidance=3.0), index, labels=labels))
    assert images.shape == (2, *SHAPE) and images.dtype == torch.uint8 and images.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_on_cuda_neither_synchronises_nor_differs(kind: str) -> None:
    sampler, index, labels = drawn_by(kind, guidance=3.0), torch.arange(4), torch.arange(4)
    on_cpu = drawn(drawing_of(sampler, index, labels=labels))
    index, labels = index.cuda(), labels.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_cuda = drawn(drawing_of(sampler, index, labels=labels))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (on_cuda.cpu().int() - on_cpu.int()).abs().max() <= 1

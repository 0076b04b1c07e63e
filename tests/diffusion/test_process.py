"""The process draws by image, not by batch; its loss is the paper's; it never waits for a device."""

from itertools import permutations, product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ddpm_ds.diffusion.condition import Scale
from ddpm_ds.diffusion.levels import alpha_bars
from ddpm_ds.diffusion.process import Diffusion, mean_error, paired
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.ground.keyed import Stream
from ddpm_ds.schema.choices import SAMPLERS
from tests.launching import tiny_spec


def process(device: str = "cpu", seed: int = 0, **values: Any) -> Diffusion:
    return Diffusion(DiffusionSpec(**values), seed, device)


def prepared(diffusion: Diffusion, pixels: Tensor, index: Tensor, flips: bool, size: Any = None) -> Tensor:
    """x0 of images, with their own draws."""
    moves = diffusion.moves(diffusion.draws(index, pixels.shape), tuple(pixels.shape[2:]), size, flips)
    return Scale().to_unit(moves.of(pixels))


def drawn(diffusion: Diffusion, index: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """t and eps of images."""
    return diffusion.draw(diffusion.draws(index, shape), shape)


def images(count: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    return pixels, torch.arange(1_000_000, 1_000_000 + count)


def noisy(diffusion: Diffusion, count: int, flips: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x0, eps and t of images."""
    x0 = prepared(diffusion, *images(count), flips)
    t, eps = drawn(diffusion, images(count)[1], tuple(x0.shape))
    return x0, eps, t


def test_timesteps_are_drawn_from_a_range_without_its_end_and_so_are_those_of_the_held_out_loss() -> None:
    diffusion, index = process(timestep_range=(600, 604)), torch.arange(4000)
    t = drawn(diffusion, index, (4000, 1, 1, 1))[0]
    counts = t.bincount()
    # 1000 of each are expected: five standard deviations of a binomial
    assert len(counts) == 604 and counts[:600].sum() == 0
    assert (counts[600:] - 1000).abs().max() < 5 * (4000 * 3 / 16) ** 0.5
    assert [diffusion.levels.quantile(percent)[0] for percent in (10, 50, 90)] == [600, 601, 603]
    assert process().levels.quantile(50)[0] == 499
    for low, high in ((4, 4), (0, 1001)):
        with pytest.raises(ValueError, match=rf"_range = \[{low}, {high}\] should rise within 0 and .* = 1000"):
            tiny_spec(diffusion={"timestep_range": [low, high]})


@pytest.mark.parametrize("size", [None, (3, 3), (4, 2)])
def test_prepare_mirrors_half_of_the_images_or_of_their_crops_and_leaves_its_input_alone(
    size: tuple[int, int] | None,
) -> None:
    pixels, index = images(1000, size=4)
    before = pixels.clone()
    straight, flipped = (prepared(process(), pixels, index, flips, size) for flips in (False, True))
    mirrored = (flipped == straight.flip(-1)).flatten(1).all(1)
    kept = (flipped == straight).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 430 < mirrored.sum() < 570
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("stored", [(10, 10), (8, 16), (16, 8)])
def test_prepare_crops_each_image_at_a_place_of_its_own_and_all_places_alike(stored: tuple[int, int]) -> None:
    """Pixels say where they are, so that a crop says where it was cut."""
    rows, columns = torch.meshgrid(*map(torch.arange, stored), indexing="ij")
    pixels = torch.stack((rows, columns)).to(torch.uint8).expand(4000, 2, *stored)
    index = torch.arange(7, 4007)
    x0 = prepared(process(), pixels, index, False, (8, 8))
    crops = x0.add(1.0).mul(127.5).round().long()
    assert crops.shape == (4000, 2, 8, 8)
    top, left = crops[:, 0, :1, :1], crops[:, 1, :1, :1]  # (N, 1, 1)
    assert torch.equal(crops[:, 0], top + torch.arange(8)[:, None].expand(8, 8))
    assert torch.equal(crops[:, 1], left + torch.arange(8).expand(8, 8))
    counts = torch.bincount((top * (stored[1] - 7) + left).flatten(), minlength=9)
    assert len(counts) == 9 and counts.min() > 370 and counts.max() < 520  # of 444, five deviations
    again = prepared(process(objective="v"), pixels[:5], index[:5], False, (8, 8))
    assert torch.equal(again.add(1.0).mul(127.5).round().long(), crops[:5])
    assert not torch.equal(prepared(process(seed=1), pixels, index, False, (8, 8)), x0)


def test_loss_reads_its_tensors_as_they_lie() -> None:
    """Neither the loss nor its backward changes a layout: what would is a copy of a whole tensor."""
    diffusion = process(objective="v", weighting="min_snr")
    x0, eps, t = noisy(diffusion, 4, flips=True)
    prediction = torch.randn_like(x0).requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        diffusion.loss(prediction, x0, eps, t).backward()
    of_images = [event.name for event in seen.events() if event.input_shapes and prod(event.input_shapes[0]) == 768]
    assert "aten::mse_loss" in of_images and not {"aten::copy_", "aten::clone"} & set(of_images)


def test_draws_depend_on_the_seed_and_not_on_the_process_or_the_size_of_micro_batches() -> None:
    diffusion = process()
    pixels, index = images(12, size=11)
    shape = (12, 3, 8, 8)
    whole = prepared(diffusion, pixels, index, True, (8, 8)), *drawn(diffusion, index, shape)
    same, other = (drawn(process(seed=seed, objective="v", schedule="cosine"), index, shape) for seed in (0, 1))
    for one, alike, another in zip(whole[1:], same, other, strict=True):
        assert torch.equal(one, alike) and not torch.equal(one, another)
    assert torch.equal(*(prepared(diffusion, pixels, index, True, size) for size in ((11, 11), None)))
    for size in (1, 4, 5):
        parts = [
            (prepared(diffusion, some, at, True, (8, 8)), *drawn(diffusion, at, (len(at), 3, 8, 8)))
            for some, at in zip(pixels.split(size), index.split(size), strict=True)
        ]
        for one, many in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(many))


def test_noise_levels_are_as_exact_as_float32_allows() -> None:
    for schedule in ("linear", "cosine", "sigmoid"):
        diffusion = process(schedule=schedule, weighting="min_snr")
        level, alpha_bar = diffusion.level(torch.arange(1000)), alpha_bars(diffusion.spec)
        weight = diffusion.levels.weights(torch.arange(1000))
        assert {part.dtype for part in (level.signal, level.noise, weight)} == {torch.float32}
        assert level.signal.shape == level.noise.shape == (1000, 1, 1, 1)
        x_t = diffusion.noised(torch.ones(1000, 1, 2, 2), torch.arange(1000), torch.full((1000, 1, 2, 2), 2.0))
        assert torch.equal(x_t, (level.signal + 2.0 * level.noise).expand_as(x_t))
        for found, exact in ((level.signal, alpha_bar.sqrt()), (level.noise, (1 - alpha_bar).sqrt())):
            torch.testing.assert_close(found.flatten().double(), exact, rtol=2**-24, atol=0.0)


@pytest.mark.parametrize("loss", ["l1", "l2", "huber"])
def test_masked_elements_do_not_count_and_channels_have_their_weights(loss: str) -> None:
    """By hand, image by image: weights multiply errors, and the mean is over the elements that count."""
    generator = torch.Generator().manual_seed(2)
    prediction, x0, eps = (torch.randn(4, 3, 5, 6, generator=generator) for _ in range(3))
    t, channel_weights = torch.tensor([0, 5, 500, 999]), (0.5, 0.0, 3.0)
    mask = (torch.rand(4, 1, 5, 6, generator=generator) < 0.4).to(torch.uint8)
    mask[2] = 0
    spec: dict[str, Any] = {"loss": loss, "objective": "v", "weighting": "p2"}
    diffusion = process(**spec, channel_weights=channel_weights)
    errors = diffusion.errors(prediction, x0, eps, t).permute(0, 3, 1, 2).double()  # (N, C, H, W)
    for one in (mask, mask.expand(4, 3, 5, 6), (torch.rand(4, 3, 5, 6, generator=generator) < 0.4).to(torch.uint8)):
        expected, plain = [], []
        for image in range(4):
            counted = [
                (errors[image, channel, row, column].item(), channel_weights[channel])
                for channel, row, column in product(range(3), range(5), range(6))
                if one.expand(4, 3, 5, 6)[image, channel, row, column]
            ]
            count = max(len(counted), 1)
            expected.append(sum(error * weight for error, weight in counted) / count)
            plain.append(sum(error for error, _ in counted) / count)
        torch.testing.assert_close(mean_error(diffusion.errors(prediction, x0, eps, t), one), torch.tensor(plain))
        found = diffusion.loss(prediction.requires_grad_(), x0, eps, t, one)
        torch.testing.assert_close(found, (diffusion.levels.weights(t) * torch.tensor(expected)).mean())
        (gradient,) = torch.autograd.grad(found, prediction)
        assert gradient.isfinite().all() and (gradient[one.expand(4, 3, 5, 6) == 0] == 0.0).all()
        assert (gradient[:, 1] == 0.0).all(), "its weight is 0"
    ones = torch.ones(4, 1, 5, 6, dtype=torch.uint8)
    torch.testing.assert_close(
        process(**spec).loss(prediction, x0, eps, t, ones), process(**spec).loss(prediction, x0, eps, t)
    )
    by_channel = mean_error(diffusion.errors(prediction, x0, eps, t), mask, by_channel=True)
    torch.testing.assert_close(by_channel.mean(1), mean_error(diffusion.errors(prediction, x0, eps, t), mask))


def test_a_regression_is_the_squared_error_of_one_evaluation_without_noise() -> None:
    spec = DiffusionSpec(objective="regression")
    diffusion, (pixels, index) = Diffusion(spec, 0, "cpu"), images(5)
    draws = diffusion.draws(index, pixels.shape)
    x0 = Scale().to_unit(pixels)
    t, eps = diffusion.draw(draws, x0.shape)
    assert (t == 0.0).all() and (diffusion.noised(x0, t, eps) == 0.0).all()
    prediction = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(diffusion.loss(prediction, x0, eps, t), (prediction - x0).square().mean())
    for kind in SAMPLERS:
        sampler = SamplerSpec(kind=kind, clip="none")
        assert sampler.steps_of(spec) == sampler.evaluations_of(spec) == 1
        drawing = Drawing(Sampler(sampler, spec), seed=0, index=index, shape=(3, 8, 8), labels=None, no_label=None)
        assert drawing.calls == 1 and all((one == 0.0).all() for one in drawing.inputs())
        drawing.take(prediction)
        assert torch.equal(drawing.images(), prediction)


def test_perturbed_noise_is_keyed_by_the_image_and_a_share_wider() -> None:
    """Ning et al. 2023: x_t is made of eps + gamma xi, and eps alone is predicted."""
    diffusion = process(input_perturbation=0.1)
    index = torch.arange(1000)
    _, eps = drawn(diffusion, index, (1000, 3, 8, 8))
    seen = diffusion.perturbed(eps, index)
    more = (seen - eps) / 0.1
    count = more.numel()
    assert abs(more.mean()) < 5 * count**-0.5 and abs(more.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((more * eps).mean()) < 5 * count**-0.5, "it is independent of eps"
    assert torch.equal(diffusion.perturbed(eps[5:9], index[5:9]), seen[5:9])
    assert process().perturbed(eps, index) is eps
    assert torch.equal(process().loss(eps, eps, eps, index % 1000), diffusion.loss(eps, eps, eps, index % 1000))


@pytest.mark.parametrize("schedule", ["linear", "flow"])
def test_an_offset_is_one_keyed_normal_number_of_each_image_and_channel_in_the_noise_and_its_target(
    schedule: str,
) -> None:
    """As `--noise_offset` of diffusers' scripts."""
    plain, moved = (process(schedule=schedule, noise_offset=offset) for offset in (0.0, 0.1))
    index, shape = torch.arange(2000), (2000, 3, 2, 2)
    (t, eps), (t_beside, seen) = (drawn(one, index, shape) for one in (plain, moved))
    assert torch.equal(t, t_beside), "the other draws stay"
    offset = (seen - eps) / 0.1
    # Rounded where it is added to noise below 8, and once more in the difference, by 2^-22 at most each.
    torch.testing.assert_close(offset, offset[:, :, :1, :1].expand(shape), rtol=0.0, atol=4 * 2**-22 / 0.1)
    numbers = offset[:, :, 0, 0]
    assert abs(numbers.mean()) < 5 * numbers.numel() ** -0.5
    assert abs(numbers.var() - 1) < 5 * (2 / numbers.numel()) ** 0.5
    assert abs((numbers * eps[:, :, 0, 0]).mean()) < 5 * numbers.numel() ** -0.5, "they are independent of eps"
    assert torch.equal(drawn(moved, index[5:9], (4, *shape[1:]))[1], seen[5:9])


def test_images_take_the_noises_of_their_group_that_are_most_like_them() -> None:
    """As f2vae's `cosine_optimal_transport`, in groups."""
    latents, noises = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    assert noises[paired(latents, noises, 2)].tolist() == [[3.0, 0.0], [0.0, 2.0]]
    x0, eps = torch.randn(2, 12, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    found = paired(x0, eps, 4)
    cosines = F.cosine_similarity(x0.double().flatten(1)[:, None], eps.double().flatten(1), dim=2)
    for first in range(0, 12, 4):
        ways = {
            sum(float(cosines[first + i, first + j]) for i, j in enumerate(way)): way for way in permutations(range(4))
        }
        assert found[first : first + 4].tolist() == [first + place for place in ways[max(ways)]]
    assert torch.equal(paired(x0[4:8], eps[4:8], 4), found[4:8] - 4)
    assert torch.equal(paired(x0, eps, 1), torch.arange(12))


def test_pairs_of_latents_are_hardly_more_alike_than_others() -> None:
    """The cosine of 16 images with noise of 65,536 numbers, as docs/diffusion.md has it: 1.56 / 256."""
    x0, eps = torch.randn(2, 64, 65536, generator=torch.Generator().manual_seed(0))
    cosine = F.cosine_similarity(x0, eps[paired(x0, eps, 16)]).mean()
    # a deviation of 1 / 256 / 8 of the mean of 64, less the exchange: five of these
    assert abs(float(cosine) - 0.0061) < 5 / 256 / 8 / 4


@pytest.mark.parametrize("size", [(8, 8), (12, 5)])
def test_noise_of_coarser_sizes_is_added_as_sd_scripts_does_with_ratios_and_deviation_by_image(
    size: tuple[int, int],
) -> None:
    """sd-scripts' loop, written for one image, with the discount of Marigold, 0.9 t / 1000."""
    plain, coarse = process(noise_offset=0.1), process(noise_offset=0.1, multires_noise=0.9)
    index, shape = torch.arange(50), (50, 3, *size)
    (t, eps), (t_beside, found), draws = (
        drawn(plain, index, shape),
        drawn(coarse, index, shape),
        coarse.draws(index, shape),
    )
    assert torch.equal(t, t_beside), "the other draws stay"
    normal, uniform = draws.normal(Stream.MULTIRES).double(), draws.uniform(Stream.MULTIRES_RATIO).double()
    ratios = set()
    for image in range(len(index)):
        expected, first = eps[image].double(), 0
        for level in range(10):
            r, grid = 2 + 2 * float(uniform[image, level]), [max(1, side // 2**level) for side in size]
            rows, columns = (max(1, int(side / r**level)) for side in size)
            noise = normal[image, first : first + 3 * prod(grid)].view(1, 3, *grid)[:, :, :rows, :columns]
            larger = F.interpolate(noise, size, mode="bilinear", align_corners=False)[0]
            expected, first = expected + larger * (0.9 * float(t[image]) / 1000) ** level, first + 3 * prod(grid)
            ratios.add((level, rows))
            if min(rows, columns) == 1:
                break
        # the weights of an enlarged pixel are rounded by 2^-24 of a place below 12
        torch.testing.assert_close(found[image].double(), expected / expected.std(), rtol=1e-4, atol=1e-4)
    assert {rows for level, rows in ratios if level == 1} == {*range(size[0] // 4, size[0] // 2)}
    assert torch.equal(drawn(coarse, index[5:9], (4, *shape[1:]))[1], found[5:9]), "an image depends on no other"


def test_loss_is_ddpm_simple_loss_by_default_and_that_of_a_batch_is_the_mean_over_its_micro_batches() -> None:
    diffusion = process()
    x0, eps, t = noisy(diffusion, 12)
    prediction = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    loss = diffusion.loss(prediction, x0, eps, t)
    torch.testing.assert_close(loss, (prediction - eps).square().mean())
    parts = zip(*(whole.split(3) for whole in (prediction, x0, eps, t)), strict=True)
    torch.testing.assert_close(torch.stack([diffusion.loss(*part) for part in parts]).mean(), loss)


def test_labels_are_dropped_at_their_share_and_by_image() -> None:
    diffusion = process()
    index = torch.arange(20_000)
    labels = index % 10

    def kept(part: slice, share: float) -> Tensor:
        draws = diffusion.draws(index[part], (1, 1, 1, 1))
        return diffusion.drop_labels(labels[part], draws, share, none_label=10)

    dropped = kept(slice(None), 0.1)
    gone = dropped == 10
    assert 0.09 < gone.double().mean() < 0.11
    assert torch.equal(dropped[~gone], labels[~gone])
    assert torch.equal(dropped[7:9], kept(slice(7, 9), 0.1))
    assert torch.equal(kept(slice(None), 0.0), labels)

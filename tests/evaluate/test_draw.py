"""One batch of images, and the options that say how images are drawn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate.draw import add_sampler_options, draw, sampler_from
from ddpm_ds.evaluate.trained import Trained
from tests.evaluate.planted import trained_of
from tests.launching import tiny_spec

FAST = SamplerSpec(kind="ddim", steps=4, eta=1.0)
INDEX = torch.arange(6)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return trained_of(tiny_spec())


def images(trained: Trained, index: Tensor = INDEX, *, seed: int = 0, **sampler: Any) -> Tensor:
    return draw(trained, FAST.model_copy(update=sampler), index, labels=index % 10, seed=seed)


def most_apart(one: Tensor, other: Tensor) -> int:
    return int((one.int() - other.int()).abs().max())


def test_images_are_bytes_of_the_shape_that_was_trained(trained: Trained) -> None:
    drawn = images(trained)
    assert (drawn.shape, drawn.dtype) == ((6, 1, 8, 8), torch.uint8)
    assert drawn.float().std() > 20  # the U-Net's random weights give pictures, not a plain grey


def test_an_image_does_not_depend_on_its_batch(trained: Trained) -> None:
    together = images(trained)
    alone = torch.cat([images(trained, INDEX[i : i + 1]) for i in INDEX])
    assert most_apart(together, alone) <= 1
    assert most_apart(together.flip(0), images(trained, INDEX.flip(0))) <= 1
    assert most_apart(together[0], together[1]) > 50


def test_another_seed_another_image(trained: Trained) -> None:
    assert most_apart(images(trained), images(trained, seed=1)) > 50
    assert images(trained).equal(images(trained))


def test_labels_and_guidance_reach_the_u_net(trained: Trained) -> None:
    one, two = (draw(trained, FAST, INDEX, labels=torch.full_like(INDEX, label), seed=0) for label in (1, 2))
    assert not one.equal(two)
    assert not images(trained).equal(images(trained, guidance=3.0))
    no_label = draw(trained, FAST, INDEX, labels=None, seed=0)
    assert images(trained, guidance=0.0).equal(no_label) and not images(trained).equal(no_label)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_draws_nearly_the_same(trained: Trained, dtype: torch.dtype) -> None:
    half = images(trained_of(tiny_spec(), dtype=dtype))
    assert (half.float() - images(trained).float()).abs().mean() < 6


def test_each_step_is_told(trained: Trained) -> None:
    steps: list[int] = []
    draw(trained, FAST, INDEX[:1], labels=None, seed=0, after_step=steps.append)
    assert steps == [1, 2, 3, 4]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampler_options(parser)
    return parser.parse_args(arguments)


def made_of(run: SamplerSpec, *arguments: str, classes: int | None = 10) -> SamplerSpec:
    return sampler_from(options(arguments), run, timesteps=1000, classes=classes)


def test_without_flags_the_sampler_is_the_runs_own() -> None:
    run = SamplerSpec(kind="ddim", steps=7, eta=0.5, spacing="leading", clip="dynamic", guidance=2.0)
    assert made_of(run) == run
    assert made_of(run, "--sampler", "ddim") == run


def test_each_flag_changes_its_value() -> None:
    flags = ["--sampler", "ddpm", "--steps", "9", "--spacing", "linspace", "--variance", "small", "--clip", "none"]
    wanted = SamplerSpec(kind="ddpm", steps=9, spacing="linspace", variance="small", clip="none", guidance=0.0)
    assert made_of(SamplerSpec(), *flags, "--guidance", "0") == wanted
    assert made_of(SamplerSpec(kind="ddim"), "--eta", "0.25").eta == 0.25


def test_another_kind_begins_with_its_own_steps_and_no_noise() -> None:
    run = SamplerSpec(kind="ddim", steps=200, eta=1.0, guidance=2.0)
    changed = made_of(run, "--sampler", "dpm_solver")
    assert (changed.steps_of(1000), changed.eta, changed.guidance) == (20, 0.0, 2.0)
    assert made_of(run, "--sampler", "dpm_solver", "--steps", "5").steps == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "1001"], "--steps = 1001 is above the 1000 timesteps; use fewer"),
        (["--steps", "0"], "--steps 0: input should be greater than 0"),
        (["--eta", "0.5"], "--eta = 0.5 is of ddim, not of dpm_solver; use --sampler ddim or eta 0"),
        (["--sampler", "ddim", "--eta", "2"], "--eta 2.0: input should be less than or equal to 1"),
        (["--sampler", "ddim", "--eta", "nan"], "--eta nan: input should be a finite number"),
        (["--variance", "small"], "--variance is of ddpm, not of dpm_solver; leave it out or use --sampler ddpm"),
        (["--guidance", "2"], "--guidance = 2 needs a class-conditional U-Net; leave it at 1, or train one"),
    ],
)
def test_what_a_sampler_does_not_have_is_refused_in_words_of_the_flag(arguments: list[str], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        made_of(SamplerSpec(), *arguments, classes=None)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)

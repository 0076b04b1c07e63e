"""Samplers, which turn noise into images with one evaluation of the U-Net per step.

A step mixes x_t, the predicted clean image x0, the previous step's x0 and fresh noise. Samplers differ in the four
coefficients, which :data:`ddpm_ds.diffusion.choices.STEPS` computes in float64 from alpha_bar. An x_t whose standard
deviation is not 1 adds one factor. A :class:`Drawing` is the state of some unfinished images; any denoiser can drive
it, such as a pipeline of stages.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import assert_never

import torch
from torch import Tensor

from ddpm_ds.diffusion.choices import STEPS, TARGETS, Coefficients
from ddpm_ds.diffusion.condition import Condition
from ddpm_ds.diffusion.levels import levels_of
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.ground import keyed
from ddpm_ds.ground.keyed import Stream


class Sampler:
    """Immutable sampler of two specs that agree (:func:`ddpm_ds.diffusion.spec.check_sampler`).

    The step from the last visited noise level returns x0 itself, without noise.
    """

    def __init__(self, sampler: SamplerSpec, diffusion: DiffusionSpec) -> None:
        self.spec = sampler
        self._to_x0 = TARGETS[diffusion.objective].to_x0
        levels = levels_of(diffusion)
        # A float64 scalar keeps float32 images float32, and on the CPU it makes no device wait.
        self.visits = levels.visits(sampler)
        """Where the U-Net is evaluated, from noise to image."""
        self.times = tuple(visit.t for visit in self.visits)
        """The U-Net's input t there: falling timesteps, or functions of the noise level."""
        self.t_dtype = levels.dtype
        self.first_noise = float(self.visits[0].level.noise) if self.t_dtype.is_floating_point else 1.0
        """Factor of the standard normal noise with which sampling begins; the last timestep counts as pure noise."""
        self.guided = tuple(sampler.guides_at(visit.sigma) for visit in self.visits)
        """Whether images are guided at each visit."""
        parts = STEPS[sampler.kind].coefficients(sampler, [visit.alpha_bar for visit in self.visits])
        self._coefficients = [
            Coefficients(part.x_t * there.size / here.size, *(factor * there.size for factor in part[1:]))
            for part, (here, there) in zip(parts, pairwise(self.visits), strict=True)
        ]

    def needs_noise(self, number: int) -> bool:
        """Return whether step `number` adds noise; the last one never does."""
        return number < len(self._coefficients) and self._coefficients[number].noise > 0.0

    def step(
        self, number: int, x_t: Tensor, prediction: Tensor, *, noise: Tensor | None, previous_x0: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return x after visit ``number`` (after the last, the image), and the clipped prediction x0 of the image,
        which is the next step's ``previous_x0``.

        ``x_t``, its ``prediction`` by the U-Net (of any float dtype), standard normal ``noise`` (used only if
        :meth:`needs_noise`) and ``previous_x0`` (of the step before; None at the first) are (N, C, H, W). The results
        have the dtype of ``x_t``.
        """
        x0 = self._clipped(self._to_x0(prediction.to(x_t.dtype), x_t, self.visits[number].level))
        if number == len(self._coefficients):
            return x0, x0
        part = self._coefficients[number]
        x = part.x_t * x_t + part.x0 * x0
        if part.previous_x0:
            assert previous_x0 is not None
            x = x + part.previous_x0 * previous_x0
        if part.noise:
            assert noise is not None
            x = x + part.noise * noise
        return x, x0

    def _clipped(self, x0: Tensor) -> Tensor:
        """Return x0, clipped as the spec says. Dynamic clipping: Imagen (Saharia et al. 2022), section 2.3."""
        match self.spec.clip:
            case "none":
                return x0
            case "static":
                return x0.clamp(-1.0, 1.0)
            case "dynamic":
                # Equal to torch.quantile, which refuses more than 2^24 pixels in older versions.
                magnitudes = x0.abs().flatten(1).sort(dim=1).values  # (N, C x H x W)
                place = self.spec.dynamic_quantile * (magnitudes.shape[1] - 1)
                below, above = magnitudes[:, math.floor(place)], magnitudes[:, math.ceil(place)]
                bound = torch.lerp(below, above, place % 1.0).clamp(min=1.0)[:, None, None, None]  # (N, 1, 1, 1)
                return x0.clamp(-bound, bound) / bound
            case unknown:
                assert_never(unknown)


class Drawing:
    """Images being sampled: pass :meth:`inputs` to the U-Net and its prediction to :meth:`take`, `calls` times.

    All noise is a function of (seed, image index), so an image doesn't depend on its batch. Everything stays on the
    device of `index`, and nothing waits for it. Call the U-Net under ``torch.no_grad``.

    With guidance w the prediction becomes other + w (prediction - other), for any objective: x0 is linear in the
    prediction, so it is mixed alike. The other prediction is the U-Net's own without the label (Ho and Salimans 2022,
    eq. 6, whose w is ours - 1), or the prediction of `guide`, another U-Net with the same arguments, for the same
    labels (Karras et al. 2024, "Guiding a diffusion model with a bad version of itself"). Visits without guidance don't
    compute it; without a guide, w = 0 computes it alone. Guidance at some of the visits: Kynkäänniemi et al. 2024,
    "Applying guidance in a limited interval". With a guidance of the condition, v, it becomes neither + w (prediction -
    other) + v (other - neither), where the last has neither text nor condition (Brooks et al. 2023, InstructPix2Pix).

    `index` (N,) int64 are the image numbers, `shape` is (C, H, W), and `labels` (N,) int64 are on the same device, or
    None without classes or for "no label", whose number is `no_label`. `conditions` has the U-Net's other inputs, then
    those of a dropped condition, which guides images with a text or without labels, then those with neither.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        seed: int,
        index: Tensor,
        shape: tuple[int, int, int],
        labels: Tensor | None = None,
        no_label: int | None = None,
        conditions: Sequence[Condition | None] = (None,),
        guide: Callable[..., Tensor] | None = None,
    ) -> None:
        condition, *dropped = conditions
        self.calls = len(sampler.times)
        """Number of predictions to take."""
        self._sampler, self._seed, self._index, self._shape = sampler, seed, index, shape
        self._guide, self._guidance = guide, sampler.spec.guidance
        self._given = _given(labels, condition)  # of N images
        without: list[Condition] = []
        if guide is None and any(sampler.guided):
            without = [_given(labels, one) for one in dropped if one is not None]
            if labels is not None and not (without and without[0].context is not None):
                assert no_label is not None
                without = [_given(torch.full_like(labels, no_label), condition)]
        self._mixed = sampler.spec.predictions if without else 1
        given = [self._given, *without]
        given = given[: self._mixed] if self._mixed > 1 else given[1:2] or given
        self._guided_given = functools.reduce(Condition.followed_by, given)
        each = self._mixed if guide is None else 2
        self.evaluations = tuple(each if guided else 1 for guided in sampler.guided)
        """Evaluations of U-Nets per image at each call, the guide's among them."""
        self._x = sampler.first_noise * self._noise(Stream.SAMPLE)  # (N, C, H, W)
        self._x0: Tensor | None = None
        self._taken = 0

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the next inputs of the U-Net: x_t (M, C, H, W) float32 with its condition's channels, t (M,) and, with
        labels, labels (M,) int64, then a condition's level and vector.

        M is N, or 2 N or 3 N if the U-Net guides itself: all images with their labels or conditions, then all without.
        """
        guided = self._sampler.guided[self._taken]
        given = self._guided_given if guided else self._given
        x_t = torch.cat([self._x] * self._mixed) if guided and self._mixed > 1 else self._x
        time, dtype = self._sampler.times[self._taken], self._sampler.t_dtype
        t = torch.full((len(x_t),), time, dtype=dtype, device=x_t.device)
        if given.channels.shape[1]:
            x_t = torch.cat((x_t, given.channels), dim=1)
        return (x_t, t, *given.others)

    def context(self, number: int) -> Tensor | None:
        """Return the encoded text that the U-Net reads at visit ``number``, (M, tokens, channels); None without."""
        return (self._guided_given if self._sampler.guided[number] else self._given).context

    def take(self, prediction: Tensor) -> None:
        """Advance by the prediction for :meth:`inputs`, (M, C, H, W) of any float dtype."""
        sampler, number = self._sampler, self._taken
        prediction = prediction.float()
        if (count := self.evaluations[number]) > 1:
            if self._guide is None:
                prediction, *others = prediction.chunk(count)
            else:
                others = [self._guide(*self.inputs(), context=self.context(number)).float()]
            towards = self._guidance * (prediction - others[0])
            if count == 3:
                towards = towards + sampler.spec.condition_guidance * (others[0] - others[1])
            prediction = others[-1] + towards  # (N, C, H, W)
        needed = sampler.needs_noise(number)
        noise = self._noise(sampler.visits[number].stream) if needed else None
        self._x, self._x0 = sampler.step(number, self._x, prediction, noise=noise, previous_x0=self._x0)
        self._taken += 1

    def images(self) -> Tensor:
        """Return the finished images, (N, C, H, W) float32 on the U-Net's scale."""
        assert self._taken == self.calls, f"{self.calls - self._taken} of {self.calls} predictions are still to take"
        return self._x

    def _noise(self, stream: int) -> Tensor:
        """Return standard normal noise of each image, (N, C, H, W) float32."""
        return keyed.normal(self._seed, stream, self._index, math.prod(self._shape)).unflatten(1, self._shape)


def _given(labels: Tensor | None, condition: Condition | None) -> Condition:
    """Return the U-Net's inputs beside x_t and t: labels come first."""
    condition = Condition(torch.empty(0, 0), ()) if condition is None else condition
    return condition if labels is None else condition._replace(others=(labels, *condition.others))

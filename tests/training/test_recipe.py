"""A step on text is that of diffusers' ``train_text_to_image_sdxl.py``, written as a plain loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.text import Encoded
from ddpm_ds.evaluate.diffusers.scheduler import scheduler_config
from ddpm_ds.evaluate.diffusers.unet import from_diffusers, to_diffusers
from ddpm_ds.evaluate.diffusers.unet_config import diffusers_config
from ddpm_ds.training.objective import Denoising
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from tests.launching import tiny_spec
from tests.unet.variants import randomise

diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")

CPU, IMAGES, TOKENS, WIDTH, POOLED, RATE = torch.device("cpu"), 8, 7, 12, 10, 1e-4
STABLE = {"schedule": "scaled_linear"}
PROCESSES: dict[str, dict[str, Any]] = {
    "eps": STABLE,
    "eps, min-SNR and an offset": {**STABLE, "weighting": "min_snr", "noise_offset": 0.1},
    "v, min-SNR": {**STABLE, "objective": "v", "weighting": "min_snr"},
    "v from noise alone": {**STABLE, "objective": "v", "weighting": "min_snr", "zero_terminal_snr": True},
    "eps, debiased": {**STABLE, "weighting": "p2", "p2_k": 1e-6, "p2_gamma": 0.5},
    "v, as Diff2Flow": {**STABLE, "objective": "v", "weighting": "diff2flow"},
    "flow": {"schedule": "flow", "objective": "velocity"},
    "flow, uniform and shifted": {"schedule": "flow", "objective": "velocity", "times": "uniform", "shift": 3.5},
}


def spec_of(process: dict[str, Any]) -> RunSpec:
    """A small U-Net of SDXL's kind on latents."""
    text = {"context_channels": WIDTH, "tokens": TOKENS, "blocks": [0, 2], "heads": [1, 2], "middle_blocks": 2}
    text |= {"pooled_channels": POOLED, "size_channels": 8}
    latents = {"source": "folder", "path": "pictures", "channels": 4, "autoencoder": "vae", "horizontal_flips": False}
    return tiny_spec(
        data={**latents, "text": {"encoders": "sdxl", "drop": 0.0, "drop_to": "zeros"}},
        unet={"classes": None, "attention_resolutions": [], "dropout": 0.0, "text": text},
        diffusion=process,
        sampler={"clip": "none"},
        train={"label_drop": 0.0},
    )


def batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    return MicroBatch(
        images=torch.randn(IMAGES, 4, 8, 8, generator=generator).half(),
        labels=torch.zeros(IMAGES, dtype=torch.int64),
        index=torch.arange(100, 100 + IMAGES),
        text=torch.randn(IMAGES, TOKENS, WIDTH, generator=generator).half(),
        pooled=torch.randn(IMAGES, POOLED, generator=generator).half(),
        sizes=torch.randint(0, 32, (IMAGES, 6), generator=generator).float(),
    )


@pytest.mark.parametrize("name", PROCESSES)
def test_a_step_is_that_of_diffusers_recipe_on_the_same_latents_text_times_and_noise(name: str) -> None:
    spec, read = spec_of(PROCESSES[name]), batch()
    layers = unet_layers(spec.unet, spec.data.interface)
    theirs: Any = diffusers.UNet2DConditionModel.from_config(diffusers_config(spec.unet, spec.data.interface))
    randomise(theirs, 1)
    ours = UNet(layers, 0)
    ours.layers.load_state_dict(from_diffusers(theirs.state_dict(), layers))
    empty = Encoded(torch.zeros(1, TOKENS, WIDTH), torch.zeros(1, POOLED))
    objective = Denoising(spec, CPU, empty=empty)
    prepared = objective.prepare(read)

    mine = torch.optim.AdamW(ours.parameters(), lr=RATE, weight_decay=1e-2)
    loss = objective.loss(ours(*objective.inputs(prepared), context=objective.context(read)), prepared)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    mine.step()

    optimizer = torch.optim.AdamW(theirs.parameters(), lr=RATE, weight_decay=1e-2)
    assert read.text is not None and read.pooled is not None and read.sizes is not None
    latents, noise, timesteps = read.images.float(), prepared.eps, prepared.t
    if name.startswith("flow"):
        sigma = (timesteps / 1000)[:, None, None, None]
        noisy, target = (1 - sigma) * latents + sigma * noise, noise - latents
        weights = torch.ones(IMAGES)
    else:
        scheduler: Any = diffusers.DDPMScheduler(**scheduler_config(spec.diffusion, spec.sampler))
        noisy, target = scheduler.add_noise(latents, noise, timesteps), noise
        weights = torch.ones(IMAGES)
        is_v = scheduler.config.prediction_type == "v_prediction"
        if is_v:
            target = scheduler.get_velocity(latents, noise, timesteps)
        snr = diffusers.training_utils.compute_snr(scheduler, timesteps)
        if spec.diffusion.weighting == "p2":  # sd-scripts' debiased estimation
            weights = snr.rsqrt()
        if spec.diffusion.weighting == "diff2flow":
            weights = (scheduler.alphas_cumprod.sqrt() + (1 - scheduler.alphas_cumprod).sqrt())[timesteps].square()
        if spec.diffusion.weighting == "min_snr":
            weights = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / (snr + 1 if is_v else snr)
    added = {"text_embeds": read.pooled.float(), "time_ids": read.sizes}
    predicted = theirs(noisy, timesteps, read.text.float(), added_cond_kwargs=added).sample
    errors = F.mse_loss(predicted.float(), target.float(), reduction="none")
    expected = (errors.mean(dim=(1, 2, 3)) * weights).mean()
    expected.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    optimizer.step()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)  # diffusers keeps alpha_bar in fp32
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    compared, alike = 0, 0
    for key, found in to_diffusers(ours.layers.state_dict(), layers).items():
        gradient, there = gradients[key], theirs.state_dict()[key]
        assert gradient is not None
        assert (found.view_as(there) - there).abs().max() <= 2.01 * RATE, "Adam's first step is the rate at most"
        # What is left of a gradient that vanishes, such as that of a bias before a normalisation, is rounding.
        alive = gradient.abs() > 1e-6
        compared += int(alive.sum())
        alike += int(((found.view_as(there) - there).abs() <= 0.02 * RATE)[alive].sum())
    assert compared > 0.8 * sum(parameter.numel() for parameter in theirs.parameters())
    assert alike > 0.999 * compared

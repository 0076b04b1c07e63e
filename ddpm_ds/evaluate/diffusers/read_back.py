"""Comparison of a written pipeline with the U-Net it was made from, by diffusers, if it is installed."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpm_ds.diffusion.choices import FLOW_TIMES, TARGETS
from ddpm_ds.diffusion.condition import LEVEL_SCALE
from ddpm_ds.diffusion.levels import alpha_bars, levels_of
from ddpm_ds.evaluate.diffusers.scheduler import scheduler_class
from ddpm_ds.evaluate.diffusers.unet_config import class_of
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.ground.errors import OutputError
from ddpm_ds.schema.choices import SCHEDULES
from ddpm_ds.unet.layers import SIZES

TOLERANCE = 1e-5
"""Maximum difference of predictions, relative to the largest value, and of alpha_bar or denoised images; diffusers
computes its schedule in fp32."""
COMPARED_TIMESTEPS = 32
"""Number of timesteps, from 0, whose predictions are compared. Both sides compute t x frequency in fp32, and at
t = 1000 its rounding error is 1e-5.
"""


@torch.no_grad()
def check_in_diffusers(trained: Trained, folder: Path) -> str:
    """Compare the U-Net and scheduler that diffusers reads from a written pipeline with ours, in fp64 on the CPU.

    Returns a line with the differences, or about diffusers that is missing. Raises OutputError: they differ.
    """
    if importlib.util.find_spec("diffusers") is None:
        return "not read back, because diffusers is not installed (pip install diffusers)"
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    generator, text = torch.Generator().manual_seed(0), trained.unet_spec.text
    unet, scheduler = (
        getattr(diffusers, kind).from_pretrained(folder / part, local_files_only=True, **options)
        for part, kind, options in (
            ("unet", class_of(trained.unet_spec), {"low_cpu_mem_usage": False}),
            ("scheduler", scheduler_class(trained.diffusion, text=text is not None), {}),
        )
    )
    channels = trained.interface.channels + trained.interface.condition_channels
    # Of text the smallest images will do, since nothing depends on their size, and its U-Nets are large.
    size = trained.interface.size if text is None else (2 ** len(trained.unet_spec.multipliers),) * 2
    given = torch.randn(4, channels, *size, generator=generator, dtype=torch.float64)
    x_t = given[:, : trained.interface.channels]
    if SCHEDULES[trained.diffusion.schedule].continuous and trained.diffusion.schedule != "flow":
        t = torch.randn(4, generator=generator)
    else:
        t = torch.randint(0, min(trained.diffusion.timesteps, COMPARED_TIMESTEPS), (4,), generator=generator)
    others, context = dict[str, Any](), None
    if (classes := trained.unet_spec.classes) is not None:
        others["class_labels"] = torch.randint(0, classes + 1, (4,), generator=generator)
    if trained.interface.condition_level:
        others["class_labels"] = LEVEL_SCALE * torch.rand(4, generator=generator)
    inputs = [given, t, *others.values()]
    if text is not None:
        context = torch.randn(4, text.tokens, text.context_channels, generator=generator, dtype=torch.float64)
        others["encoder_hidden_states"] = context
        if text.pooled_channels is not None:
            pooled = torch.randn(4, text.pooled_channels, generator=generator, dtype=torch.float64)
            sizes = torch.randint(0, COMPARED_TIMESTEPS, (4, SIZES), generator=generator).double()
            inputs.append(torch.cat((pooled, sizes), dim=1))
            others["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": sizes}
    unet.double().time_proj.register_forward_hook(lambda *of_call: of_call[-1].double())  # which it forgets for labels
    theirs = unet(given, t, **others).sample
    del unet  # before ours is widened as well
    ours = copy.deepcopy(trained.unet).double()(*inputs, context=context)
    prediction = ((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30)).item()
    schedule, compared = _schedule_difference(trained, scheduler, x_t, t, ours)
    # Not written with "greater than", which is false for NaN.
    if not (prediction <= TOLERANCE and schedule <= TOLERANCE):
        raise OutputError(
            f"diffusers {diffusers.__version__} reads something else than {trained.origin}: predictions differ by "
            f"{prediction:.1e} of the largest, {compared} by {schedule:.1e}; nothing was written, please report it"
        )
    return (
        f"read back by diffusers {diffusers.__version__}: its predictions for random images are ours within "
        f"{prediction:.0e} of the largest, its {compared} within {schedule:.0e}"
    )


def _schedule_difference(
    trained: Trained, scheduler: Any, x_t: Tensor, t: Tensor, prediction: Tensor
) -> tuple[float, str]:
    """Return how much diffusers' noise levels differ from ours, and the name of the quantity that was compared."""
    spec = trained.diffusion
    if not SCHEDULES[spec.schedule].continuous:
        return (scheduler.alphas_cumprod.double() - alpha_bars(spec)).abs().max().item(), "alphas_cumprod"
    if spec.schedule == "flow":
        scheduler.set_timesteps(4)
        scheduler._init_step_index(scheduler.timesteps[1])
        level = levels_of(spec).level(FLOW_TIMES * scheduler.sigmas[1:2].double()).each()
        theirs = scheduler.convert_model_output(prediction, sample=x_t)
    else:
        level = levels_of(spec).level(t.double()).each()
        theirs = scheduler.precondition_outputs(x_t / level.signal, prediction, level.noise / level.signal)
    ours = TARGETS[spec.objective].to_x0(prediction, x_t, level)
    return ((ours - theirs).abs().max() / ours.abs().max()).item(), "denoised images"

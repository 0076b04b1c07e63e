"""The rows of ``--one-device``, what each switches on, and how much is measured. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ONE_DEVICE_ROWS = {
    "diffusers": "diffusers' UNet2DModel in a plain PyTorch loop, autocast, AdamW",
    "diffusers-compiled": "the same under torch.compile",
    "plain": "ours in a plain loop with nothing switched on: contiguous, PyTorch's kernels, eager, AdamW not fused",
    "channels-last": "ours with channels-last alone",
    "fused-kernels": "ours with fused normalisation, and channels-last, which its kernels need",
    "compile": "ours with each layer compiled alone",
    "fused-adamw": "ours with PyTorch's fused AdamW alone",
    "all": "ours with every switch that this device has",
    "bare": "ours in a plain loop with what the engine switches on under this JSON",
    "engine": "this project's pipeline engine with one stage, under this JSON",
    "lucidrains": "denoising-diffusion-pytorch's Unet, dim 64, multipliers 1-2-4, of 2023, autocast, AdamW",
    "ours-dim64": "ours of launch/specs/cifar10_dim64.yaml, with every switch but compile",
}
"""Names and meanings, in the table's order."""
OTHER_UNETS = ("lucidrains", "ours-dim64")
"""U-Nets of their own, to be compared with each other alone."""
COMPILED = ("diffusers-compiled", "compile")
CPU_IMAGES = 8
"""Of a step on a CPU, where nothing else is asked for."""
LEAST_ROUNDS, ROUNDS = 3, 5
MOST_STEPS = 20
TIMED_SECONDS = 120.0
"""What all rounds together may take where their number, or that of their steps, is left open."""


@dataclass(frozen=True)
class Switches:
    """What can be switched on in our U-Net and its optimizer."""

    channels_last: bool = False
    fused_kernels: bool = False
    """Needs channels-last."""
    fused_masks: bool = False
    """Part of the fused kernels."""
    compiled: bool = False
    fused_adamw: bool = False

    def __str__(self) -> str:
        names = {
            "channels-last": self.channels_last,
            "fused kernels": self.fused_kernels,
            "fused masks": self.fused_masks,
            "compiled": self.compiled,
            "fused AdamW": self.fused_adamw,
        }
        return ", ".join(name for name, on in names.items() if on) or "nothing switched on"


ONE_SWITCH = {
    "plain": Switches(),
    "channels-last": Switches(channels_last=True),
    "fused-kernels": Switches(channels_last=True, fused_kernels=True),
    "compile": Switches(compiled=True),
    "fused-adamw": Switches(fused_adamw=True),
}


def groups(names: Sequence[str]) -> list[list[str]]:
    """Rows that are compared with each other, the first of each group being what the others are compared to."""
    same = [name for name in names if name not in OTHER_UNETS]
    other = [name for name in names if name in OTHER_UNETS]
    return [group for group in (same, other) if group]


def rounds_and_steps(rounds: int | None, steps: int | None, seconds: float) -> tuple[int, int]:
    """Rounds, and steps of each row in a round, as asked or as time allows; one step of all rows takes ``seconds``."""
    affordable = TIMED_SECONDS / seconds
    if rounds is None:
        rounds = max(LEAST_ROUNDS, min(ROUNDS, int(affordable / (steps or 1))))
    if steps is None:
        steps = max(1, min(MOST_STEPS, int(affordable / rounds)))
    return rounds, steps

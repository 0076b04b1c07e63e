"""Rows held to the same outputs before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ddpm_ds.errors import BadNumbersError
from rivals.loops import UnetProbe
from rivals.measure import LOSS_TOLERANCE

TF32_TOLERANCE = 1e-2
"""Relative, for fp32 on a GPU whose convolutions round their factors to TF32's 10 bits."""


@dataclass(frozen=True)
class Difference:
    """From the first row of the same U-Net, relative."""

    prediction: float
    """Norm of the difference over the norm."""
    loss: float
    gradient_norm: float


def tolerance(precision: str, device: torch.device) -> float:
    """Relative difference that rounding explains: what losses are allowed, and TF32's where fp32 is rounded to it."""
    rounded = precision == "fp32" and device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return TF32_TOLERANCE if rounded else LOSS_TOLERANCE[precision]


def difference(probe: UnetProbe, reference: UnetProbe) -> Difference:
    """Of two rows that have seen the same micro-batch."""
    apart = (probe.prediction - reference.prediction).norm() / reference.prediction.norm()
    return Difference(
        float(apart),
        abs(probe.loss - reference.loss) / abs(reference.loss),
        abs(probe.gradient_norm - reference.gradient_norm) / abs(reference.gradient_norm),
    )


def check_probes(probes: Mapping[str, UnetProbe], allowed: float) -> dict[str, Difference]:
    """Each row's difference from the first one.

    Raises:
        BadNumbersError: a row does not compute the same; its time would mean nothing.
    """
    first = next(iter(probes), "")
    found = {name: difference(probe, probes[first]) for name, probe in probes.items()}
    for name, apart in found.items():
        for what, value in (
            ("prediction", apart.prediction),
            ("loss", apart.loss),
            ("gradients' norm", apart.gradient_norm),
        ):
            if not value <= allowed:  # NaN differs too
                raise BadNumbersError(
                    f"{what} of {name} differs from that of {first} by {value:.2g} (relative; rounding explains "
                    f"{allowed:g}): they don't compute the same, so nothing is timed"
                )
    return found

"""Comparison of rows: first that they compute the same, then their times, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ddpm_ds.errors import BadNumbersError
from rivals.loops import Probe

LOSS_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative difference that rounding explains, by precision. Over 50 steps of the digits it was seen to make 1e-7, 3e-4
and 1e-3."""
TF32_TOLERANCE = 1e-2
"""The same for fp32 on a GPU whose convolutions round their factors to TF32's 10 bits."""


def check_losses(names: Sequence[str], losses: Sequence[Sequence[float]], tolerance: float) -> list[float]:
    """Return each row's largest relative difference from the first row's loss; ``losses`` are by row and step.

    Raises:
        BadNumbersError: a row does not train the same; its time would mean nothing.
    """
    largest = []
    for name, own in zip(names, losses, strict=True):
        differences = [abs(loss - other) / abs(other) for loss, other in zip(own, losses[0], strict=True)]
        step = next((step for step, value in enumerate(differences) if not value <= tolerance), None)  # or NaN
        if step is not None:
            raise BadNumbersError(
                f"loss {own[step]:.6g} in step {step} of {name}, where {names[0]} has {losses[0][step]:.6g}: they "
                f"don't train the same, so nothing is timed; where fp16 skipped a step, try a lower "
                f"fp16.initial_scale_power"
            )
        largest.append(max(differences))
    return largest


def tolerance(precision: str, device: torch.device) -> float:
    """Return the relative difference that rounding explains on a device."""
    rounded = precision == "fp32" and device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return TF32_TOLERANCE if rounded else LOSS_TOLERANCE[precision]


def check_probe(name: str, probe: Probe, first: str, reference: Probe, allowed: float) -> dict[str, float]:
    """Return the relative differences of row ``name`` from row ``first``, which has seen the same micro-batch.

    "prediction" is the norm of the difference over the norm; the others are "loss" and "gradients' norm".

    Raises:
        BadNumbersError: the row does not compute the same; its time would mean nothing.
    """
    differences = {
        "prediction": float((probe.prediction - reference.prediction).norm() / reference.prediction.norm()),
        "loss": abs(probe.loss - reference.loss) / abs(reference.loss),
        "gradients' norm": abs(probe.gradient_norm - reference.gradient_norm) / abs(reference.gradient_norm),
    }
    for what, value in differences.items():
        if not value <= allowed:  # NaN differs too
            raise BadNumbersError(
                f"{what} of {name} differs from that of {first} by {value:.2g} (relative; rounding explains "
                f"{allowed:g}): they don't compute the same, so nothing is timed"
            )
    return differences


def time_rounds(
    steps: Sequence[Callable[[], object]],
    rounds: int,
    steps_per_round: int,
    synchronize: Callable[[], object],
    after_round: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return the seconds of each kind of step in each round: ``[step][round]``. Each round begins with another one.

    ``synchronize`` waits until this process's device and all other processes have done what they were given.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for turn in range(len(steps)):
            which = (number + turn) % len(steps)
            synchronize()
            begin = clock()
            for _ in range(steps_per_round):
                steps[which]()
            synchronize()
            seconds[which].append((clock() - begin) / steps_per_round)
        after_round()
    return seconds


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the seconds of one row over those of another, round by round."""
    return [own / other for own, other in zip(seconds, reference, strict=True)]

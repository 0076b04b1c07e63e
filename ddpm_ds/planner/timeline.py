"""A simulated step as a picture."""

from __future__ import annotations

from pathlib import Path

from ddpm_ds.observe.drawing import draw_step
from ddpm_ds.pipeline.simulate import Simulation


def draw_timeline(simulation: Simulation, title: str, path: Path) -> None:
    """Write the step as a PNG, in the colours of measured ones. Its events must have been kept."""
    seconds = simulation.step_seconds
    names = [f"rank {rank}" for rank in range(len(simulation.events))]
    title = f"{title}\n{1e3 * seconds:,.4g} ms, bubble {simulation.bubble:.1%}"
    draw_step(simulation.events, seconds, names, title, path)

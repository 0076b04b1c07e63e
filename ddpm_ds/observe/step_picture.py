"""One of the traced steps as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpm_ds.observe.alignment import WAIT_FOR_RANKS
from ddpm_ds.observe.drawing import draw_step
from ddpm_ds.observe.recording import RankTrace
from ddpm_ds.observe.trace_files import rank_name

WAITS = ("RecvActivation", "RecvGrad", WAIT_FOR_RANKS)


def draw_median_step(ranks: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write the step of median length of aligned traces as a PNG."""
    steps = sorted(range(len(ranks[0].steps)), key=lambda step: ranks[0].steps[step].end - ranks[0].steps[step].start)
    chosen = [trace.steps[steps[(len(steps) - 1) // 2]] for trace in ranks]
    start = min(step.start for step in chosen)
    seconds = max(step.end for step in chosen) - start
    rows = [
        [event._replace(start=event.start - start, end=event.end - start) for event in step.events] for step in chosen
    ]
    waited = sum(event.end - event.start for events in rows for event in events if event.instruction in WAITS)
    bubble = waited / sum(step.end - step.start for step in chosen)
    title = f"step {chosen[0].number}: {title}\n{1e3 * seconds:,.4g} ms, bubble {bubble:.1%}"
    draw_step(rows, seconds, [rank_name(trace, ranks) for trace in ranks], title, path)

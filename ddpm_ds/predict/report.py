"""What a search found, as text: the fastest layouts, the first one's memory, and why it is the first.

A simulated step as a picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ddpm_ds.command_line import GIB, aligned, gib
from ddpm_ds.observe.pictures import draw_step
from ddpm_ds.predict.machine import Machine
from ddpm_ds.predict.memory import Memory
from ddpm_ds.predict.predictor import Prediction
from ddpm_ds.predict.search import Misfit, Plan
from ddpm_ds.predict.simulate import Simulation


def report(plan: Plan, machine: Machine) -> str:
    """Everything that ``ddpm-ds plan`` prints of its result."""
    first = plan.best[0]
    return "\n".join(
        [
            *aligned(_rows(plan.best, several_nodes=machine.nodes > 1)),
            "",
            f"memory of 1, MiB per device (fits up to {machine.usable_bytes / 2**20:,.0f})",
            *aligned(_memory_rows(first)),
            "",
            textwrap.fill(why(plan, machine), 112, break_on_hyphens=False),
        ]
    )


def why(plan: Plan, machine: Machine) -> str:
    """In some sentences why the first layout is the first, what of it crosses nodes, and what more memory would do."""
    first, *others = plan.best
    sentences = [
        f"1 is the fastest of {plan.fitting:,} layouts that fit; {plan.misfits:,} don't. Its devices spend "
        f"{first.pass_seconds / first.step_seconds:.0%} of the step in forwards and backwards, "
        f"{first.update_seconds / first.step_seconds:.0%} on gradients and weights and wait for {first.bubble:.0%}."
    ]
    other = next((other for other in others if _pipeline(other) != _pipeline(first)), others[0] if others else None)
    if other is not None:
        number = plan.best.index(other) + 1
        sentences.append(
            f"{number} ({other.layout.words()}) takes {other.step_seconds / first.step_seconds - 1:.1%} longer: "
            f"{_difference(first, other)}."
        )
    if machine.nodes > 1:
        sentences.append(_apart(first, plan.turned))
    if plan.tempting is not None:
        misfit, seconds = plan.tempting
        sentences.append(_tempting(misfit, 1 - seconds / first.step_seconds))
    return " ".join(sentences)


def _apart(first: Prediction, turned: Prediction | None) -> str:
    """What crosses nodes, and what would if the other axis of the layout did."""
    wires = first.traffic
    parts = (("activations", wires.activations), ("gradients", wires.gradients), ("weights", wires.weights))
    named = " and ".join(f"{size / 1e9:.3f} GB of {name}" for name, size in parts if size)
    said = (
        f"1 has its {first.layout.apart} across nodes: {named or 'nothing'} between them in a step, and "
        f"{wires.busiest / 1e9:.3f} GB from the busiest node"
    )
    if turned is None:
        return f"{said}."
    longer, other = turned.step_seconds / first.step_seconds - 1, turned.traffic
    return (
        f"{said}; with its {turned.layout.apart} across them it would be {other.between_hosts / 1e9:.3f} GB, "
        f"{other.busiest / 1e9:.3f} GB from one node, and a step {abs(longer):.1%} "
        f"{'longer' if longer >= 0 else 'shorter'}."
    )


def _tempting(misfit: Misfit, gain: float) -> str:
    parts = {field.name: getattr(misfit.memory, field.name) for field in fields(Memory) if field.name != "host"}
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"{misfit.layout.words()} would take {gain:.1%} less, but is {gib(misfit.excess)} over on rank {misfit.rank} "
        f"({largest} {gib(parts[largest])} of {gib(misfit.memory.total)})."
    )


def _pipeline(prediction: Prediction) -> tuple[int, str]:
    return prediction.layout.stages, prediction.layout.schedule


def _difference(first: Prediction, other: Prediction) -> str:
    """What most of the difference between two steps is."""
    waits = [prediction.bubble * prediction.step_seconds for prediction in (first, other)]
    sizes = f"micro-batches of {other.layout.micro_batch_images} against {first.layout.micro_batch_images}"
    recomputes = bool(other.layout.checkpoint_interval) and not first.layout.checkpoint_interval
    reasons = {
        f"a device waits {_milliseconds(waits[1] - waits[0])} more for other stages": waits[1] - waits[0],
        f"forwards and backwards take {_milliseconds(other.pass_seconds - first.pass_seconds)} more on a device "
        f"({'activations are computed again' if recomputes else sizes})": other.pass_seconds - first.pass_seconds,
        f"gradients and weights take {_milliseconds(other.update_seconds - first.update_seconds)} more": (
            other.update_seconds - first.update_seconds
        ),
    }
    return max(reasons, key=lambda reason: reasons[reason])


def _rows(best: Sequence[Prediction], *, several_nodes: bool) -> list[tuple[str, ...]]:
    rows = [
        (
            "",
            "stages",
            "replicas",
            "schedule",
            "micro-batches",
            "recompute",
            "ZeRO",
            "step ms",
            "images/s",
            "bubble",
            "GiB/device",
            "GB on wires",
            *(["across nodes", "GB between", "from one"] if several_nodes else []),
        )
    ]
    for number, prediction in enumerate(best, start=1):
        layout, wires = prediction.layout, prediction.traffic
        rows.append(
            (
                str(number),
                str(layout.stages),
                str(layout.replicas),
                layout.schedule if layout.stages > 1 else "-",
                f"{layout.micro_batches} x {layout.micro_batch_images}",
                f"every {layout.checkpoint_interval}" if layout.checkpoint_interval else "-",
                f"{layout.zero_stage}{' offload' if layout.offload else ''}",
                f"{1e3 * prediction.step_seconds:,.5g}",
                _rate(prediction.images_per_second),
                f"{prediction.bubble:.1%}",
                f"{prediction.peak.total / GIB:.2f}",
                f"{(wires.within_hosts + wires.between_hosts) / 1e9:.3f}",
                *(
                    [layout.apart, f"{wires.between_hosts / 1e9:.3f}", f"{wires.busiest / 1e9:.3f}"]
                    if several_nodes
                    else []
                ),
            )
        )
    return rows


def _memory_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    parts = [field.name for field in fields(Memory) if field.name != "host" or prediction.layout.offload]
    device = [part for part in parts if part != "host"]
    rows = [("rank", *device, "total", *(f"({part})" for part in parts[len(device) :]))]
    for rank, memory in enumerate(prediction.memory):
        sizes = [*(getattr(memory, part) for part in device), memory.total]
        sizes += [memory.host] if len(parts) > len(device) else []
        rows.append((str(rank), *(f"{size / 2**20:,.1f}" for size in sizes)))
    return rows


def _rate(images_per_second: float) -> str:
    return f"{images_per_second:,.0f}" if images_per_second >= 100 else f"{images_per_second:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"


def draw_timeline(simulation: Simulation, title: str, path: Path) -> None:
    """Write the step as a PNG, in the colours of measured ones. Its events must have been kept."""
    seconds = simulation.step_seconds
    names = [f"rank {rank}" for rank in range(len(simulation.events))]
    title = f"{title}\n{1e3 * seconds:,.4g} ms, bubble {simulation.bubble:.1%}"
    draw_step(simulation.events, seconds, names, title, path)

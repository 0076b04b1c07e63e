"""Report of the planner: the fastest layouts, memory of the first and the reason for it, and a drawing of its step."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import BinaryIO

from ddpm_ds.command_line import GIB, aligned, counted, gib
from ddpm_ds.observe.pictures import draw_step
from ddpm_ds.predict.predictor import Prediction
from ddpm_ds.predict.search import Plan
from ddpm_ds.predict.simulate import Simulation


def report(plan: Plan) -> str:
    """Return everything that ``ddpm-ds plan`` prints of its result."""
    machine = plan.predictor.machine
    return "\n".join(
        [
            *aligned(_rows(plan.best, several_nodes=machine.nodes > 1)),
            "",
            f"memory of 1, MiB per device (fits up to {machine.usable_bytes / 2**20:,.0f})",
            *aligned(_memory_rows(plan.best[0])),
            "",
            textwrap.fill(why(plan), 112, break_on_hyphens=False),
        ]
    )


def why(plan: Plan) -> str:
    """Return sentences: why the first layout is fastest, what crosses nodes, what more memory would do."""
    machine, (first, *others) = plan.predictor.machine, plan.best
    sentences = [
        f"1 is the fastest of {counted(plan.fitting, 'layout')} that fit; {plan.misfits:,} don't. Its devices spend "
        f"{first.pass_seconds / first.step_seconds:.0%} of the step in forwards and backwards, "
        f"{first.update_seconds / first.step_seconds:.0%} on gradients and weights and wait for {first.bubble:.0%}."
    ]
    pipeline = (first.layout.stages, first.layout.schedule)
    differing = [other for other in others if (other.layout.stages, other.layout.schedule) != pipeline]
    for other in (differing or others)[:1]:
        sentences.append(
            f"{plan.best.index(other) + 1} ({other.layout.words()}) takes "
            f"{other.step_seconds / first.step_seconds - 1:.1%} longer: {_difference(first, other)}."
        )
    if machine.nodes > 1:
        sentences.append(_bytes_between_nodes(first, plan.other_axis))
    if plan.fastest_misfit is not None:
        misfit, memory = plan.fastest_misfit, plan.fastest_misfit.peak
        largest = max(memory.parts, key=lambda name: memory.parts[name])
        sentences.append(
            f"{misfit.layout.words()} would take {1 - misfit.step_seconds / first.step_seconds:.1%} less, but is "
            f"{gib(memory.total - machine.usable_bytes)} over on rank {misfit.memory.index(memory)} "
            f"({largest} {gib(memory.parts[largest])} of {gib(memory.total)})."
        )
    return " ".join(sentences)


def _bytes_between_nodes(first: Prediction, other_axis: Prediction | None) -> str:
    """Return a sentence on the bytes that cross nodes, also with the other axis of the layout across them."""
    wires = first.traffic
    parts = (("activations", wires.activations), ("gradients", wires.gradients), ("weights", wires.weights))
    named = " and ".join(f"{size / 1e9:.3f} GB of {name}" for name, size in parts if size)
    said = (
        f"1 has its {first.layout.axis_over_nodes} across nodes: {named or 'nothing'} between them in a step, and "
        f"{wires.busiest / 1e9:.3f} GB from the busiest node"
    )
    if other_axis is None:
        return f"{said}."
    longer, other = other_axis.step_seconds / first.step_seconds - 1, other_axis.traffic
    axis = other_axis.layout.axis_over_nodes
    return (
        f"{said}; with its {axis} across them it would be {other.between_hosts / 1e9:.3f} GB, "
        f"{other.busiest / 1e9:.3f} GB from one node, and a step {abs(longer):.1%} "
        f"{'longer' if longer >= 0 else 'shorter'}."
    )


def _difference(first: Prediction, other: Prediction) -> str:
    """Return the largest part of the difference between two steps."""
    waits = other.bubble * other.step_seconds - first.bubble * first.step_seconds
    passes, update = other.pass_seconds - first.pass_seconds, other.update_seconds - first.update_seconds
    recomputes = other.layout.checkpoint_interval and not first.layout.checkpoint_interval
    sizes = f"micro-batches of {other.layout.micro_batch_images} against {first.layout.micro_batch_images}"
    cause = "activations are computed again" if recomputes else sizes
    seconds, words = max(
        (waits, "a device waits {} more for other stages"),
        (passes, f"forwards and backwards take {{}} more on a device ({cause})"),
        (update, "gradients and weights take {} more"),
    )
    return words.format(f"{1e3 * seconds:,.3g} ms")


def _rows(best: Sequence[Prediction], *, several_nodes: bool) -> list[list[str]]:
    rows = []
    for number, prediction in enumerate(best, start=1):
        layout, wires = prediction.layout, prediction.traffic
        rate = layout.batch_images / prediction.step_seconds
        cells = {
            "": str(number),
            "stages": str(layout.stages),
            "replicas": str(layout.replicas),
            "schedule": layout.schedule if layout.stages > 1 else "-",
            "micro-batches": f"{layout.micro_batches} x {layout.micro_batch_images}",
            "recompute": f"every {layout.checkpoint_interval}" if layout.checkpoint_interval else "-",
            "ZeRO": f"{layout.zero_stage}{' offload' if layout.offload else ''}",
            "step ms": f"{1e3 * prediction.step_seconds:,.5g}",
            "images/s": f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            "bubble": f"{prediction.bubble:.1%}",
            "GiB/device": f"{prediction.peak.total / GIB:.2f}",
            "GB on wires": f"{(wires.within_hosts + wires.between_hosts) / 1e9:.3f}",
        }
        if several_nodes:
            cells |= {"across nodes": layout.axis_over_nodes, "GB between": f"{wires.between_hosts / 1e9:.3f}"}
            cells |= {"from one": f"{wires.busiest / 1e9:.3f}"}
        rows += [list(cells), list(cells.values())] if number == 1 else [list(cells.values())]
    return rows


def _memory_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    offload = prediction.layout.offload
    rows = [("rank", *prediction.peak.parts, "total", *(["(host)"] if offload else []))]
    for rank, memory in enumerate(prediction.memory):
        sizes = [*memory.parts.values(), memory.total, *([memory.host] if offload else [])]
        rows.append((str(rank), *(f"{size / 2**20:,.1f}" for size in sizes)))
    return rows


def draw_timeline(simulation: Simulation, title: str, file: BinaryIO) -> None:
    """Write the step as a PNG, in the colours of measured ones. The simulation must have kept its events."""
    seconds = simulation.step_seconds
    names = [str(rank) for rank in range(len(simulation.events))]
    title = f"{title}\n{1e3 * seconds:,.4g} ms, bubble {simulation.bubble:.1%}"
    draw_step(simulation.events, seconds, names, title, file)

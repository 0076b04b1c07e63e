"""What a kernel profile is written down as: the metrics of a run, tables for people, and the ranks' traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpm_ds.observe.kernel_groups import GROUPS, Shares

TABLE_ROWS = 100
WIDEST_NAME = 60


@dataclass(frozen=True)
class Row:
    """An operator or kernel in the table of a profile, summed over its calls."""

    calls: int
    self_cpu_seconds: float
    cpu_seconds: float
    self_device_seconds: float
    memory_bytes: int
    """Allocated, less what was freed, by itself; on the device where there is one."""


@dataclass(frozen=True)
class RankProfile:
    """What one rank hands over."""

    steps: int
    """That were recorded."""
    shares: Shares
    rows: dict[str, Row]
    table: str
    """PyTorch's own."""
    trace: bytes
    """Compressed."""
    kept: float
    """Share of the trace's events that are left in it."""


def metrics(ranks: Sequence[RankProfile]) -> dict[str, float]:
    """Seconds per step, mean over the ranks."""
    steps = ranks[0].steps * len(ranks)
    values = {f"kernels/{group}_seconds": sum(rank.shares.seconds[group] for rank in ranks) / steps for group in GROUPS}
    return {**values, "kernels/total_seconds": sum(rank.shares.total for rank in ranks) / steps}


def write(ranks: Sequence[RankProfile], folder: Path, last_step: int, *, on_device: bool) -> list[Path]:
    """Write every file; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = ranks[0].steps
    recorded = f"{steps} optimizer {'step' if steps == 1 else 'steps'} up to number {last_step}"
    groups = folder / "groups.txt"
    groups.write_text(
        f"{recorded}, all ranks\n\n{group_table(ranks)}\n\n{operator_table(ranks, on_device=on_device)}\n"
    )
    paths = [groups]
    for number, rank in enumerate(ranks):
        text, trace = folder / f"rank{number}.txt", folder / f"rank{number}.trace.json.gz"
        text.write_text(f"{recorded}, rank {number}\n\n{group_table([rank])}\n\n{rank.table}")
        trace.write_bytes(rank.trace)
        paths += [text, trace]
    return paths


def group_table(ranks: Sequence[RankProfile]) -> str:
    """Seconds per step of every group: mean over the ranks, least, most, and what most of it went to."""
    means = metrics(ranks)
    total = means["kernels/total_seconds"]
    lines = [f"{'self time, seconds per step':30}{'mean':>10}{'share':>8}{'least':>10}{'most':>10}  largest"]
    for group in sorted(GROUPS, key=lambda group: -means[f"kernels/{group}_seconds"]):
        own = [rank.shares.seconds[group] / rank.steps for rank in ranks]
        mean = means[f"kernels/{group}_seconds"]
        names: dict[str, float] = defaultdict(float)
        for rank in ranks:
            for name, seconds in rank.shares.names[group].items():
                names[name] += seconds
        largest = sorted(names.items(), key=lambda item: -item[1])[:3]
        lines.append(
            f"{group.replace('_', ' '):30}{mean:10.4f}{mean / total if total else 0.0:8.1%}{min(own):10.4f}"
            f"{max(own):10.4f}  {', '.join(f'{name[:WIDEST_NAME]}' for name, seconds in largest if seconds > 0)}"
        )
    totals = [rank.shares.total / rank.steps for rank in ranks]
    return "\n".join([*lines, f"{'total':30}{total:10.4f}{'':8}{min(totals):10.4f}{max(totals):10.4f}"])


def operator_table(ranks: Sequence[RankProfile], *, on_device: bool) -> str:
    """The operators of all ranks summed, per step, those with most self time first."""
    rows: dict[str, list[float]] = {}
    for rank in ranks:
        for name, row in rank.rows.items():
            summed = (row.calls, row.self_cpu_seconds, row.cpu_seconds, row.self_device_seconds, row.memory_bytes)
            rows[name] = [one + other for one, other in zip(rows.get(name, [0.0] * 5), summed, strict=True)]
    order = sorted(rows.items(), key=lambda item: -item[1][3 if on_device else 1])
    lines = [
        f"{'per step, all ranks summed':{WIDEST_NAME}}{'self CPU ms':>13}{'CPU ms':>11}{'self device ms':>16}"
        f"{'calls':>9}{'memory MB':>11}"
    ]
    for name, values in order[:TABLE_ROWS]:
        calls, self_cpu, cpu, device, memory = (value / ranks[0].steps for value in values)
        lines.append(
            f"{name[: WIDEST_NAME - 1]:{WIDEST_NAME}}{self_cpu * 1e3:13.3f}{cpu * 1e3:11.3f}{device * 1e3:16.3f}"
            f"{calls:9.1f}{memory / 1e6:11.2f}"
        )
    return "\n".join(lines)

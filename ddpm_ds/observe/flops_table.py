"""What a flops profile found, of all stages together: records, one table, JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpm_ds.observe.flops_counts import CORRECTED, NOT_COUNTED
from ddpm_ds.table import aligned

TOLERANCE = 0.02
"""By which counted MACs may differ from those of the cost model."""


@dataclass(frozen=True)
class Counts:
    """Of one forward of one micro-batch."""

    parameters: int = 0
    macs: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.parameters + other.parameters,
            self.macs + other.macs,
            self.flops + other.flops,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class LayerProfile:
    """One layer of the U-Net's list."""

    index: int
    name: str
    kind: str
    total: Counts
    modelled_macs: int
    """What the cost model says, by which stages are cut."""
    parts: dict[str, Counts]
    """The modules that it is made of; what it computes itself, such as attention's two products, is in no part."""


@dataclass(frozen=True)
class StageProfile:
    """One stage, as the rank that holds it saw it."""

    stage: int
    rank: int
    layers: tuple[LayerProfile, ...]
    text: str
    """As DeepSpeed prints it."""

    @property
    def total(self) -> Counts:
        return total(layer.total for layer in self.layers)


@dataclass(frozen=True)
class Circumstances:
    """Of the profile."""

    step: int
    micro_batch_images: int
    dtype: str
    schedule: str
    deepspeed: str

    def __str__(self) -> str:
        return (
            f"one forward of a micro-batch of {self.micro_batch_images} images in step {self.step}, {self.dtype}, "
            f"schedule {self.schedule}; DeepSpeed {self.deepspeed}'s profiler"
        )


def total(counts: Iterable[Counts]) -> Counts:
    """Their sum."""
    return sum(counts, Counts())


def table(profiles: Sequence[StageProfile], circumstances: Circumstances) -> str:
    """Totals by stage, all layers, and what the numbers leave out."""
    whole = total(profile.total for profile in profiles)
    columns = ("parameters", "MACs (M)", "flops (M)", "flops share", "latency (ms)", "latency share", "GFLOP/s")
    stages = [
        *((str(profile.stage), str(profile.rank), *_cells(profile.total, whole)) for profile in profiles),
        ("all", "", *_cells(whole, whole)),
    ]
    layers = [
        (layer.name, str(profile.stage), *_cells(layer.total, whole))
        for profile in profiles
        for layer in profile.layers
    ]
    lines = [
        str(circumstances),
        "",
        *aligned([("stage", "rank", *columns), *stages], left={0}),
        "",
        *aligned([("module", "stage", *columns), *layers], left={0}),
        "",
        agreement(profiles),
        "Latency is of each layer alone, the device waited for before and after it; nothing between layers and no wait",
        "for a message is in it. The profiled step is slower than others.",
        "",
        notes(),
    ]
    return "\n".join(lines)


def agreement(profiles: Sequence[StageProfile]) -> str:
    """How far the counted MACs are from those of the cost model, and in which layers by more than 2 %."""
    differences = {
        layer.name: layer.total.macs / layer.modelled_macs - 1 for profile in profiles for layer in profile.layers
    }
    far = [f"{name} ({difference:+.1%})" for name, difference in differences.items() if abs(difference) > TOLERANCE]
    if far:
        return f"MACs differ from those of the cost model by over {TOLERANCE:.0%} in {', '.join(far)}."
    return f"MACs are within {max(map(abs, differences.values())):.2%} of those of the cost model in every layer."


def notes() -> str:
    """What DeepSpeed miscounts and is put right, and what is in no count."""
    return "\n".join(
        [
            "Put right of DeepSpeed's counts:",
            *(f"  - {line}" for line in CORRECTED),
            "Not counted, or estimated:",
            *(f"  - {line}" for line in NOT_COUNTED),
        ]
    )


def as_json(profiles: Sequence[StageProfile], circumstances: Circumstances) -> dict[str, Any]:
    """Everything of the table and the parts of each layer; latencies in seconds."""
    return {
        **asdict(circumstances),
        "total": asdict(total(profile.total for profile in profiles)),
        "stages": [
            {"stage": profile.stage, "rank": profile.rank, "total": asdict(profile.total)} for profile in profiles
        ],
        "layers": [{"stage": profile.stage, **asdict(layer)} for profile in profiles for layer in profile.layers],
        "corrected": list(CORRECTED),
        "not_counted": list(NOT_COUNTED),
    }


def _cells(counts: Counts, whole: Counts) -> tuple[str, ...]:
    return (
        f"{counts.parameters:,}",
        f"{counts.macs / 1e6:,.3f}",
        f"{counts.flops / 1e6:,.3f}",
        f"{counts.flops / max(whole.flops, 1):.1%}",
        f"{counts.seconds * 1e3:,.3f}",
        f"{counts.seconds / (whole.seconds or 1):.1%}",
        f"{counts.flops / (counts.seconds or 1) / 1e9:,.1f}",
    )

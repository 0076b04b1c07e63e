"""What one step of a layout comes to: cuts, memory, time, traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpm_ds.errors import LayoutError
from ddpm_ds.observe.device_speed import LayerSeconds, LayerTimes
from ddpm_ds.pipeline.cuts import Room, weighted
from ddpm_ds.pipeline.placement import Traffic
from ddpm_ds.pipeline.schedule import RankCosts
from ddpm_ds.predict.costs import crossing_seconds, link, rank_costs, step_traffic
from ddpm_ds.predict.layouts import Candidate
from ddpm_ds.predict.machine import Machine
from ddpm_ds.predict.memory import Memory, layer_bytes, rank_memory
from ddpm_ds.predict.simulate import Simulation, simulate
from ddpm_ds.predict.stages import Kept, kept, rank_segments
from ddpm_ds.predict.workload import Workload

HIDDEN = (0.0, 0.3, 1.0)
"""Shares of the time of messages with which cuts are looked for: how much of it other micro-batches hide depends on the
schedule, so that the simulator decides between what is found."""
SQUEEZES = 4
"""How often cuts are looked for that leave more room, when those found hold more than was computed layer by layer."""
FEW_PER_RANK = 4
"""Micro-batches per rank by which cuts are compared."""
SIMULATED = 2048
"""Ranks times micro-batches up to which a step is simulated whole; beyond, one more micro-batch adds the same time."""


@dataclass(frozen=True)
class Prediction:
    """What one step of a layout comes to."""

    layout: Candidate
    step_seconds: float
    bubble: float
    """Share of all devices' time in which they wait for another stage."""
    pass_seconds: float
    """Of a device in the mean: forwards and backwards, with what ZeRO-2 reduces after each."""
    update_seconds: float
    """Of a device in the mean: reducing gradients, stepping and gathering weights."""
    memory: tuple[Memory, ...]
    """By rank of the pipeline."""
    traffic: Traffic
    images_per_second: float

    @property
    def peak(self) -> Memory:
        """Of the fullest rank."""
        return max(self.memory, key=lambda memory: memory.total)


@dataclass
class Predictor:
    """Predicts layouts of one job on one machine; what layouts share is computed once."""

    job: Workload
    machine: Machine
    times: LayerTimes
    _times: dict[int, Sequence[LayerSeconds]] = field(default_factory=dict)
    _cuts: dict[tuple[str, int, int, str], _Cut | None] = field(default_factory=dict)
    _squeezed: dict[Candidate, _Cut] = field(default_factory=dict)

    def can_cut(self, layout: Candidate) -> bool:
        """Whether the U-Net has so many stages to give."""
        return self._cut(layout) is not None

    def bounds(self, layout: Candidate) -> tuple[int, ...]:
        """The cuts of a layout: exact for a share of the messages' time, and for the memory there is where asked."""
        return self._known_cut(layout).bounds

    def fits(self, layout: Candidate) -> bool:
        """Whether every rank fits its memory, if need be with cuts made for that."""
        fullest = max(memory.total for memory in self.memory(layout))
        return fullest <= self.machine.usable_bytes or (layout.stages > 1 and self.squeeze(layout))

    def squeeze(self, layout: Candidate) -> bool:
        """Look for cuts with which every rank fits its memory; whether there are any, which count from now on."""
        limit = self.machine.usable_bytes
        for _ in range(SQUEEZES):
            room = Room(limit, lambda rank, phase: layer_bytes(self.job, layout, rank, phase, self.machine.is_cpu))
            cut = self._fastest_cut(layout, room)
            if cut is None:
                return False
            excess = max(memory.total for memory in self._memory(layout, cut)) - self.machine.usable_bytes
            if excess <= 0:
                self._squeezed[layout] = cut
                return True
            limit -= excess
        return False

    def knows_times(self, layout: Candidate) -> bool:
        """Whether the layers' times have been asked for at this micro-batch."""
        return layout.micro_batch_images in self._times

    def memory(self, layout: Candidate) -> tuple[Memory, ...]:
        """By rank."""
        return self._memory(layout, self._known_cut(layout))

    def _memory(self, layout: Candidate, cut: _Cut) -> tuple[Memory, ...]:
        return tuple(
            rank_memory(self.job, layout, rank, segments, keeps, on_cpu=self.machine.is_cpu)
            for rank, (segments, keeps) in enumerate(
                zip(cut.segments, cut.keeps(self.job, layout.checkpoint_interval), strict=True)
            )
        )

    def costs(self, layout: Candidate) -> list[RankCosts]:
        """By rank, for the simulator."""
        return self._costs(layout, self._known_cut(layout))

    def _costs(self, layout: Candidate, cut: _Cut) -> list[RankCosts]:
        times = self._layer_times(layout.micro_batch_images)
        return [rank_costs(self.job, self.machine, layout, rank, own, times) for rank, own in enumerate(cut.segments)]

    def lower_bound(self, layout: Candidate) -> float:
        """Seconds that no step is faster than: the busiest rank's work."""
        return max(
            layout.micro_batches * _pass_seconds(rank) + rank.reduce_seconds + rank.optimizer_seconds
            for rank in self.costs(layout)
        )

    def simulate(self, layout: Candidate, micro_batches: int | None = None, *, keep_events: bool = True) -> Simulation:
        """A step of a layout, or of the same with another number of micro-batches."""
        count = layout.micro_batches if micro_batches is None else micro_batches
        between = link(self.machine, layout)
        return simulate(layout.schedule, count, self.costs(layout), between, keep_events=keep_events)

    def predict(self, layout: Candidate) -> Prediction:
        """Everything about a layout."""
        costs, step = self.costs(layout), self._step_seconds(layout)
        passes = sum(map(_pass_seconds, costs)) * layout.micro_batches / layout.stages
        update = sum(rank.reduce_seconds + rank.optimizer_seconds for rank in costs) / layout.stages
        return Prediction(
            layout=layout,
            step_seconds=step,
            bubble=max(0.0, 1 - (passes + update) / step),
            pass_seconds=passes,
            update_seconds=update,
            memory=self.memory(layout),
            traffic=step_traffic(self.job, self.machine, layout, self.bounds(layout)),
            images_per_second=self.job.spec.train.batch_images / step,
        )

    def _step_seconds(self, layout: Candidate) -> float:
        most = max(SIMULATED // layout.stages, 4 * layout.stages)
        if layout.micro_batches <= most:
            return self.simulate(layout, keep_events=False).step_seconds
        fewer = 3 * most // 4
        some, more = (self.simulate(layout, count, keep_events=False).step_seconds for count in (fewer, most))
        return more + (layout.micro_batches - most) * (more - some) / (most - fewer)

    def _layer_times(self, images: int) -> Sequence[LayerSeconds]:
        if images not in self._times:
            self._times[images] = self.times(images)
        return self._times[images]

    def _known_cut(self, layout: Candidate) -> _Cut:
        cut = self._cut(layout)
        assert cut is not None
        return cut

    def _cut(self, layout: Candidate) -> _Cut | None:
        if layout in self._squeezed:
            return self._squeezed[layout]
        key = (layout.schedule, layout.stages, layout.micro_batch_images, layout.across)
        if key not in self._cuts:
            self._cuts[key] = self._fastest_cut(layout, None)
        return self._cuts[key]

    def _fastest_cut(self, layout: Candidate, room: Room | None) -> _Cut | None:
        """Of the cuts with more and less attention to messages the one whose step is simulated fastest."""
        found = {cut.bounds: cut for share in HIDDEN if (cut := self._make_cut(layout, share, room)) is not None}
        if len(found) < 2:
            return next(iter(found.values()), None)
        count = min(layout.micro_batches, FEW_PER_RANK * layout.stages)
        between = link(self.machine, layout)

        def seconds(cut: _Cut) -> float:
            costs = self._costs(layout, cut)
            return simulate(layout.schedule, count, costs, between, keep_events=False).step_seconds

        return min(found.values(), key=seconds)

    def _make_cut(self, layout: Candidate, share: float, room: Room | None) -> _Cut | None:
        seconds = [layer.forward + layer.backward for layer in self._layer_times(layout.micro_batch_images)]
        try:
            bounds = weighted(
                self.job.layers,
                seconds,
                layout.stages,
                layout.schedule,
                crossing=share * crossing_seconds(self.job, self.machine, layout),
                room=room,
            )
        except LayoutError:
            return None
        return _Cut(self.job, layout, bounds)


class _Cut:
    """One way to cut the U-Net."""

    def __init__(self, job: Workload, layout: Candidate, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.segments = tuple(rank_segments(job.layers, bounds, layout.schedule, rank) for rank in range(layout.stages))
        self._schedule = layout.schedule
        self._keeps: dict[int, tuple[tuple[Kept, ...], ...]] = {}

    def keeps(self, job: Workload, interval: int) -> tuple[tuple[Kept, ...], ...]:
        """What each rank keeps, by phase."""
        if interval not in self._keeps:
            self._keeps[interval] = tuple(
                tuple(kept(job.layers, segment, self._schedule, phase, interval) for phase, segment in enumerate(own))
                for own in self.segments
            )
        return self._keeps[interval]


def _pass_seconds(rank: RankCosts) -> float:
    """A micro-batch's forwards and backwards on a rank."""
    return sum(phase.forward_seconds + phase.backward_seconds for phase in rank.phases)

"""Predictions of one step of a layout on a machine: cuts, memory, time, traffic."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpm_ds.errors import LayoutError
from ddpm_ds.observe.device_speed import LayerSeconds, LayerTimes
from ddpm_ds.pipeline.cuts import Room, weighted
from ddpm_ds.pipeline.placement import Traffic
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.predict.costs import crossing_seconds, link, planned_costs, step_traffic
from ddpm_ds.predict.layouts import Candidate, Workload
from ddpm_ds.predict.machine import Machine
from ddpm_ds.predict.memory import Memory, layer_bytes, pipeline_memory
from ddpm_ds.predict.scheduler import order_of
from ddpm_ds.predict.simulate import RankCosts, Simulation, simulate

HIDDEN = (0.0, 0.3, 1.0)
"""Shares of messages' time that cuts are searched with; the simulator chooses, since the schedule hides some of it."""
SQUEEZES = 4
"""Number of searches for cuts that leave more room, when those found hold more than was computed layer by layer."""
FEW_PER_RANK = 4
"""Number of micro-batches per rank for comparing cuts."""
SIMULATED = 2048
"""Ranks times micro-batches up to which a step is simulated whole; beyond, one more micro-batch adds the same time."""

Bounds = tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step of a layout."""

    layout: Candidate
    step_seconds: float
    bubble: float
    """Share of all devices' time spent waiting for another stage."""
    pass_seconds: float
    """Mean seconds of a device in forwards and backwards, with what ZeRO-2 reduces after each."""
    update_seconds: float
    """Mean seconds of a device in which it reduces gradients, steps and gathers weights."""
    memory: tuple[Memory, ...]
    """Memory of each rank of the pipeline."""
    traffic: Traffic

    @property
    def peak(self) -> Memory:
        """Memory of the fullest rank."""
        return max(self.memory, key=lambda memory: memory.total)


@dataclass
class Predictor:
    """Predicts layouts of one job on one machine; what layouts share is computed once."""

    job: Workload
    machine: Machine
    times: LayerTimes
    _times: dict[int, Sequence[LayerSeconds]] = field(default_factory=dict)
    _cuts: dict[tuple[str, int, int, str], Bounds | None] = field(default_factory=dict)
    _squeezed: dict[Candidate, Bounds] = field(default_factory=dict)

    def can_cut(self, layout: Candidate) -> bool:
        """Return whether the U-Net can be cut into so many stages."""
        return self._cut(layout) is not None

    def bounds(self, layout: Candidate) -> Bounds:
        """The cuts of a layout: the fastest, or with :meth:`fits` those that fit the memory."""
        bounds = self._cut(layout)
        assert bounds is not None
        return bounds

    def fits(self, layout: Candidate) -> bool:
        """Return whether every rank fits its memory, if need be with cuts made for that and used from then on."""
        usable = limit = self.machine.usable_bytes

        def excess(bounds: Bounds) -> int:
            return max(memory.total for memory in pipeline_memory(self.job, layout, bounds)) - usable

        if excess(self.bounds(layout)) <= 0:
            return True
        for _ in range(SQUEEZES if layout.stages > 1 else 0):
            room = Room(limit, lambda rank, phase: layer_bytes(self.job, layout, rank, phase))
            bounds = self._fastest_cut(layout, room)
            if bounds is None:
                return False
            if (over := excess(bounds)) <= 0:
                self._squeezed[layout] = bounds
                return True
            limit -= over
        return False

    def knows_times(self, layout: Candidate) -> bool:
        """Return whether the layers' times are already known for this micro-batch."""
        return layout.micro_batch_images in self._times

    def memory(self, layout: Candidate) -> tuple[Memory, ...]:
        """The memory of each rank."""
        return pipeline_memory(self.job, layout, self.bounds(layout))

    def costs(self, layout: Candidate, bounds: Bounds | None = None) -> list[RankCosts]:
        """The costs of each rank, for the simulator."""
        times = self._layer_times(layout.micro_batch_images)
        return planned_costs(self.job, self.machine, layout, bounds or self.bounds(layout), times)

    def lower_bound(self, layout: Candidate) -> float:
        """Return a lower bound of a step's seconds: the busiest rank's work."""
        return max(
            layout.micro_batches * rank.pass_seconds + rank.reduce_seconds + rank.optimizer_seconds
            for rank in self.costs(layout)
        )

    def simulate(
        self,
        layout: Candidate,
        micro_batches: int | None = None,
        bounds: Bounds | None = None,
        *,
        keep_events: bool = False,
    ) -> Simulation:
        """Simulate a step of a layout, or of the same with another number of micro-batches or other cuts."""
        count = layout.micro_batches if micro_batches is None else micro_batches
        between = link(self.machine, layout)
        costs, made = self.costs(layout, bounds), self.programs(layout, count, bounds)
        return simulate(layout.schedule, count, costs, between, programs=made, keep_events=keep_events)

    def programs(
        self, layout: Candidate, micro_batches: int, bounds: Bounds | None = None
    ) -> tuple[Program, ...] | None:
        """Return the programs of a planned schedule; None where the schedule's name says them."""
        splits = not self.job.config.get("compile", False)
        between = link(self.machine, layout)
        return order_of(layout.schedule, micro_batches, self.costs(layout, bounds), between, splits=splits)

    def predict(self, layout: Candidate) -> Prediction:
        """Predict everything about a layout."""
        costs, step = self.costs(layout), self._step_seconds(layout)
        passes = sum(rank.pass_seconds for rank in costs) * layout.micro_batches / layout.stages
        update = sum(rank.reduce_seconds + rank.optimizer_seconds for rank in costs) / layout.stages
        return Prediction(
            layout=layout,
            step_seconds=step,
            bubble=max(0.0, 1 - (passes + update) / step),
            pass_seconds=passes,
            update_seconds=update,
            memory=self.memory(layout),
            traffic=step_traffic(self.job, self.machine, layout, self.bounds(layout)),
        )

    def _step_seconds(self, layout: Candidate) -> float:
        most = max(SIMULATED // layout.stages, 4 * layout.stages)
        if layout.micro_batches <= most:
            return self.simulate(layout).step_seconds
        fewer = 3 * most // 4
        some, more = (self.simulate(layout, count).step_seconds for count in (fewer, most))
        return more + (layout.micro_batches - most) * (more - some) / (most - fewer)

    def _layer_times(self, images: int) -> Sequence[LayerSeconds]:
        if images not in self._times:
            self._times[images] = self.times(images)
        return self._times[images]

    def _cut(self, layout: Candidate) -> Bounds | None:
        if layout in self._squeezed:
            return self._squeezed[layout]
        key = (layout.schedule, layout.stages, layout.micro_batch_images, layout.across)
        if key not in self._cuts:
            self._cuts[key] = self._fastest_cut(layout, None)
        return self._cuts[key]

    def _fastest_cut(self, layout: Candidate, room: Room | None) -> Bounds | None:
        """The fastest, as simulated, of cuts with more and less attention to messages; None where there are none."""
        times = self._layer_times(layout.micro_batch_images)
        seconds = [layer.forward + layer.backward for layer in times]
        crossing = crossing_seconds(self.job, self.machine, layout)
        layers = self.job.layers
        found: dict[Bounds, None] = {}
        for share in HIDDEN:
            with contextlib.suppress(LayoutError):
                cut = weighted(layers, seconds, layout.stages, layout.schedule, crossing=share * crossing, room=room)
                found[cut] = None
        if len(found) < 2:
            return next(iter(found), None)
        count = min(layout.micro_batches, FEW_PER_RANK * layout.stages)
        return min(found, key=lambda cut: self.simulate(layout, count, cut).step_seconds)

"""Predictions of one step of a layout on a machine: cuts, memory, time, traffic."""

import functools
import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.observe.device_speed import LayerSeconds, LayerTimes
from ddpm_ds.pipeline.cuts import Room, neighbouring, weighted
from ddpm_ds.pipeline.placement import Traffic
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.planning.costs import (
    analytic_times,
    crossing_seconds,
    grid,
    launch_seconds,
    links,
    planned_costs,
    step_traffic,
    sum_seconds,
    swap_seconds,
)
from ddpm_ds.planning.inputs import Machine, Workload
from ddpm_ds.planning.memory import Memory, layer_bytes, peak_bytes, pipeline_memory
from ddpm_ds.planning.simulate import RankCosts, Simulation, order_of, simulate
from ddpm_ds.schema.layout import WHOLE, Layout, TensorSplit
from ddpm_ds.unet.shards import Sums, Swaps, layer_swaps

HIDDEN = (0.0, 0.3, 1.0)
"""Shares of messages' time assumed in searches for cuts; the simulator chooses, since the schedule hides some of it."""
SQUEEZES = 4  # maximum number of searches for cuts with more free memory, if cuts need more than the sum over layers
HALVINGS = 8
"""Number of searches for the cuts that need least memory, each with half of the uncertainty of the one before."""
FEW_PER_RANK = 4  # number of micro-batches per rank for comparing cuts
SIMULATED = 2048
"""Maximum ranks times micro-batches of a fully simulated step; beyond it each micro-batch adds the same time."""
MOST_IMPROVED, LEAST_GAIN = 8, 1e-3
"""Maximum number of ranks for which moves of single cuts are simulated, and the least share of a step for a move."""

Bounds = tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step of a layout; seconds are a device's mean."""

    layout: Layout
    step_seconds: float
    bubble: float  # share of all devices' time spent waiting for another stage
    pass_seconds: float  # seconds of forwards and backwards, including ZeRO-2's reductions
    update_seconds: float  # seconds for reducing gradients, stepping and gathering weights
    summing_seconds: float  # seconds for sums or swaps of its groups, a part of ``pass_seconds``
    memory: tuple[Memory, ...]
    traffic: Traffic

    @property
    def peak(self) -> Memory:
        """Memory of the fullest rank."""
        return max(self.memory, key=lambda memory: memory.total)

    def host_bytes(self, machine: Machine) -> int:
        """Return the bytes in the memory of the fullest host."""
        where, hosts = grid(machine, self.layout), Counter[Hashable]()
        for rank, host in enumerate(where.hosts):
            hosts[host] += self.memory[where.coordinates(rank)[0]].host
        return max(hosts.values())


@dataclass
class Predictor:
    """Predictor of the layouts of a job on a machine; results that layouts share are computed once."""

    job: Workload
    machine: Machine
    times: LayerTimes | None = None  # times of the layers; without them they are computed
    with_sums: TensorSplit | None = None  # split whose given times include the sums of its tensor groups
    _times: dict[tuple[int, object, float], Sequence[LayerSeconds]] = field(default_factory=dict)
    _cuts: dict[tuple[str, int, int, str, object], Bounds | None] = field(default_factory=dict)
    _own_cuts: dict[Layout, Bounds] = field(default_factory=dict)  # cuts made for one layout alone
    _whole: dict[Layout, tuple[float, float, float]] = field(default_factory=dict)
    """Seconds of a micro-batch's passes, without weight gradients, and of the optimizer's step, all on one rank."""
    _programs: dict[tuple[Layout, Bounds], tuple[Program, ...] | None] = field(default_factory=dict)

    def cut(self, layout: Layout) -> Bounds | None:
        """Return the cuts that :meth:`fits` or :meth:`improve` found, else the fastest; None if there are none."""
        if layout in self._own_cuts:
            return self._own_cuts[layout]
        key = (layout.schedule, layout.stages, layout.micro_batch_images, layout.across_hosts, layout.split)
        if key not in self._cuts:
            self._cuts[key] = self._fastest_cut(layout)
        return self._cuts[key]

    def bounds(self, layout: Layout) -> Bounds:
        """Return the cuts of a layout that has some."""
        bounds = self.cut(layout)
        assert bounds is not None
        return bounds

    def needs(self, layout: Layout) -> int:
        """Return the bytes of the fullest rank."""
        return peak_bytes(self.job, layout, self.bounds(layout))

    def fits(self, layout: Layout) -> bool:
        """Return whether every rank fits its memory, if needed with other cuts, which are used from then on."""
        usable = limit = self.machine.usable_bytes
        if self.needs(layout) <= usable:
            return True
        sizes = functools.cache(functools.partial(layer_bytes, self.job, layout))
        for _ in range(SQUEEZES if layout.stages > 1 else 0):
            if (bounds := self._fastest_cut(layout, Room(limit, sizes))) is None:
                break
            if (over := peak_bytes(self.job, layout, bounds) - usable) <= 0:
                self._own_cuts[layout] = bounds
                return True
            limit -= over
        return False

    def tightest(self, layout: Layout) -> Bounds:
        """Return the cuts with about the least memory of the fullest rank."""
        best, needs = self.bounds(layout), functools.partial(peak_bytes, self.job, layout)
        sizes = functools.cache(functools.partial(layer_bytes, self.job, layout))
        least, most = 0.0, float(needs(best))
        for _ in range(HALVINGS if layout.stages > 1 else 0):
            limit = (least + most) / 2
            if (bounds := self._fastest_cut(layout, Room(limit, sizes))) is None:
                least = limit
            else:
                best, most = min(best, bounds, key=needs), limit
        return best

    def improve(self, layout: Layout) -> None:
        """Move the cuts of a layout for good, as long as its simulated step gets shorter and it fits."""
        if not 1 < layout.stages <= MOST_IMPROVED:
            return
        few, usable = _few(layout), self.machine.usable_bytes
        best, better = Bounds(), self.bounds(layout)
        while best != better:
            best, shortest = better, self.simulate(few, better).step_seconds
            for moved in neighbouring(self.job.layers, best, layout.schedule):
                limit = shortest * (1 - LEAST_GAIN)
                if self.lower_bound(few, moved) >= limit or peak_bytes(self.job, layout, moved) > usable:
                    continue
                if (taken := self.simulate(few, moved).step_seconds) < limit:
                    better, shortest = moved, taken
        self._own_cuts[layout] = best

    def knows_times(self, layout: Layout) -> bool:
        return self._times_key(layout) in self._times

    def costs(self, layout: Layout, bounds: Bounds | None = None) -> list[RankCosts]:
        """Return the costs of each rank, for the simulator."""
        given = self.job, self.machine, layout, bounds or self.bounds(layout), self.layer_times(layout)
        return planned_costs(*given, with_sums=layout.tensor.size == 1 or layout.tensor != self.with_sums)

    def least_seconds(self, layout: Layout) -> float:
        """Return a lower bound of a step's seconds whatever the cuts: all layers' work, shared evenly by the stages, or
        the way of one micro-batch through all layers and back.
        """
        key = replace(layout, stages=1, micro_batches=1, schedule="1f1b", in_flight="auto", across_hosts="auto")
        if key not in self._whole:
            (costs,) = self.costs(key, (0, len(self.job.layers)))
            passes = costs.pass_seconds - costs.weight_pass_seconds
            self._whole[key] = passes, passes - costs.phases[0].weight_seconds, costs.optimizer_seconds
        passes, way, update = self._whole[key]
        return max((layout.micro_batches * passes + update) / layout.stages, way)

    def lower_bound(self, layout: Layout, bounds: Bounds | None = None) -> float:
        """Return a lower bound of a step's seconds: the busiest rank's work."""
        more = layout.micro_batches - 1 if layout.schedule == "planned" else 0
        return max(
            layout.micro_batches * rank.pass_seconds
            - more * rank.weight_pass_seconds
            + rank.reduce_seconds
            + rank.optimizer_seconds
            for rank in self.costs(layout, bounds)
        )

    def simulate(self, layout: Layout, bounds: Bounds | None = None, *, keep_events: bool = False) -> Simulation:
        """Simulate a step of a layout, with its own cuts or others."""
        cuts = bounds or self.bounds(layout)
        costs, wires, made = self.costs(layout, cuts), links(self.machine, layout), self.programs(layout, cuts)
        return simulate(layout.schedule, layout.micro_batches, costs, wires, programs=made, keep_events=keep_events)

    def programs(self, layout: Layout, bounds: Bounds) -> tuple[Program, ...] | None:
        """Return the programs of a planned schedule; None if the schedule's name defines them."""
        if (layout, bounds) not in self._programs:
            self._programs[layout, bounds] = order_of(layout, self.costs(layout, bounds), links(self.machine, layout))
        return self._programs[layout, bounds]

    def predict(self, layout: Layout) -> Prediction:
        """Predict everything about a layout."""
        costs, bounds = self.costs(layout), self.bounds(layout)
        most = max(SIMULATED // layout.stages, 4 * layout.most_kept)
        step, busy = self._step_and_busy(layout, most)
        update = sum(rank.reduce_seconds + rank.optimizer_seconds for rank in costs) / layout.stages
        alone = planned_costs(self.job, self.machine, layout, bounds, self.layer_times(layout), with_sums=False)
        summing = sum(rank.pass_seconds for rank in costs) - sum(rank.pass_seconds for rank in alone)
        # ZeRO-2 reduces in the order of the passes, which the first micro-batches show
        order = self.programs(replace(layout, micro_batches=min(layout.micro_batches, most)), bounds)
        return Prediction(
            layout=layout,
            step_seconds=step,
            bubble=max(0.0, 1 - busy / step),
            pass_seconds=busy - update,
            update_seconds=update,
            summing_seconds=layout.micro_batches * summing / layout.stages,
            memory=pipeline_memory(self.job, layout, bounds),
            traffic=step_traffic(self.job, self.machine, layout, bounds, order),
        )

    def _step_and_busy(self, layout: Layout, most: int) -> tuple[float, float]:
        """Return the seconds of a step, and the mean busy seconds of a device; simulate ``most`` micro-batches."""

        def simulated(count: int) -> tuple[float, float]:
            step = self.simulate(replace(layout, micro_batches=count), self.bounds(layout))
            return step.step_seconds, sum(step.busy_seconds) / layout.stages

        if layout.micro_batches <= most:
            return simulated(layout.micro_batches)
        (step, busy), (longer, busier) = simulated(most // 2), simulated(most)
        further = (layout.micro_batches - most) / (most - most // 2)
        return longer + further * (longer - step), busier + further * (busier - busy)

    def _times_key(self, layout: Layout) -> tuple[int, object, float]:
        """Return the facts that times of layers depend on: images, split and, if computed, the seconds of a launch."""
        launch = launch_seconds(self.job, self.machine, layout) if self.times is None else 0.0
        return layout.micro_batch_images, layout.split, launch

    def layer_times(self, layout: Layout) -> Sequence[LayerSeconds]:
        """Return the seconds of each layer of a layout for a micro-batch, in the mean over buckets of aspect."""
        key = images, _, launch = self._times_key(layout)
        if key not in self._times:
            times, mean = self.times or analytic_times(self.job, self.machine, launch), self.job.mean_macs
            found = times(self.job.of(layout).layers, images)
            self._times[key] = [one.times(mean) for one in found]
        return self._times[key]

    def _fastest_cut(self, layout: Layout, room: Room | None = None) -> Bounds | None:
        """Return the cuts with the shortest simulated step, or with ``room`` the least work of the busiest rank."""
        seconds = [layer.forward + layer.backward for layer in self.layer_times(layout)]
        crossing, layers = crossing_seconds(self.job, self.machine, layout), self.job.of(layout).layers
        for number, layer in enumerate(layers if layout.split != WHOLE else ()):
            swaps = sum(itertools.chain(*layer_swaps(layer)), Swaps())
            seconds[number] += swap_seconds(self.job, self.machine, layout, swaps)
            if layout.tensor != self.with_sums:
                sums = Sums(2 * layer.sums, sum(layer.summed_elements))
                seconds[number] += sum_seconds(self.job, self.machine, layout, sums)
        cuts = functools.partial(weighted, layers, seconds, layout.stages, layout.schedule, room=room)
        try:  # whether there are cuts does not depend on the share
            found = dict.fromkeys(cuts(crossing=share * crossing) for share in HIDDEN)
        except LayoutError:
            return None
        if len(found) == 1:
            return next(iter(found))
        if room is not None:  # which needs many tries
            return min(found, key=functools.partial(self.lower_bound, layout))
        few = _few(layout)
        return min(found, key=lambda cut: self.simulate(few, cut).step_seconds)


def _few(layout: Layout) -> Layout:
    return replace(layout, micro_batches=min(layout.micro_batches, FEW_PER_RANK * layout.stages))

"""Predictions of a traced step laid out another way, with the planner's models of time and memory.

The planner takes its rates from data sheets. Here they come from the trace: a stage's seconds are divided among its
layers by their flops, links have the bandwidth that accounts for the waiting that the schedule does not explain, and
loading, sending, reducing and updating keep their rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.pipeline.cuts import Stage
from ddpm_ds.predict.costs import step_costs
from ddpm_ds.predict.finished_run import FinishedRun, Setup
from ddpm_ds.predict.layouts import rank_stages
from ddpm_ds.predict.machine import usable
from ddpm_ds.predict.memory import peak_bytes
from ddpm_ds.predict.scheduler import order_of
from ddpm_ds.predict.simulate import Link, PhaseCosts, simulate

MOST_STARTUP = 0.9
"""Maximum share of a stage's seconds that counts as start-up, which is measured separately and later."""
LEAST_BACKWARD = 0.2
"""Smallest share of a checkpointed backward pass that is not recomputation."""
SLOWEST_LINK, FASTEST_LINK = 1e3, 1e13
"""Range of bytes per second in which the speed of a link is searched."""
HALVINGS = 24


@dataclass(frozen=True)
class LayerRate:
    """Seconds of a layer's passes: a constant for each micro-batch, plus a part for each image."""

    start: LayerSeconds
    per_image: LayerSeconds

    def seconds(self, images: int) -> LayerSeconds:
        """Return the seconds of the layer's passes of one micro-batch, without recomputation."""
        return LayerSeconds(
            self.start.forward + images * self.per_image.forward,
            self.start.backward + images * self.per_image.backward,
        )


class Model:
    """Predictor of a run's steps; for the traced layout it returns the traced seconds."""

    def __init__(self, facts: FinishedRun) -> None:
        self.facts, self.job, self.now = facts, facts.job, facts.setup
        self._stages = rank_stages(self.job.layers, self.now.bounds, self.now.schedule)

    @cached_property
    def layers(self) -> list[LayerRate]:
        """Rates of every layer."""
        rates: dict[int, LayerRate] = {}
        for own, stages in zip(self.facts.ranks, self._stages, strict=True):
            for phase, stage in zip(own.phases, stages, strict=True):
                rates |= enumerate(self._rates_of(stage, phase), stage.start)
        return [rates[number] for number in range(len(self.job.layers))]

    def _rates_of(self, stage: Stage, phase: PhaseCosts) -> list[LayerRate]:
        own, startup_of = self.job.layers[stage.start : stage.stop], self.facts.device.startup_of
        starts, whole = [startup_of([layer]) for layer in own], startup_of(own)
        work = sum(layer.macs for layer in own) * self.now.micro_batch_images

        def rates(measured: float, startup: float) -> tuple[float, float]:
            """Return the share of the layers' start-up that counts, and seconds per multiply-accumulate."""
            share = min(1.0, MOST_STARTUP * measured / startup) if startup else 0.0
            return share, (measured - share * startup) / work

        share, per_mac = rates(phase.forward_seconds, whole.forward)
        forwards = [(share * start.forward, per_mac * layer.macs) for layer, start in zip(own, starts, strict=True)]
        backward = phase.backward_seconds
        if self.now.checkpoint_interval:  # without the forwards that are computed again, all but the first layer's
            again = forwards[1:] if stage.start == 0 else forwards
            recomputed = math.fsum(start + self.now.micro_batch_images * per_image for start, per_image in again)
            backward = max(backward - recomputed, LEAST_BACKWARD * backward)
        share, per_mac = rates(backward, whole.backward)
        return [
            LayerRate(LayerSeconds(forward[0], share * start.backward), LayerSeconds(forward[1], per_mac * layer.macs))
            for layer, start, forward in zip(own, starts, forwards, strict=True)
        ]

    @cached_property
    def recomputation_seconds(self) -> float:
        """Mean seconds of recomputation in a step, over the ranks."""
        if not self.now.checkpoint_interval:
            return 0.0
        measured = math.fsum(phase.backward_seconds for rank in self.facts.ranks for phase in rank.phases)
        own = math.fsum(layer.backward for layer in self.layer_times(self.now.micro_batch_images))
        return self.now.micro_batches * (measured - own) / self.now.stages

    def layer_times(self, images: int) -> list[LayerSeconds]:
        """Return the passes of every layer for one micro-batch, without recomputation."""
        return [layer.seconds(images) for layer in self.layers]

    @cached_property
    def startup_seconds(self) -> float:
        """Mean seconds over the ranks that a micro-batch's layers take before they compute."""
        return sum(layer.start.forward + layer.start.backward for layer in self.layers) / self.now.stages

    @cached_property
    def bytes_per_second(self) -> float:
        """Bytes per second between ranks with which the predicted step equals the traced one; may be infinite."""
        if self.now.stages == 1 or self._step(self.now, math.inf) >= self.facts.step_seconds:
            return math.inf
        slow, fast = math.log(SLOWEST_LINK), math.log(FASTEST_LINK)
        for _ in range(HALVINGS):
            middle = (slow + fast) / 2
            if self._step(self.now, math.exp(middle)) > self.facts.step_seconds:
                slow = middle
            else:
                fast = middle
        return math.exp(fast)

    def step_seconds(self, way: Setup) -> float:
        """Return the seconds of a step laid out in another way."""
        return self._step(way, self.bytes_per_second)

    def gain(self, way: Setup) -> float:
        """Return the share of an image's time in steps that another layout saves; negative if it is slower."""
        before, after = (self.step_seconds(one) / one.images for one in (self.now, way))
        return 1 - after / before

    def _step(self, way: Setup, bytes_per_second: float) -> float:
        link, images = Link(bytes_per_second), way.micro_batch_images
        each = way.data_wait * self._per_image("data_wait_seconds") + self._per_image("load_seconds")
        costs = step_costs(
            self.job.layers,
            way,
            way.bounds,
            self.layer_times(images),
            way.element_bytes,
            reduce=lambda _, parameters: self._reduce_seconds(way, parameters, bytes_per_second),
            update=lambda _, parameters: parameters * self._update / (way.replicas if way.zero_stage else 1),
            load=lambda rank: images * each if reads_data(way, rank) else 0.0,
            send_seconds_per_byte=self._send,
        )
        order = order_of(way, costs, lambda *_: link)
        step = simulate(way.schedule, way.micro_batches, costs, lambda *_: link, programs=order)
        return step.step_seconds + fmean(rank.other_seconds for rank in self.facts.ranks)

    def _reduce_seconds(self, way: Setup, parameters: int, bytes_per_second: float) -> float:
        """Return the seconds to reduce gradients among replicas; 0 if the measured backward includes them."""
        now = self.now
        if way.replicas == 1 or (now.replicas > 1 and now.zero_stage == way.zero_stage == 2):
            return 0.0
        ring = (way.replicas - 1) / way.replicas
        if now.replicas > 1 and now.zero_stage < 2 and way.zero_stage < 2:
            measured = self._total("reduce_seconds") / self._parameters
            return measured * parameters * ring / ((now.replicas - 1) / now.replicas)
        return 2 * ring * parameters * way.element_bytes / bytes_per_second

    def _total(self, part: str) -> float:
        """Return the seconds of a part of the traced step, on all ranks."""
        return math.fsum(getattr(rank, part) for rank in self.facts.ranks)

    def _per_image(self, part: str) -> float:
        """Return the seconds per image of a part of loading, on the rank that takes longest."""
        longest = max(getattr(rank, part) for rank in self.facts.ranks)
        return longest / (self.now.micro_batches * self.now.micro_batch_images)

    @cached_property
    def _parameters(self) -> int:
        return sum(layer.parameters for layer in self.job.layers)

    @cached_property
    def _send(self) -> float:
        """Seconds per sent byte, on the rank that sends it."""
        now = self.now
        elements = sum(one.sent_elements + one.received_elements for own in self._stages for one in own)
        sent = elements * now.element_bytes * now.micro_batches * now.micro_batch_images
        return self._total("send_seconds") / sent if sent else 0.0

    @cached_property
    def _update(self) -> float:
        """Seconds per parameter of an update, on the replica that steps it."""
        owned = self._parameters / (self.now.replicas if self.now.zero_stage else 1)
        return self._total("update_seconds") / owned

    def fits(self, way: Setup) -> bool:
        """Return whether a layout fits the devices' memory or, if that is unknown, takes no more than now."""
        most, memory = peak_bytes(self.job, self.now, self.now.bounds), self.facts.device.memory_bytes
        if memory is not None:
            most = max(most, usable(memory, on_cpu=self.job.on_cpu))
        return peak_bytes(self.job, way, way.bounds) <= most


def reads_data(way: Setup, rank: int) -> bool:
    """Return whether a rank loads micro-batches: those with the first layer or the loss."""
    return rank == 0 or (way.schedule == "1f1b" and rank == way.stages - 1)

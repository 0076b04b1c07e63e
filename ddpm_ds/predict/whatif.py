"""A step laid out another way, predicted from the traced one.

The planner predicts layouts on devices that need not be there from data sheets. Here a step has been measured: a
stage's seconds are shared out to its layers by their flops, the links are as slow as explains the waiting that the
schedule does not explain, and loading, sending, reducing and updating go at the rates of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.observe.finished_run import FinishedRun
from ddpm_ds.pipeline.cuts import Schedule, describe, segments, sent_shapes
from ddpm_ds.pipeline.schedule import PhaseCosts, RankCosts
from ddpm_ds.predict.memory import ACTIVATION_SHARE, activation_bytes
from ddpm_ds.predict.simulate import Link, simulate

STATE_BYTES = 20
"""Of a parameter: weight, gradient, Adam's two moments and the averaged weight, in fp32."""
MOST_STARTUP = 0.9
"""Of a stage's seconds that may be start-up: it is measured by itself, and later."""
LEAST_BACKWARD = 0.2
"""Of a backward that recomputes, what is no recomputation."""
SLOWEST_LINK, FASTEST_LINK = 1e3, 1e13
"""Bytes per second, between which a link is looked for by halving the range so often:"""
HALVINGS = 24


@dataclass(frozen=True)
class Setup:
    """How a step is laid out, as far as a change may change it."""

    schedule: Schedule
    bounds: tuple[int, ...]
    replicas: int
    micro_batches: int
    micro_batch_images: int
    checkpoint_interval: int
    zero_stage: int
    wire_bytes: int
    """Of an element between stages."""
    data_wait: float = 1.0
    """Share that is left of what an image has to be waited for."""

    @property
    def ranks(self) -> int:
        """Of a pipeline."""
        stages = len(self.bounds) - 1
        return stages // 2 if self.schedule == "folded" else stages

    @property
    def images(self) -> int:
        """Of an optimizer step."""
        return self.replicas * self.micro_batches * self.micro_batch_images


@dataclass(frozen=True)
class LayerRate:
    """A layer's forward and backward: so much for a micro-batch, and so much more for each of its images."""

    start: LayerSeconds
    per_image: LayerSeconds

    def forward(self, images: int) -> float:
        return self.start.forward + images * self.per_image.forward

    def backward(self, images: int) -> float:
        """Without recomputation."""
        return self.start.backward + images * self.per_image.backward


def present(facts: FinishedRun) -> Setup:
    """How the traced step was laid out."""
    return Setup(
        facts.schedule,
        facts.bounds,
        facts.replicas,
        facts.micro_batches,
        facts.micro_batch_images,
        facts.checkpoint_interval,
        facts.zero_stage,
        wire_bytes=4 if facts.precision == "fp32" else 2,
    )


class Model:
    """Predicts steps of one run; the step that was traced comes out as it was, unless it was faster than its parts."""

    def __init__(self, facts: FinishedRun) -> None:
        self.facts, self.now = facts, present(facts)

    @cached_property
    def layers(self) -> list[LayerRate]:
        """Of every layer."""
        facts = self.facts
        rates: dict[int, LayerRate] = {}
        for rank, own in enumerate(facts.ranks):
            for (start, stop), phase in zip(segments(facts.bounds, facts.schedule, rank), own.phases, strict=True):
                rates |= dict(enumerate(self._rates_of(start, stop, phase), start))
        return [rates[number] for number in range(len(facts.layers))]

    def _rates_of(self, start: int, stop: int, phase: PhaseCosts) -> list[LayerRate]:
        facts = self.facts
        own, images = facts.layers[start:stop], facts.micro_batch_images
        macs = sum(layer.macs for layer in own)
        measured = LayerSeconds(phase.forward_seconds, own_backward(phase, facts.checkpoint_interval))
        startup = facts.device.startup_of(own)
        kept = LayerSeconds(
            min(1.0, MOST_STARTUP * measured.forward / startup.forward) if startup.forward else 0.0,
            min(1.0, MOST_STARTUP * measured.backward / startup.backward) if startup.backward else 0.0,
        )
        rest = LayerSeconds(
            (measured.forward - kept.forward * startup.forward) / (macs * images),
            (measured.backward - kept.backward * startup.backward) / (macs * images),
        )
        rates = []
        for layer in own:
            one = facts.device.startup_of([layer])
            rates.append(
                LayerRate(
                    LayerSeconds(kept.forward * one.forward, kept.backward * one.backward),
                    LayerSeconds(rest.forward * layer.macs, rest.backward * layer.macs),
                )
            )
        return rates

    def layer_seconds(self, images: int) -> list[float]:
        """Forward and backward of every layer, for balanced cuts."""
        return [layer.forward(images) + layer.backward(images) for layer in self.layers]

    @cached_property
    def bytes_per_second(self) -> float:
        """Of the links between ranks: infinite, or so slow that the predicted step is the traced one."""
        if self.facts.stages == 1 or self._step(self.now, math.inf) >= self.facts.step_seconds:
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
        """Of a step laid out so."""
        return self._step(way, self.bytes_per_second)

    def gain(self, way: Setup) -> float:
        """Share of an image's time in steps that another way saves; negative where it loses some."""
        before, after = (self.step_seconds(one) / one.images for one in (self.now, way))
        return 1 - after / before

    def _step(self, way: Setup, bytes_per_second: float) -> float:
        link = Link(bytes_per_second)
        costs = [self._costs(way, rank, bytes_per_second) for rank in range(way.ranks)]
        step = simulate(way.schedule, way.micro_batches, costs, lambda *_: link, keep_events=False)
        return step.step_seconds + self._other

    def _costs(self, way: Setup, rank: int, bytes_per_second: float) -> RankCosts:
        images = way.micro_batch_images
        phases = []
        for phase, (start, stop) in enumerate(segments(way.bounds, way.schedule, rank)):
            forward = sum(layer.forward(images) for layer in self.layers[start:stop])
            backward = sum(layer.backward(images) for layer in self.layers[start:stop])
            if way.checkpoint_interval:
                backward += forward
            if phase == 0 and reads_data(way, rank):
                forward += images * (way.data_wait * self._data_wait + self._load)
            sent, received = (
                images * way.wire_bytes * elements for elements in self.message_elements(way, start, stop, phase)
            )
            phases.append(
                PhaseCosts(
                    forward + sent * self._send,
                    backward + received * self._send,
                    activation_bytes=sent,
                    gradient_bytes=received,
                )
            )
        parameters = self._parameters(way, rank)
        owned = parameters / way.replicas if way.zero_stage else parameters
        reduce = self._reduce_seconds(way, parameters, bytes_per_second)
        return RankCosts(tuple(phases), reduce, owned * self._update)

    def message_elements(self, way: Setup, start: int, stop: int, phase: int) -> tuple[int, int]:
        """Elements per image that a stage sends forward, and back as gradients."""
        layers, turn = self.facts.layers, way.bounds[way.ranks] if way.schedule == "folded" else None

        def elements(cut: int) -> int:
            if cut in (0, len(layers), turn):
                return 0
            return sum(map(math.prod, sent_shapes(layers, cut, phase=phase, schedule=way.schedule)))

        return elements(stop), elements(start)

    def _parameters(self, way: Setup, rank: int) -> int:
        held = segments(way.bounds, way.schedule, rank)
        return sum(layer.parameters for start, stop in held for layer in self.facts.layers[start:stop])

    def _reduce_seconds(self, way: Setup, parameters: int, bytes_per_second: float) -> float:
        """Around a ring of all replicas, twice; in ZeRO-2, where it was measured, it is part of the backward."""
        facts, now = self.facts, self.now
        if way.replicas == 1 or (now.replicas > 1 and now.zero_stage == way.zero_stage == 2):
            return 0.0
        ring = (way.replicas - 1) / way.replicas
        if now.replicas > 1 and now.zero_stage < 2 and way.zero_stage < 2:
            held = sum(self._parameters(now, rank) for rank in range(now.ranks))
            measured = math.fsum(rank.reduce for rank in facts.ranks) / held
            return measured * parameters * ring / ((now.replicas - 1) / now.replicas)
        times = way.micro_batches if way.zero_stage == 2 else 1
        return times * 2 * ring * parameters * way.wire_bytes / bytes_per_second

    @cached_property
    def _data_wait(self) -> float:
        """Seconds an image."""
        return self._per_image([rank.data_wait for rank in self.facts.ranks])

    @cached_property
    def _load(self) -> float:
        """Seconds an image."""
        return self._per_image([rank.load for rank in self.facts.ranks])

    def _per_image(self, of_ranks: Sequence[float]) -> float:
        return max(of_ranks) / (self.now.micro_batches * self.now.micro_batch_images)

    @cached_property
    def _send(self) -> float:
        """Seconds a byte, of the rank that sends it."""
        now, sent = self.now, 0
        for rank in range(now.ranks):
            for phase, (start, stop) in enumerate(segments(now.bounds, now.schedule, rank)):
                sent += sum(self.message_elements(now, start, stop, phase))
        sent *= now.wire_bytes * now.micro_batches * now.micro_batch_images
        return math.fsum(rank.send for rank in self.facts.ranks) / sent if sent else 0.0

    @cached_property
    def _update(self) -> float:
        """Seconds a parameter, of the replica that steps it."""
        held = sum(self._parameters(self.now, rank) for rank in range(self.now.ranks))
        owned = held / self.now.replicas if self.now.zero_stage else held
        return math.fsum(rank.optimizer + rank.ema for rank in self.facts.ranks) / owned

    @cached_property
    def _other(self) -> float:
        """Seconds a step."""
        return mean([rank.other for rank in self.facts.ranks])

    # ---------------------------------------------------------------- memory

    def fits(self, way: Setup) -> bool:
        """Whether the devices' memory holds it; where it is not known, whether it takes no more than now."""
        activations, state = self.activation_bytes(way), self._state_bytes(way)
        recomputes = bool(self.now.checkpoint_interval)
        most_activations = 0 if recomputes else self.activation_bytes(self.now)
        most_state = self._state_bytes(self.now)
        if (memory := self.facts.device.memory_bytes) is not None:
            most_activations = max(most_activations, int(ACTIVATION_SHARE * memory))
            most_state = max(most_state, int((1 - ACTIVATION_SHARE) * memory))
        return (bool(way.checkpoint_interval) or activations <= most_activations) and state <= most_state

    def activation_bytes(self, way: Setup) -> int:
        """On the fullest rank, where nothing is recomputed."""
        stages = describe(self.facts.layers, way.bounds, way.schedule)
        return activation_bytes(
            stages, way.schedule, way.micro_batch_images, way.micro_batches, self.facts.element_bytes
        )

    def _state_bytes(self, way: Setup) -> int:
        return STATE_BYTES * max(self._parameters(way, rank) for rank in range(way.ranks))


def own_backward(phase: PhaseCosts, checkpoint_interval: int) -> float:
    """Seconds of a phase's backward without the forward that it computes again."""
    if not checkpoint_interval:
        return phase.backward_seconds
    return max(phase.backward_seconds - phase.forward_seconds, LEAST_BACKWARD * phase.backward_seconds)


def recomputation_seconds(facts: FinishedRun) -> float:
    """Of a step, on a rank in the mean."""
    interval = facts.checkpoint_interval
    again = [
        sum(phase.backward_seconds - own_backward(phase, interval) for phase in rank.phases) for rank in facts.ranks
    ]
    return facts.micro_batches * mean(again)


def reads_data(way: Setup, rank: int) -> bool:
    """Whether a rank loads micro-batches: the first layer's, and the loss's."""
    return rank == 0 or (way.schedule == "1f1b" and rank == way.ranks - 1)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

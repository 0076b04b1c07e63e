"""When something happened: on a device by its own events, on a CPU by the host's clock; one time for all ranks.

Times every instruction of some steps, at the one place where an instruction is executed.

While a recording is open, the entries of ``engine.execute`` and ``engine.receive`` are wrapped; closed, the engine is
as it was. What an instruction waits for inside of it becomes an event of its own, and the instruction counts from
there on:

    LoadMicroBatch   DataWait, until the loader has the micro-batch; then LoadMicroBatch: to the device, noise
    ForwardPass      RecvActivation, until its message is there; then ForwardPass
    BackwardPass     RecvGrad, likewise; then BackwardPass, with recomputation and with what ZeRO-2 reduces in it

The instructions RecvActivation, RecvGrad, ReduceTiedGrads and CommitP2P do nothing in these engines and leave no event.

The events of all ranks on one clock, and how long ranks waited for each other where all have to be there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule

from ddpm_ds.device import wait_for_device
from ddpm_ds.pipeline.cuts import stages_of
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import Channel
from ddpm_ds.pipeline.schedule import Event

MEETINGS = 8
"""How often the ranks meet to compare their clocks."""

Meeting = tuple[float, float]
"""When a rank came to a barrier and when it was let go, on the host's clock."""


class Clock(Protocol):
    """Takes marks while a step runs, and says afterwards when they were."""

    def mark(self) -> Any:
        """Now, in the order of what the device was given. Does not wait for the device."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When each mark was, on the host's clock. Waits for the device."""


class HostClock:
    """Of work that is done when a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class DeviceClock:
    """CUDA events on the stream that is current; made once per trace, which waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        wait_for_device(device)
        self._zero = self.mark()
        wait_for_device(device)
        self._zero_seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        wait_for_device(self._device)
        return [self._zero_seconds + self._zero.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock of what this process gives ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def meet() -> tuple[Meeting, ...]:
    """Meet all ranks a few times; collective."""
    meetings = []
    for _ in range(MEETINGS):
        came = time.perf_counter()
        dist.barrier()
        meetings.append((came, time.perf_counter()))
    return tuple(meetings)


def clock_offset(own: Sequence[Meeting], others: Sequence[Meeting]) -> tuple[float, float]:
    """How far a rank's clock is before another's, and by how much that may be wrong; both in seconds.

    Nobody is let go from a barrier before everybody has come, so each meeting bounds the difference from both sides.
    Clocks that the bounds allow to be one are taken for one: so they are on one host, where processes share it.
    """
    pairs = list(zip(own, others, strict=True))
    lowest = max(came - others_left for (came, _), (_, others_left) in pairs)
    highest = min(left - others_came for (_, left), (others_came, _) in pairs)
    offset = 0.0 if lowest <= 0.0 <= highest else (lowest + highest) / 2
    return offset, max(highest - offset, offset - lowest)


Value = TypeVar("Value")

NOTHING = {"RecvActivation", "RecvGrad", "ReduceTiedGrads", "CommitP2P"}
"""Instructions that are executed by doing nothing."""
RECEIVES = {"ForwardPass": "RecvActivation", "BackwardPass": "RecvGrad"}
"""What an instruction waits for that takes a message."""
ONCE = {"ReduceGrads", "OptimizerStep"}
"""Instructions of a whole step, not of a micro-batch."""


@dataclass(frozen=True)
class TracedStep:
    """An optimizer step on one rank, in seconds on that rank's host clock until they are aligned."""

    number: int
    start: float
    end: float
    """When the next step began: logging, samples and checkpoints are in it."""
    events: tuple[Event, ...]
    """In the order in which they ended; none overlaps another."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank has recorded."""

    rank: int
    pipeline_rank: int
    replica: int
    stages: tuple[int, ...]
    """Stages of the U-Net that it holds, by phase."""
    message_bytes: tuple[tuple[int, int], ...]
    """Of one message to the next stage and one to the stage before, by phase; 0 where there is none."""
    meetings: tuple[Meeting, ...]
    steps: tuple[TracedStep, ...]


class Recording:
    """Open from its making until :meth:`close`; every rank makes one at the begin of the same step."""

    def __init__(self, engine: UnetPipelineEngine, step: int) -> None:
        """Wrap the engine's instructions. Collective; waits for the device and for all ranks."""
        self._engine = engine
        self._clock: Clock = clock_of(engine.device)
        self._meetings = meet()
        self._open = True
        self._inside: tuple[str, int, int] | None = None
        self._resumed: Any = None
        self._events: list[tuple[str, int, int, Any, Any]] = []
        self._steps: list[tuple[int, Any, list[tuple[str, int, int, Any, Any]]]] = []
        self._wrapped: dict[type[schedule.PipeInstruction], tuple[Callable[..., None], Callable[..., None]]] = {}
        for kind, execute in engine.execute.items():
            if kind.__name__ not in NOTHING:
                timed = self._timed(kind.__name__, execute)
                self._wrapped[kind] = execute, timed
                engine.execute[kind] = timed
        self._receive, self._receiving = engine.receive, self._timed_receive
        engine.receive = self._receiving
        self.begin_step(step)

    @property
    def step(self) -> int:
        """The step that is being recorded."""
        return self._steps[-1][0]

    def begin_step(self, step: int) -> None:
        """The step before ends and this one begins."""
        self._events = []
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._steps.append((step, self._clock.mark(), self._events))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """An event between two steps' instructions."""
        begin = self._clock.mark()
        yield
        self._events.append((name, 0, -1, begin, self._clock.mark()))

    def close(self) -> RankTrace:
        """Leave the engine as it was; the last step ends now. Waits for the device."""
        end = self._clock.mark()
        self.abandon()
        engine = self._engine
        ends = [start for _, start, _ in self._steps[1:]] + [end]
        return RankTrace(
            rank=dist.get_rank(),
            pipeline_rank=engine.stage_id,
            replica=engine.grid.get_data_parallel_id(),
            stages=tuple(stages_of(engine.stage_id, engine.num_stages, engine.module.schedule)),
            message_bytes=tuple(_message_bytes(engine, phase) for phase in range(engine.phases)),
            meetings=self._meetings,
            steps=tuple(
                self._resolved(number, start, stop, events)
                for (number, start, events), stop in zip(self._steps, ends, strict=True)
            ),
        )

    def abandon(self) -> None:
        """Leave the engine as it was. What somebody else has wrapped since then stays, and passes through here."""
        self._open = False
        execute = self._engine.execute
        for kind, (before, timed) in self._wrapped.items():
            if execute[kind] is timed:
                execute[kind] = before
        if self._engine.receive is self._receiving:
            self._engine.receive = self._receive

    def _resolved(self, number: int, start: Any, end: Any, events: list[tuple[str, int, int, Any, Any]]) -> TracedStep:
        first, last, *marks = self._clock.seconds([start, end, *(mark for event in events for mark in event[3:])])
        spans = zip(marks[::2], marks[1::2], strict=True)
        return TracedStep(
            number,
            first,
            last,
            tuple(Event(*event[:3], *span) for event, span in zip(events, spans, strict=True)),
        )

    def _timed(self, name: str, execute: Callable[..., None]) -> Callable[..., None]:
        run = self._with_timed_loader(execute) if name == "LoadMicroBatch" else execute

        def timed(**arguments: Any) -> None:
            if not self._open:
                execute(**arguments)
                return
            phase = arguments.get("phase", 0)
            number = -1 if name in ONCE else self._numbers[name, phase]
            self._numbers[name, phase] += 1
            self._inside, self._resumed = (name, phase, number), None
            begin = self._clock.mark()
            run(**arguments)
            end = self._clock.mark()
            self._events.append((name, phase, number, begin if self._resumed is None else self._resumed, end))
            self._inside = None

        return timed

    def _with_timed_loader(self, execute: Callable[..., None]) -> Callable[..., None]:
        engine = self._engine

        def run(**arguments: Any) -> None:
            loader = engine.data_iterator
            engine.data_iterator = _Timed(loader, self._waiting)
            try:
                execute(**arguments)
            finally:
                engine.data_iterator = loader

        return run

    def _timed_receive(self, channel: Channel) -> Any:
        if self._inside is None:
            return self._receive(channel)
        return self._waiting(RECEIVES[self._inside[0]], lambda: self._receive(channel))

    def _waiting(self, name: str, wait: Callable[[], Value]) -> Value:
        """Wait inside of an instruction, as an event before it."""
        assert self._inside is not None
        begin = self._clock.mark()
        value = wait()
        self._resumed = self._clock.mark()
        self._events.append((name, *self._inside[1:], begin, self._resumed))
        return value


class _Timed(Iterator[Any]):
    """A loader, for each micro-batch of which is waited in ``waiting``."""

    def __init__(self, loader: Iterator[Any], waiting: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._loader, self._waiting = loader, waiting

    def __next__(self) -> Any:
        return self._waiting("DataWait", lambda: next(self._loader))


def _message_bytes(engine: UnetPipelineEngine, phase: int) -> tuple[int, int]:
    wires = engine.wires(phase, engine.micro_batch_size)
    activations, gradients = wires.activations_out, wires.gradients_out
    return activations.message_bytes if activations else 0, gradients.message_bytes if gradients else 0


WAIT_FOR_RANKS = "WaitForRanks"
"""The event of waiting for other ranks that must agree on a step, or whose gradients are to be added."""


def aligned(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], float]:
    """The traces of all ranks on one clock, which begins with the first step, and by how much it may be wrong.

    Ranks leave ReduceGrads, where they add gradients, and OptimizerStep, where all agree on overflow and norm, when the
    last has come: what comes before becomes an event of its own, :data:`WAIT_FOR_RANKS`.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    offsets = [clock_offset(trace.meetings, traces[0].meetings) for trace in traces]
    start = min(trace.steps[0].start - offset for trace, (offset, _) in zip(traces, offsets, strict=True))
    moved = [
        [_moved(step, offset + start) for step in trace.steps]
        for trace, (offset, _) in zip(traces, offsets, strict=True)
    ]
    replicas = [
        [rank for rank, trace in enumerate(traces) if trace.pipeline_rank == number]
        for number in sorted({trace.pipeline_rank for trace in traces})
    ]
    meetings = [("ReduceGrads", members) for members in replicas] + [("OptimizerStep", list(range(len(traces))))]
    for number in range(len(traces[0].steps)):
        for name, members in meetings:
            shared = _with_waits([moved[rank][number] for rank in members], name)
            for rank, step in zip(members, shared, strict=True):
                moved[rank][number] = step
    return (
        tuple(replace(trace, steps=tuple(steps)) for trace, steps in zip(traces, moved, strict=True)),
        max(error for _, error in offsets[1:]) if len(offsets) > 1 else 0.0,
    )


def _moved(step: TracedStep, back: float) -> TracedStep:
    return replace(
        step,
        start=step.start - back,
        end=step.end - back,
        events=tuple(event._replace(start=event.start - back, end=event.end - back) for event in step.events),
    )


def _with_waits(steps: Sequence[TracedStep], name: str) -> list[TracedStep]:
    """The same step on several ranks, its instruction ``name`` beginning on each when the last rank has come to it.

    Where a rank was through before the last one came, nobody has waited.
    """
    found = [event for step in steps for event in step.events if event.instruction == name]
    latest = max((event.start for event in found), default=0.0)
    if any(event.end < latest for event in found):
        return list(steps)
    return [
        replace(
            step,
            events=tuple(
                part
                for event in step.events
                for part in (
                    (event._replace(instruction=WAIT_FOR_RANKS, end=latest), event._replace(start=latest))
                    if event.instruction == name and event.start < latest
                    else (event,)
                )
            ),
        )
        for step in steps
    ]

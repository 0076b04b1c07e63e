"""Times every instruction of some steps, at the one place where an instruction is executed.

While a recording is open, the entries of ``engine.execute`` and ``engine.receive`` are wrapped; closed, the engine is
as it was. What an instruction waits for inside of it becomes an event of its own, and the instruction counts from
there on:

    LoadMicroBatch   DataWait, until the loader has the micro-batch; then LoadMicroBatch: to the device, noise
    ForwardPass      RecvActivation, until its message is there; then ForwardPass
    BackwardPass     RecvGrad, likewise; then BackwardPass, with recomputation and with what ZeRO-2 reduces in it

The instructions RecvActivation, RecvGrad, ReduceTiedGrads and CommitP2P do nothing in these engines and leave no event.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.runtime.pipe import schedule

from ddpm_ds.observe.clocks import Clock, Meeting, clock_of, meet
from ddpm_ds.pipeline.boundary import Channel
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.partition import stages_of
from ddpm_ds.pipeline.simulate import Event

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

"""Observers of a training run: their interface, the clock of pauses, and the recording of all instructions of steps.

The loop calls an observer when each optimizer step begins and around activities between two steps. It may wrap the
engine's instructions in the steps that it watches.

While a :class:`Recording` is open, the engine's instructions and ``engine.receive`` are wrapped. A wait inside an
instruction becomes an event of its own, and the event of the instruction begins when the wait ends:

    LoadMicroBatch   DataWait, until the loader has the micro-batch; then LoadMicroBatch: to the device, noise
    ForwardPass      RecvActivation, until its message is there; then ForwardPass
    BackwardPass     RecvGrad, likewise; then BackwardPass, with recomputation and the reductions of ZeRO-2

:func:`aligned` puts the ranks' events on one clock and finds how long ranks waited for each other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from ddpm_ds.ground.device import wait_for_device
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.formats import read_json
from ddpm_ds.pipeline.cuts import stages_of
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import Channel, barrier
from ddpm_ds.pipeline.schedule import Event, Instruction
from ddpm_ds.unet.blocks import Carry

Value = TypeVar("Value")
BARRIERS = 8  # barriers that the ranks pass to compare their clocks
RECEIVES = {"ForwardPass": "RecvActivation", "BackwardPass": "RecvGrad", "InputGradients": "RecvGrad"}
"""Name of the wait for a message inside an instruction, by the instruction."""
WAIT_FOR_RANKS = "WaitForRanks"
"""Name of a wait for ranks that must agree on a step, or have gradients to be added."""


class Report(Protocol):
    """Destination of findings; on ranks other than 0 they are dropped."""

    def log(self, line: str) -> None:
        """Show a line to the user."""

    def observed(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of an optimizer step."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a file or folder with the run, in ``folder``."""


class Observer:
    """Observer of some optimizer steps; all ranks have the same observers, and call them at the same steps."""

    def begin_step(self, step: int) -> None:
        """Begin optimizer step ``step``, counted from 1 over the whole run; a rollback repeats some numbers.

        Collective: it may report earlier steps.
        """

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Surround an activity between two steps: ``checkpoint`` or ``sampling``."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """End the run: no further step comes. Called on all ranks, like :meth:`begin_step`."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def begin_step(self, step: int) -> None:
        for observer in self._observers:
            observer.begin_step(step)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.span(name))
            yield

    def finish(self) -> None:
        for observer in self._observers:
            observer.finish()


@contextlib.contextmanager
def instructions_wrapped(engine: Any, around: Callable[[Instruction, Callable[[], None]], None]) -> Iterator[None]:
    """Call ``around(instruction, execute)`` for every instruction of the engine's program, instead of ``execute()``.

    Afterwards the engine is as before, except that the wrapper of another observer around this one stays.
    """
    active, before = True, dict(engine.execute)

    def run(execute: Callable[[Instruction], None], instruction: Instruction) -> None:
        if active:
            around(instruction, functools.partial(execute, instruction))
        else:
            execute(instruction)

    ours = {name: functools.partial(run, execute) for name, execute in before.items()}
    engine.execute.update(ours)
    try:
        yield
    finally:
        active = False
        engine.execute.update({name: before[name] for name in before if engine.execute[name] is ours[name]})


@contextlib.contextmanager
def reported(report: Report, path: Path) -> Iterator[None]:
    """Log an OSError of this block as one line, with ``path`` if the error names no file; training continues."""
    try:
        yield
    except OSError as error:
        report.log(f"{error.filename or path} can't be written ({error.strerror}); training continues")


def keep(report: Report, folder: str, files: Mapping[Path, str | bytes]) -> bool:
    """Write files and keep them with the run in ``folder``; if the disk refuses, log that and return False."""
    with reported(report, next(iter(files))):
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content.encode() if isinstance(content, str) else content)
        for path in files:
            report.artifact(path, folder)
        return True
    return False


FILE = Path("trace", "pauses.json")  # in a run's folder


@dataclass(frozen=True)
class Pauses:
    """Seconds from the start of a run's first step to the end of its last, and how many of them were pauses."""

    seconds: float = 1.0
    checkpoint_seconds: float = 0.0
    sampling_seconds: float = 0.0

    @property
    def checkpoint_share(self) -> float:
        return self.checkpoint_seconds / self.seconds

    @property
    def sampling_share(self) -> float:
        return self.sampling_seconds / self.seconds


class PauseClock(Observer):
    """Sum of the pauses between a run's first and last step, written at its end by rank 0, which has a ``run_dir``."""

    def __init__(self, run_dir: Path | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._begin: float | None = None
        self._paused: Counter[str] = Counter()
        self._since_step: Counter[str] = Counter()

    def begin_step(self, step: int) -> None:
        if self._begin is None:
            self._begin = self._clock()
        else:
            self._paused += self._since_step
        self._since_step.clear()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._since_step[name] += self._clock() - begin  # type: ignore[assignment]

    def finish(self) -> None:
        if self._run_dir is None or self._begin is None:
            return
        whole = self._clock() - self._begin - self._since_step.total()
        pauses, file = Pauses(whole, self._paused["checkpoint"], self._paused["sampling"]), self._run_dir / FILE
        with contextlib.suppress(OSError):  # a full disk: the run ends all the same
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, (json.dumps(asdict(pauses)) + "\n").encode())


def read_pauses(run_dir: Path) -> Pauses:
    """Read the pauses of a run; a run that was killed has no file and no pauses.

    Raises:
        OSError, ValueError, TypeError: the file is damaged.
    """
    file = run_dir / FILE
    return Pauses(**read_json(file)) if file.is_file() else Pauses()


class Barrier(NamedTuple):
    """Times at which a rank reached a barrier and was released from it, on its host's clock."""

    came: float
    left: float


@dataclass(frozen=True)
class TracedStep:
    """Optimizer step on one rank, in seconds on that rank's host clock until steps are aligned."""

    number: int
    start: float
    end: float
    """Time at which the next step began; includes logging, samples and checkpoints."""
    events: tuple[Event, ...]
    """Events in the order in which they ended; none overlaps another."""

    def moved(self, back: float) -> TracedStep:
        """Return the step with all times moved back by ``back`` seconds."""
        events = tuple(event._replace(start=event.start - back, end=event.end - back) for event in self.events)
        return TracedStep(self.number, self.start - back, self.end - back, events)


@dataclass(frozen=True)
class RankTrace:
    """Recording of one rank."""

    rank: int
    pipeline_rank: int
    replica: int
    stages: tuple[int, ...]
    """Stages of the U-Net that the rank holds, by phase."""
    message_bytes: tuple[tuple[int, int], ...]
    """Bytes of a message to the next stage and of one to the stage before, by phase; 0 if there is none."""
    barriers: tuple[Barrier, ...]
    steps: tuple[TracedStep, ...]
    part: int = 0
    """Place in the tensor group."""
    swap_seconds: float = 0.0
    """Seconds of a step in which passes wait for swaps with the space group."""


class Clock:
    """Clock of CUDA events on the current stream, made once per trace; on a CPU, which works at once, the host's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        wait_for_device(device)
        self._zero = self.mark()
        wait_for_device(device)
        self._zero_seconds = time.perf_counter()

    def mark(self) -> Any:
        """Return a mark of this moment in the order of the device's work, without waiting for the device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the time of each mark on the host's clock. Waits for the device."""
        wait_for_device(self._device)
        if self._device.type != "cuda":
            return list(marks)
        return [self._zero_seconds + self._zero.elapsed_time(mark) / 1e3 for mark in marks]


class Recording:
    """Recorder that runs from construction until :meth:`close`; every rank makes one at the start of the same step."""

    def __init__(self, engine: UnetPipelineEngine, step: int) -> None:
        """Wrap the engine's instructions. Collective; waits for the device and for all ranks."""
        self._engine = engine
        self._clock = Clock(engine.device)
        self._barriers: list[Barrier] = []
        for _ in range(BARRIERS):
            came = time.perf_counter()
            barrier()
            self._barriers.append(Barrier(came, time.perf_counter()))
        self._inside: tuple[str, int, int] | None = None
        self._resumed: Any = None
        self._steps: list[tuple[int, Any, list[Event]]] = []  # number, mark of the start, events between two marks
        self._wrapping = contextlib.ExitStack()
        self._wrapping.enter_context(instructions_wrapped(engine, self._timed))
        receive = engine.receive

        def timed_receive(channel: Channel) -> Carry:
            if self._inside is None:
                return receive(channel)
            return self._waiting(RECEIVES[self._inside[0]], lambda: receive(channel))

        engine.receive = timed_receive
        self._wrapping.callback(setattr, engine, "receive", receive)
        self._swaps = list[Any]()  # marks before and after each wait
        if (space := engine.module.space).size > 1:
            swap = space.swap

            def wait(finish: Callable[[], Value]) -> Value:  # in the middle of a pass
                begin, found = self._clock.mark(), finish()
                if self._inside is not None:
                    self._swaps += begin, self._clock.mark()
                return found

            vars(space)["swap"] = lambda *given: functools.partial(wait, swap(*given))
            self._wrapping.callback(vars(space).pop, "swap")
        self.begin_step(step)

    @property
    def step(self) -> int:
        """Number of the step that is being recorded."""
        return self._steps[-1][0]

    def begin_step(self, step: int) -> None:
        """End the step before and begin ``step``."""
        self._events: list[Event] = []
        self._steps.append((step, self._clock.mark(), self._events))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record an event between two steps' instructions."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._events.append(Event(name, 0, -1, begin, self._clock.mark()))

    def close(self) -> RankTrace:
        """End the last step and restore the engine. Waits for the device."""
        self.begin_step(self.step + 1)  # which is not taken
        self.abandon()
        engine, steps = self._engine, []
        for (number, start, events), (_, end, _) in itertools.pairwise(self._steps):
            times = self._clock.seconds([start, end, *(mark for event in events for mark in event[3:])])
            spans = zip(times[2::2], times[3::2], strict=True)
            timed = tuple(Event(*event[:3], *span) for event, span in zip(events, spans, strict=True))
            steps.append(TracedStep(number, times[0], times[1], timed))
        waits = self._clock.seconds(self._swaps)
        channels = (engine.stage_channels(phase, engine.micro_batch_size) for phase in range(engine.phases))
        ways = ((one.activations_out, one.gradients_out) for one in channels)
        sizes = ((on.message_bytes if on else 0, back.message_bytes if back else 0) for on, back in ways)
        return RankTrace(
            rank=dist.get_rank(),
            pipeline_rank=engine.stage_id,
            replica=engine.grid.get_data_parallel_id(),
            part=engine.module.tensor.rank,
            stages=tuple(stages_of(engine.stage_id, engine.num_stages, engine.module.schedule)),
            message_bytes=tuple(sizes),
            barriers=tuple(self._barriers),
            steps=tuple(steps),
            swap_seconds=(sum(waits[1::2]) - sum(waits[::2])) / len(steps),
        )

    def abandon(self) -> None:
        """Restore the engine."""
        self._wrapping.close()

    def _timed(self, instruction: Instruction, execute: Callable[[], None]) -> None:
        name, phase, numbers = instruction
        number = numbers[0] if numbers else -1
        self._inside, self._resumed = (name, phase, number), None
        engine, loader, begin = self._engine, self._engine.data_iterator, self._clock.mark()
        if name == "LoadMicroBatch":
            engine.data_iterator = iter(lambda: self._waiting("DataWait", lambda: next(loader)), None)
        try:
            execute()
        finally:
            engine.data_iterator = loader
        end = self._clock.mark()
        self._events.append(Event(name, phase, number, begin if self._resumed is None else self._resumed, end))
        self._inside = None

    def _waiting(self, name: str, wait: Callable[[], Value]) -> Value:
        """Wait inside an instruction, recorded as an event before it."""
        assert self._inside is not None
        begin = self._clock.mark()
        value = wait()
        self._resumed = self._clock.mark()
        self._events.append(Event(name, *self._inside[1:], begin, self._resumed))
        return value


def clock_offset(own: Sequence[Barrier], others: Sequence[Barrier]) -> tuple[float, float]:
    """Return by how many seconds a rank's clock is ahead of another's, and the largest possible error of this.

    All ranks reach a barrier before any leaves it, so each bounds the difference from both sides. If 0 is within the
    bounds, the clocks are taken to be the same, as they are for processes of one host.
    """
    lowest = max(mine.came - other.left for mine, other in zip(own, others, strict=True))
    highest = min(mine.left - other.came for mine, other in zip(own, others, strict=True))
    offset = 0.0 if lowest <= 0.0 <= highest else (lowest + highest) / 2
    return offset, max(highest - offset, offset - lowest)


def aligned(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], float]:
    """Put the traces of all ranks on one clock, which begins with the first step.

    Ranks leave ReduceGrads and OptimizerStep only after the last has begun it: the time until then becomes an event of
    its own, :data:`WAIT_FOR_RANKS`. Returns the traces by rank, and the seconds by which two clocks may still differ.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    offsets, errors = zip(*(clock_offset(trace.barriers, traces[0].barriers) for trace in traces), strict=True)
    start = min(trace.steps[0].start - offset for trace, offset in zip(traces, offsets, strict=True))
    moved = [[step.moved(shift + start) for step in trace.steps] for trace, shift in zip(traces, offsets, strict=True)]
    sharing = [("OptimizerStep", list(range(len(traces))))]
    for number in {trace.pipeline_rank for trace in traces}:
        sharing.append(("ReduceGrads", [rank for rank, trace in enumerate(traces) if trace.pipeline_rank == number]))
    for (name, ranks), number in itertools.product(sharing, range(len(traces[0].steps))):
        begun = [one for rank in ranks for one in moved[rank][number].events if one.instruction == name]
        latest = max((one.start for one in begun), default=0.0)
        if any(one.end < latest for one in begun):  # a rank that ends before the last one begins did not wait for it
            continue
        for rank in ranks:
            events: list[Event] = []
            for event in moved[rank][number].events:
                if event.instruction == name and event.start < latest:
                    events.append(event._replace(instruction=WAIT_FOR_RANKS, end=latest))
                    event = event._replace(start=latest)
                events.append(event)
            moved[rank][number] = replace(moved[rank][number], events=tuple(events))
    ranks_moved = tuple(replace(trace, steps=tuple(steps)) for trace, steps in zip(traces, moved, strict=True))
    return ranks_moved, max(errors[1:], default=0.0)

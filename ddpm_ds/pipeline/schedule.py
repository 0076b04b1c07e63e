"""Schedules as data: the instructions that each rank executes in one optimizer step, in order.

A placement says which stages a rank holds.

1f1b     a line: stage s on rank s.

folded   a V over 2P stages: rank r holds stage r (phase 0, on the way down the U-Net) and stage 2P - 1 - r (phase 1,
         on the way up), so that skips never leave their rank::

             rank 0    stage 0 ─▶ h, emb          loss ◀─ stage 2P - 1
             rank 1       stage 1 ─▶ ...              ... ◀─ stage 2P - 2
             rank P - 1       stage P - 1 ───turn───▶ stage P

A schedule is an order of passes for each rank; :func:`completed` adds loads just before their pass, sends just after
it, and at the end the reduction and the optimizer's step. DeepSpeed's own schedules give two of these orders. The
engine, the simulator and the tests' model of communicators use the same programs.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.schedule import DualPipeVSchedule, TrainSchedule

from ddpm_ds.pipeline.cuts import folds
from ddpm_ds.schema.layout import Schedule

Name = Literal[
    "LoadMicroBatch",
    "ForwardPass",
    "BackwardPass",
    "InputGradients",
    "WeightGradients",
    "SendActivation",
    "SendGrad",
    "ReduceGrads",
    "OptimizerStep",
]
BACKWARDS: tuple[Name, ...] = ("BackwardPass", "InputGradients")
"""Passes that send gradients to the previous stage: a whole backward, and one that defers weight gradients."""
PASSES: tuple[Name, ...] = ("ForwardPass", *BACKWARDS, "WeightGradients")
"""Instructions that compute with the layers."""
PassKind = Literal["whole", "inputs", "weights"]
"""Parameters that get gradients in a pass: all of a phase, all but the deferred ones, or the deferred ones."""
KINDS: dict[Name, PassKind] = {"BackwardPass": "whole", "InputGradients": "inputs", "WeightGradients": "weights"}


class Instruction(NamedTuple):
    """Instruction of a rank's program."""

    name: Name
    phase: int = 0
    micro_batches: tuple[int, ...] = ()
    """Numbers of its micro-batches within the step: one, several for WeightGradients, or none at the step's end."""

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.micro_batches))
        return f"{self.name} {numbers} of phase {self.phase}" if numbers else self.name


Program = tuple[Instruction, ...]
PROGRAMS = "programs.txt"
"""File of a run's folder with the passes of every rank, if they are planned."""


class Event(NamedTuple):
    """Instruction with its times, in seconds from the start of the step."""

    instruction: str
    phase: int
    micro_batch: int
    """Number of the micro-batch; -1 for ReduceGrads and OptimizerStep."""
    start: float
    end: float


def phases_of(schedule: Schedule) -> int:
    """Return the number of stages that a rank holds."""
    return 2 if folds(schedule) else 1


def neighbours(schedule: Schedule, ranks: int, rank: int, phase: int) -> tuple[int | None, int | None]:
    """Return the ranks that a stage's carry comes from and goes to; None where it begins, ends or turns."""
    up, down = rank - 1 if rank else None, rank + 1 if rank < ranks - 1 else None
    return (up, down) if phase == 0 else (down, up)


def most_in_flight(programs: Sequence[Program]) -> int:
    """Return how many messages of a channel may be under way: one more than a rank has micro-batches in a phase."""
    most = 0
    for own in programs:
        begun: Counter[int] = Counter()
        for name, phase, _ in own:
            begun[phase] += (name == "ForwardPass") - (name in BACKWARDS)
            most = max(most, begun[phase])
    return most + 1


def posted_before(own: Program) -> list[list[Instruction]]:
    """Return for each instruction the passes whose messages' receives are posted before it.

    That is one pass ahead: a posted receive holds multiprocessors of a GPU until its message comes, and a message needs
    the time of a pass at most to travel.
    """
    posted: list[list[Instruction]] = [[] for _ in own]
    before = 0
    for place, one in enumerate(own):
        if one.name in PASSES:
            posted[before].append(one)
            before = place
    return posted


def most_kept(own: Program) -> int:
    """Return how many micro-batches a rank keeps at most, from their first forward to their last weight gradients."""
    begun = most = 0
    over = {phase: 0 for _, phase, _ in own}
    for name, phase, numbers in own:
        if name == "ForwardPass" and phase == 0:
            begun += 1
        elif name in ("BackwardPass", "WeightGradients"):
            over[phase] += len(numbers)
        most = max(most, begun - min(over.values()))
    return most


def split_passes(own: Program) -> set[tuple[int, int]]:
    """Return the phases and micro-batches whose weight gradients have passes of their own."""
    return {(one.phase, number) for one in own if one.name == "InputGradients" for number in one.micro_batches}


def gradient_passes(own: Program) -> Counter[tuple[int, PassKind]]:
    """Return how many passes of each phase and kind add to the gradients in a step."""
    return Counter((one.phase, KINDS[one.name]) for one in own if one.name in KINDS)


def weight_passes(programs: Sequence[Program], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return by rank and phase how many passes compute weight gradients; ZeRO-2 reduces them after each."""
    counts = (Counter(one.phase for one in own if one.name in ("BackwardPass", "WeightGradients")) for own in programs)
    return tuple(tuple(count[phase] for phase in range(phases_of(schedule))) for count in counts)


def completed(passes: Iterable[Instruction], schedule: Schedule, ranks: int, rank: int) -> Program:
    """Return the complete program of a rank from its passes, adding loads, sends and the end of the step."""
    program: list[Instruction] = []
    phases = range(phases_of(schedule))
    routes = [neighbours(schedule, ranks, rank, phase) for phase in phases]
    loads = [(rank == 0 and phase == 0) or (len(phases) == 1 and rank == ranks - 1) for phase in phases]
    for own in passes:
        name, phase, numbers = own
        before, after = routes[phase]
        if name == "ForwardPass" and loads[phase]:
            program.append(Instruction("LoadMicroBatch", phase, numbers))
        program.append(own)
        if name == "ForwardPass" and after is not None:
            program.append(Instruction("SendActivation", phase, numbers))
        if name in BACKWARDS and before is not None:
            program.append(Instruction("SendGrad", phase, numbers))
    return (*program, Instruction("ReduceGrads"), Instruction("OptimizerStep"))


def loaded(own: Program) -> Program:
    """Return a rank's program with a load before each first forward, for layers that read a part of a micro-batch."""
    program: list[Instruction] = []
    for one in own:
        if one.name == "ForwardPass" and one.phase == 0 and (not program or program[-1].name != "LoadMicroBatch"):
            program.append(one._replace(name="LoadMicroBatch"))
        program.append(one)
    return tuple(program)


@functools.lru_cache(maxsize=4096)
def program(schedule: Schedule, micro_batches: int, ranks: int, rank: int) -> Program:
    """Return a rank's program by DeepSpeed's schedule of this name: 1F1B, or for the fold DualPipeV.

    Raises ValueError if a fold has fewer than ``2 * ranks`` micro-batches, or the schedule has no order of its own.
    """
    if schedule == "planned":
        raise ValueError("the order of a planned schedule follows from costs")
    kind = DualPipeVSchedule if schedule == "folded" else TrainSchedule
    names: dict[type, Name] = {instructions.ForwardPass: "ForwardPass", instructions.BackwardPass: "BackwardPass"}
    counted: Counter[tuple[str, int]] = Counter()
    passes = []
    for commands in kind(micro_batches=micro_batches, stages=ranks, stage_id=rank).steps():
        for command in commands:
            if (name := names.get(type(command))) is not None:
                phase = command.kwargs.get("phase", 0)
                passes.append(Instruction(name, phase, (counted[name, phase],)))
                counted[name, phase] += 1
    return completed(passes, schedule, ranks, rank)


def zero_bubble_v(micro_batches: int, ranks: int, rank: int) -> Program:
    """Return a rank's program by ZB-V (Qi et al. 2024, arXiv:2405.15362): on a fold, every backward split in two."""
    names: dict[str, Name] = {"f": "ForwardPass", "i": "InputGradients", "w": "WeightGradients"}
    inside, count = ranks - rank, max(2 * ranks - 1, micro_batches)
    begin = ["f0"] * (2 * inside - 1) + ["f1", "f0"] * rank + ["f1", "i1", "w1"] * inside
    steady = ["f0", "i0", "w0", "f1", "i1", "w1"] * (count - ranks)
    end = ["i0", "i1"] * rank + ["i0", "w0"] * inside + ["w1"] * count + ["w0"] * count
    counted: Counter[str] = Counter()
    passes = []
    for word in begin + steady + end:
        if (number := counted[word]) < micro_batches:
            passes.append(Instruction(names[word[0]], int(word[1]), (number,)))
        counted[word] += 1
    return completed(passes, "planned", ranks, rank)


def accumulated(micro_batches: int, together: int) -> Program:
    """Return the program of a single stage that computes weight gradients of ``together`` micro-batches at once."""
    passes = []
    for first in range(0, micro_batches, together):
        numbers = tuple(range(first, min(first + together, micro_batches)))
        for number in numbers:
            passes += [Instruction("ForwardPass", 0, (number,)), Instruction("InputGradients", 0, (number,))]
        passes.append(Instruction("WeightGradients", 0, numbers))
    return completed(passes, "1f1b", 1, 0)


def written(programs: Sequence[Program]) -> str:
    """Format each rank's passes as a line: f, b, i (inputs) or w (weights), capitals in phase 1; then numbers."""
    letters, lines = dict(zip(PASSES, "fbiw", strict=True)), []
    for rank, own in enumerate(programs):
        passes = [(letters[name], phase, numbers) for name, phase, numbers in own if name in letters]
        words = [(one.upper() if phase else one) + ",".join(map(str, numbers)) for one, phase, numbers in passes]
        lines.append(f"rank {rank}: {' '.join(words)}\n")
    return "".join(lines)


def check_programs(programs: Sequence[Program], schedule: Schedule, micro_batches: int) -> None:
    """Refuse programs that would not compute one step's gradients, each once.

    In each of its phases a rank takes every micro-batch forwards once and backwards once, in the order of their
    numbers, so that both ends of an edge have its messages in one order. Forwards phase 0 comes first, backwards
    phase 1. A micro-batch's weight gradients come once, after its input gradients. Raises ValueError, which names the
    rank and the micro-batch.
    """
    phases = range(phases_of(schedule))
    for rank, own in enumerate(programs):
        where = f"rank {rank} of {len(programs)}"
        done: dict[tuple[str, int], list[int]] = {
            (kind, phase): [] for kind in ("forward", "backward", "split", "weights") for phase in phases
        }
        for name, phase, numbers in own:
            for number in numbers:
                what = f"{where}: {name} of micro-batch {number} in phase {phase}"
                if name == "ForwardPass":
                    if phase and number not in done["forward", 0]:
                        raise ValueError(f"{what} comes before that of phase 0")
                    done["forward", phase].append(number)
                elif name in BACKWARDS:
                    if number not in done["forward", phases[-1]]:
                        raise ValueError(f"{what} comes before its forward")
                    if phase < phases[-1] and number not in done["backward", phases[-1]]:
                        raise ValueError(f"{what} comes before that of phase {phases[-1]}")
                    done["backward", phase].append(number)
                    if name == "InputGradients":
                        done["split", phase].append(number)
                elif name == "WeightGradients":
                    if number not in done["split", phase]:
                        raise ValueError(f"{what} comes before its InputGradients")
                    done["weights", phase].append(number)
        for phase in phases:
            for kind in ("forward", "backward"):
                if (found := done[kind, phase]) != list(range(micro_batches)):
                    expected = f"not 0 to {micro_batches - 1} in order"
                    raise ValueError(f"{where}: {kind}s of phase {phase} are {found}, {expected}")
            if sorted(done["weights", phase]) != sorted(done["split", phase]):
                raise ValueError(
                    f"{where}: weight gradients of phase {phase} are of {sorted(done['weights', phase])}, but input "
                    f"gradients were split for {sorted(done['split', phase])}"
                )
        if own != completed((one for one in own if one.name in PASSES), schedule, len(programs), rank):
            raise ValueError(f"{where}: loads, sends or the end of the step are not where they belong")

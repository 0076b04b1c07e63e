"""Order of the instructions that a rank executes, from DeepSpeed's two schedules.

1f1b     stage s on rank s.

folded   a V over 2P stages: rank r holds stage r (phase 0, on the way down the U-Net) and stage 2P - 1 - r (phase 1,
         on the way up), so that what an encoder layer gives a decoder layer never leaves its rank::

             rank 0    stage 0 ─▶ h, emb          loss ◀─ stage 2P - 1
             rank 1       stage 1 ─▶ ...              ... ◀─ stage 2P - 2
             rank P - 1       stage P - 1 ───turn───▶ stage P

The engines execute these streams, and the simulator walks the same ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.schedule import DualPipeVSchedule, PipeSchedule, TrainSchedule

from ddpm_ds.pipeline.cuts import Schedule


def instruction_stream(schedule: Schedule, *, micro_batches: int, ranks: int, rank: int) -> PipeSchedule:
    """Return the instructions of one training step on one rank of a pipeline; ``steps()`` yields them in groups.

    Raises:
        ValueError: the fold is given fewer than ``2 * ranks`` micro-batches.
    """
    kind = DualPipeVSchedule if schedule == "folded" else TrainSchedule
    return kind(micro_batches=micro_batches, stages=ranks, stage_id=rank)


def most_in_flight(schedule: Schedule, ranks: int) -> int:
    """Return the largest number of messages of one channel, sent but not yet received, that does not hold up the
    schedule.

    A rank goes back with a micro-batch only when the next rank has done so, and holds no more than so many.
    """
    return (2 * ranks if schedule == "folded" else ranks) + 1


class Event(NamedTuple):
    """An instruction that took time, in seconds from the start of the step."""

    instruction: str
    phase: int
    micro_batch: int
    """Number of the micro-batch; -1 for ReduceGrads and OptimizerStep."""
    start: float
    end: float


class Step(NamedTuple):
    """Instruction of a rank's program, with the micro-batch that DeepSpeed's buffer numbers hide."""

    instruction: str
    phase: int
    micro_batch: int
    receives: bool
    """Whether the input of this pass is a message from another rank."""


_RECEIVES = {instructions.RecvActivation: "ForwardPass", instructions.RecvGrad: "BackwardPass"}
_TIMED = (
    instructions.ForwardPass,
    instructions.BackwardPass,
    instructions.SendActivation,
    instructions.SendGrad,
)


@functools.lru_cache(maxsize=4096)
def program(schedule: Schedule, micro_batches: int, ranks: int, rank: int) -> tuple[Step, ...]:
    """Return the passes and sends of a rank's instruction stream, in order, up to the reduction of its gradients.

    The n-th pass, send or receive of a kind in a phase is that of micro-batch n.

    Raises:
        ValueError: the schedule can't have so few micro-batches.
        RuntimeError: a pass comes before the receive of its message, or something follows the reduction.
    """
    counted: Counter[tuple[str, int]] = Counter()
    received: Counter[tuple[str, int]] = Counter()
    steps: list[Step] = []
    reduced = False
    for commands in instruction_stream(schedule, micro_batches=micro_batches, ranks=ranks, rank=rank).steps():
        for command in commands:
            kind, phase = type(command), command.kwargs.get("phase", 0)
            if kind in _RECEIVES:
                received[_RECEIVES[kind], phase] += 1
            elif kind in _TIMED:
                key = (kind.__name__, phase)
                if reduced:
                    raise RuntimeError(f"rank {rank} of {ranks}: {kind.__name__} comes after the gradients are reduced")
                if received[key] and received[key] <= counted[key]:
                    raise RuntimeError(f"rank {rank} of {ranks}: {kind.__name__} {counted[key]} has nothing to work on")
                steps.append(Step(*key, counted[key], received[key] > 0))
                counted[key] += 1
            reduced |= kind is instructions.ReduceGrads
    for key, count in received.items():
        if count != counted[key]:
            raise RuntimeError(f"rank {rank} of {ranks}: {count} messages for {counted[key]} times {key[0]}")
    return tuple(steps)

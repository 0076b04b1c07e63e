"""Which instructions a rank executes in which order: DeepSpeed's schedules, both of them.

1f1b     stage s on rank s.

folded   a V over 2P stages: rank r holds stage r (phase 0, on the way down the U-Net) and stage 2P - 1 - r (phase 1,
         on the way up), so that what an encoder layer gives a decoder layer never leaves its rank::

             rank 0    stage 0 ─▶ h, emb          loss ◀─ stage 2P - 1
             rank 1       stage 1 ─▶ ...              ... ◀─ stage 2P - 2
             rank P - 1       stage P - 1 ───turn───▶ stage P

The engines execute these streams, and the simulator walks the same ones.
"""

from __future__ import annotations

from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass, PipeSchedule, TrainSchedule

from ddpm_ds.pipeline.partition import Schedule


def instruction_stream(schedule: Schedule, *, micro_batches: int, ranks: int, rank: int) -> PipeSchedule:
    """The instructions of one training step on one rank of a pipeline; ``steps()`` yields them in groups.

    Raises:
        ValueError: the fold is given fewer than ``2 * ranks`` micro-batches.
    """
    kind = DualPipeVSchedule if schedule == "folded" else TrainSchedule
    return kind(micro_batches=micro_batches, stages=ranks, stage_id=rank)


def most_in_flight(schedule: Schedule, ranks: int) -> int:
    """Messages of one channel that a rank may have sent and the other not taken, without holding up the schedule.

    A rank goes back with a micro-batch only when the next rank has done so, and holds no more than so many.
    """
    return (2 * ranks if schedule == "folded" else ranks) + 1


def held_micro_batches(schedule: Schedule, *, micro_batches: int, ranks: int, rank: int) -> list[tuple[int, ...]]:
    """Micro-batches whose activations a rank holds, per phase, after each of its forward passes of a step."""
    held = [0, 0] if schedule == "folded" else [0]
    after = []
    for commands in instruction_stream(schedule, micro_batches=micro_batches, ranks=ranks, rank=rank).steps():
        for command in commands:
            phase = command.kwargs.get("phase", 0)
            if isinstance(command, ForwardPass):
                held[phase] += 1
                after.append(tuple(held))
            elif isinstance(command, BackwardPass):
                held[phase] -= 1
    return after

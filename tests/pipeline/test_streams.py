"""The order in which each rank works, written out, and what it holds meanwhile."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

from ddpm_ds.pipeline.cuts import Schedule, segments, stages_of
from ddpm_ds.pipeline.schedule import instruction_stream

# f forward and b backward of phase 0, down the U-Net; F and B those of phase 1, up it; then the micro-batch.
GRIDS: dict[tuple[Schedule, int, int], list[str]] = {
    ("1f1b", 2, 4): [
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    ],
    ("folded", 2, 4): [
        "f0 f1 f2 F0 B0 F1 f3 B1 F2 b0 B2 F3 b1 B3 b2 b3",
        "f0 F0 f1 F1 f2 B0 F2 b0 f3 B1 F3 b1 B2 b2 B3 b3",
    ],
    ("folded", 4, 8): [
        "f0 f1 f2 f3 f4 f5 f6 F0 B0 F1 B1 F2 B2 F3 f7 B3 F4 b0 B4 F5 b1 B5 F6 b2 B6 F7 b3 B7 b4 b5 b6 b7",
        "f0 f1 f2 f3 f4 F0 f5 F1 B0 F2 B1 F3 f6 B2 F4 b0 f7 B3 F5 b1 B4 F6 b2 B5 F7 b3 B6 b4 B7 b5 b6 b7",
        "f0 f1 f2 F0 f3 F1 f4 F2 B0 F3 f5 B1 F4 b0 f6 B2 F5 b1 f7 B3 F6 b2 B4 F7 b3 B5 b4 B6 b5 B7 b6 b7",
        "f0 F0 f1 F1 f2 F2 f3 F3 f4 B0 F4 b0 f5 B1 F5 b1 f6 B2 F6 b2 f7 B3 F7 b3 B4 b4 B5 b5 B6 b6 B7 b7",
    ],
}


def work_of(schedule: Schedule, ranks: int, micro_batches: int, rank: int) -> str:
    """The forward and backward passes of a rank, in their order."""
    number = 0
    done = {"f": 0, "b": 0, "F": 0, "B": 0}  # 1f1b reuses its buffers, so micro-batches are counted
    words = []
    for commands in instruction_stream(schedule, micro_batches=micro_batches, ranks=ranks, rank=rank).steps():
        for command in commands:
            if isinstance(command, ForwardPass | BackwardPass):
                letter = "b" if isinstance(command, BackwardPass) else "f"
                letter = letter.upper() if command.kwargs.get("phase") else letter
                number = done[letter]
                done[letter] += 1
                words.append(f"{letter}{number}")
    return " ".join(words)


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), GRIDS)
def test_the_grid_of_instructions(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    grid = [work_of(schedule, ranks, micro_batches, rank) for rank in range(ranks)]
    assert grid == GRIDS[schedule, ranks, micro_batches]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_on_every_rank_what_phase_1_makes_of_a_micro_batch_is_there_before_phase_0_goes_back(ranks: int) -> None:
    for rank in range(ranks):
        words = work_of("folded", ranks, 2 * ranks + 3, rank).split()
        for number in range(2 * ranks + 3):
            order = [words.index(f"{letter}{number}") for letter in "fFBb"]
            assert order == sorted(order)


def test_fewer_micro_batches_than_the_fold_wants_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 \\* 2 micro-batches, got 3"):
        instruction_stream("folded", micro_batches=3, ranks=2, rank=0)


def test_the_stages_of_a_rank_and_their_layers() -> None:
    assert segments((0, 2, 5, 7, 9), "folded", 0) == ((0, 2), (7, 9)) and stages_of(1, 2, "folded") == (1, 2)

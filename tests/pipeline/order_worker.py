"""One rank that writes down what its engine posts and waits for in a step.

python tests/pipeline/order_worker.py SCHEDULE MICRO_BATCHES FOLDER
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.pipeline.messages import Channel, Posted
from ddpm_ds.processes.process_group import process_group
from tests.pipeline import ladder_worker
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case


class Recorded:
    """A posted operation whose wait is written down."""

    def __init__(self, work: Any, what: list[Any], seen: list[Any]) -> None:
        self.work, self.what, self.seen = work, what, seen

    def wait(self) -> None:
        self.seen.append(["wait", *self.what])
        self.work.wait()


def main() -> None:
    """The program."""
    schedule, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    seen: list[Any] = []
    numbers: Counter[Any] = Counter()

    def note(does: str, channel: Channel) -> list[Any]:
        edge = channel.p2p.edge
        what = [list(edge), numbers[does, edge]]
        numbers[does, edge] += 1
        seen.append([does, *what])
        return what

    def recorded(does: str) -> Any:
        post = getattr(Channel, f"post_{does}")

        def posted(channel: Channel, *message: torch.Tensor) -> Posted:
            what = note(does, channel)
            work, kept = post(channel, *message)
            return Posted(Recorded(work, what, seen), kept)

        return posted

    for does in ("send", "receive"):
        setattr(Channel, f"post_{does}", recorded(does))
    use_host_accelerator()
    with process_group():
        case = Case(4, 1, 0, "fp32", 0, micro_batches=count, schedule=schedule)  # type: ignore[arg-type]
        spec = ladder_worker.spec_of(compiled=False)
        engine = case.engine(spec)
        engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

"""A rank that exchanges values and requests with others under a strict transport, for test_exchange.py.

python tests/strict.py values_worker.py MOST_CONNECTED FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ddpm_ds.pipeline import messages
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.processes.requests import Requests

POLLS, SIGNALLED, FOUND, SAVED = 12, 2, 3, 6
"""Number of polls; which one follows a signal to the last rank, a file that rank 0 finds, and which one the save."""


def main() -> None:
    messages.MOST_CONNECTED, folder = int(sys.argv[1]), Path(sys.argv[2])
    use_host_accelerator()
    with process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        requests, asked = Requests(folder, None, [f"rank {each}" for each in range(size)]), []
        for poll in range(POLLS):
            if poll == SIGNALLED and rank == size - 1:
                requests._signalled_at = time.monotonic()
            if poll == FOUND and rank == 0:
                (folder / "save").touch()
                requests._found = ("save",)
            asked.append(requests.poll())
            if poll == SAVED:
                requests.saved()
        requests.close()
        found = {
            "groups": [dist.get_process_group_ranks(group) for group in messages.value_groups()],
            "gathered": messages.gather_objects("ab\n " * rank, str),
            "all": messages.all_gather_objects([rank, float("inf")], list[float]),
            "first": messages.broadcast_object([rank] * 1000, list[int])[-1],
            "asked": asked,
        }
        messages.barrier()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

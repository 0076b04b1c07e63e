"""The network test: one small all-reduce on all hosts at the same time.

    python -m ddpm_ds.cluster.network ARGUMENTS_OF_TAKE_PART_IN_JSON

:func:`network_test` starts this program on each host and collects its results. As in training, gloo listens where the
first host is reached, and NCCL where its own variables say.
"""

import json
import os
import queue
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from ddpm_ds.cluster.probe import tell
from ddpm_ds.cluster.survey import NO_SSH, Conversation, Ended, PlannedRun
from ddpm_ds.processes.hosts import use_interface_towards

OTHERS_SECONDS = 3.0
"""Time limit for the other hosts to report their errors once one has failed."""
ERROR_CHARACTERS = 240


@dataclass
class Network:
    """Results of the test."""

    hosts: Sequence[str]
    backend: str
    all_reduce_seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Errors by host; a host without one may have waited for a host that failed."""


def network_test(
    hosts: Sequence[str], run: PlannedRun, address: str, backend: str, log: Callable[[str], None]
) -> Network:
    """Run the test between hosts, until it is done or no host has said anything for ``run.seconds``.

    ``address`` is that of the first host, ``backend`` is gloo or nccl.
    """
    network, heard = Network(hosts, backend), queue.SimpleQueue[tuple[int, Any]]()
    port, seconds = run.master_port, run.seconds
    log(f"{backend} over {address}:{port} between {', '.join(hosts)}")
    told = {"world": len(hosts), "address": address, "port": port, "seconds": seconds, "backend": backend}
    steps = dict.fromkeys(range(len(hosts)), "starting")  # of the ranks that are at work

    def hear(rank: int, said: Any) -> None:
        heard.put((rank, said))

    with ExitStack() as stack:
        for rank, host in enumerate(hosts):
            command = run.command(host, __name__, json.dumps({"rank": rank, **told}))
            talk = Conversation(command, hear=partial(hear, rank))
            stack.callback(talk.close)
        while steps:
            try:
                rank, said = heard.get(timeout=OTHERS_SECONDS if network.errors else seconds)
            except queue.Empty:
                if not network.errors:
                    network.errors = {
                        hosts[rank]: f"nothing heard for {seconds} s, last: {step}" for rank, step in steps.items()
                    }
                break
            if rank not in steps:
                continue
            if isinstance(said, Ended):
                lost = "ssh was lost: " if said.code == NO_SSH else ""
                said = {"error": lost + (said.last_line or f"exit code {said.code}, last: {steps[rank]}")}
            steps[rank] = said.get("step", steps[rank])
            if "error" in said:
                network.errors[hosts[rank]] = textwrap.shorten(said["error"], ERROR_CHARACTERS, placeholder="...")
            if "all_reduce_seconds" in said:
                network.all_reduce_seconds[hosts[rank]] = said["all_reduce_seconds"]
            if "error" in said or steps[rank] == "done":
                del steps[rank]
    return network


def all_reduce(rank: int, world: int, backend: str) -> float:
    """Return the seconds of an all-reduce in an existing process group; under NCCL the second one, on the GPU.

    Raises:
        ArithmeticError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    seconds = 0.0
    for device in [torch.device("cpu")] + ([torch.device("cuda", 0)] if backend == "nccl" else []):
        began = time.perf_counter()
        total = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(total)
        found = total.item()
        seconds = time.perf_counter() - began
        if found != world * (world + 1) / 2:
            raise ArithmeticError(f"an all-reduce on {device} gave {found:g} instead of {world * (world + 1) // 2}")
    return seconds


def take_part(rank: int, world: int, address: str, port: int, seconds: int, backend: str) -> None:
    """Take part in the test as one rank; results and errors are sent to the asking side."""
    signal.alarm(2 * seconds)  # ends it even if everything else hangs
    threading.Thread(target=_leave_with_the_asking_side, daemon=True).start()
    use_interface_towards(address)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    tell({"step": "rendezvous"})
    reached_at = f"[{address}]" if ":" in address else address
    try:
        if backend == "nccl":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{reached_at}:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
        tell({"step": "connected"})
        tell({"all_reduce_seconds": all_reduce(rank, world, backend)})
        dist.destroy_process_group()
    except (RuntimeError, ArithmeticError) as error:
        tell({"error": " ".join(str(error).split())})
        os._exit(1)  # a group that is broken can hang when it is destroyed
    tell({"step": "done"})


def _leave_with_the_asking_side() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    take_part(**json.loads(sys.argv[1]))

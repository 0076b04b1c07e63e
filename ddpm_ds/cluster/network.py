"""The network test: on all hosts at the same time a small all-reduce, then latency and bandwidth of each pair of hosts.

    python -m ddpm_ds.cluster.network ARGUMENTS_OF_TAKE_PART_IN_JSON

:func:`network_test` starts this program on each host and collects its results. As in training, gloo listens where the
first host is reached, and NCCL where its own variables say. A transfer doubles in size until it takes
``LONG_ENOUGH_SECONDS`` or has ``LARGEST_BYTES``: a second and 256 MiB for a pair, or less.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import statistics
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

ALL_PAIRS_HOSTS = 8
"""With more hosts only neighbours are measured, as a ring."""
PINGS, WARM_UP_PINGS, PING_SECONDS = 50, 3, 0.2
SMALLEST_BYTES, LARGEST_BYTES = 2**16, 2**26
LONG_ENOUGH_SECONDS = 0.1
END = -1
"""Header after which no transfer follows."""
OTHERS_SECONDS = 3.0
"""Time limit for the other hosts to report their errors once one has failed."""
ERROR_CHARACTERS = 240


def pairs(world: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks that are measured."""
    if world <= ALL_PAIRS_HOSTS:
        return list(itertools.combinations(range(world), 2))
    return [(rank, (rank + 1) % world) for rank in range(world)]


@dataclass(frozen=True)
class Route:
    """Latency and bandwidth from one host to another."""

    sender: str
    receiver: str
    latency_seconds: float
    bytes_per_second: float


@dataclass
class Network:
    """Results of the test."""

    hosts: Sequence[str]
    backend: str
    all_reduce_seconds: dict[str, float] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)
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
            if "to" in said:
                route = Route(hosts[rank], hosts[said["to"]], said["latency_seconds"], said["bytes_per_second"])
                network.routes.append(route)
                latency, bandwidth = f"{route.latency_seconds * 1e3:.3f} ms", speed(route.bytes_per_second)
                log(f"{route.sender} to {route.receiver}: {latency}, {bandwidth}")
            if "error" in said or steps[rank] == "done":
                del steps[rank]
    return network


def speed(bytes_per_second: float) -> str:
    """Format a bandwidth."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def measure(rank: int, world: int, backend: str) -> None:
    """Make all measurements in an existing process group, and send each to the asking side when it is made.

    A transfer between two ranks is a header of one number, so many bytes, and an answer of one number.
    """
    import torch
    import torch.distributed as dist

    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if backend == "nccl" else [])
    for device in devices:
        began = time.perf_counter()
        total = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(total)
        found = total.item()
        seconds = time.perf_counter() - began
        if found != world * (world + 1) / 2:
            raise ArithmeticError(f"an all-reduce on {device} gave {found:g} instead of {world * (world + 1) // 2}")
    tell({"all_reduce_seconds": seconds})
    number = torch.zeros(1, dtype=torch.int64, device=devices[-1])
    payload = torch.ones(LARGEST_BYTES, dtype=torch.uint8, device=devices[-1])

    def transfer(peer: int, size: int) -> float:
        """Send ``size`` bytes, and return the seconds until the peer has answered."""
        began = time.perf_counter()
        dist.send(number.fill_(size), peer)
        if size:
            dist.send(payload[:size], peer)
        dist.recv(number, peer)
        number.item()  # waits for the device
        return time.perf_counter() - began

    def lead(peer: int) -> None:
        """Measure the route to ``peer``, which follows."""
        for _ in range(WARM_UP_PINGS):
            transfer(peer, 0)
        times, until = [transfer(peer, 0)], time.monotonic() + PING_SECONDS
        while len(times) < PINGS and time.monotonic() < until:
            times.append(transfer(peer, 0))
        latency, size = statistics.median(times) / 2, SMALLEST_BYTES
        while (seconds := transfer(peer, size) - 2 * latency) <= LONG_ENOUGH_SECONDS and size < LARGEST_BYTES:
            size *= 2
        dist.send(number.fill_(END), peer)
        tell({"to": peer, "latency_seconds": latency, "bytes_per_second": size / max(seconds, 1e-9)})

    def follow(peer: int) -> None:
        """Answer what ``peer`` sends until it ends."""
        while True:
            dist.recv(number, peer)
            if (size := int(number.item())) == END:
                return
            if size:
                dist.recv(payload[:size], peer)
            dist.send(number.fill_(0), peer)

    turn = torch.zeros(1)
    for one, other in pairs(world):
        for sender, receiver in ((one, other), (other, one)):
            if rank == sender:
                lead(receiver)
            elif rank == receiver:
                follow(sender)
        dist.all_reduce(turn)  # so that pairs don't disturb each other


def take_part(rank: int, world: int, address: str, port: int, seconds: int, backend: str) -> None:
    """Take part in the test as one rank; results and errors are sent to the asking side."""
    signal.alarm(seconds + seconds * len(pairs(world)))  # ends it even if everything else hangs
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
        measure(rank, world, backend)
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

"""Runs on each host at the same time: a small all-reduce, then latency and bandwidth of each pair of hosts.

    python -m ddpm_ds.cluster.network --rank I --world N --master-addr A --master-port P [--backend nccl]

As in training, gloo listens where the first host is reached, and NCCL where its own variables say. A transfer doubles
in size until it takes ``LONG_ENOUGH_SECONDS`` or has ``LARGEST_BYTES``: a second and 256 MiB for a pair, or less.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ddpm_ds.cluster.probe import say
from ddpm_ds.processes.hosts import use_interface_towards

if TYPE_CHECKING:
    import torch

ALL_PAIRS_HOSTS = 8
"""Of more hosts only neighbours are measured, as a ring."""
PINGS = 50
WARM_UP_PINGS = 3
PING_SECONDS = 0.2
SMALLEST_BYTES, LARGEST_BYTES = 2**16, 2**26
LONG_ENOUGH_SECONDS = 0.1
END = -1
"""Header after which no transfer follows."""


def pairs(world: int) -> list[tuple[int, int]]:
    """The pairs that are measured, by rank."""
    if world <= ALL_PAIRS_HOSTS:
        return list(itertools.combinations(range(world), 2))
    return [(rank, (rank + 1) % world) for rank in range(world)]


class PairLink:
    """Transfers between this rank and another: a header of one number, so many bytes, an answer of one number."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._bytes = torch.ones(LARGEST_BYTES, dtype=torch.uint8, device=device)

    def lead(self, peer: int) -> tuple[float, float]:
        """Measure the way to ``peer``, which follows: latency in seconds and bandwidth in bytes per second."""
        latency = self._latency(peer)
        size = SMALLEST_BYTES
        while True:
            seconds = max(self._transfer(peer, size) - 2 * latency, 1e-9)
            if seconds > LONG_ENOUGH_SECONDS or size == LARGEST_BYTES:
                break
            size *= 2
        self._send_number(END, peer)
        return latency, size / seconds

    def follow(self, peer: int) -> None:
        """Answer what ``peer`` sends until it ends."""
        import torch.distributed as dist

        while (size := self._receive_number(peer)) != END:
            if size:
                dist.recv(self._bytes[:size], peer)
            self._send_number(0, peer)

    def _latency(self, peer: int) -> float:
        """Half of the median round trip of 8 bytes."""
        for _ in range(WARM_UP_PINGS):
            self._transfer(peer, 0)
        times, until = [self._transfer(peer, 0)], time.monotonic() + PING_SECONDS
        while len(times) < PINGS and time.monotonic() < until:
            times.append(self._transfer(peer, 0))
        return statistics.median(times) / 2

    def _transfer(self, peer: int, size: int) -> float:
        """Seconds until the peer has answered."""
        import torch.distributed as dist

        began = time.perf_counter()
        self._send_number(size, peer)
        if size:
            dist.send(self._bytes[:size], peer)
        self._receive_number(peer)
        return time.perf_counter() - began

    def _send_number(self, number: int, peer: int) -> None:
        import torch.distributed as dist

        self._number.fill_(number)
        dist.send(self._number, peer)

    def _receive_number(self, peer: int) -> int:
        import torch.distributed as dist

        dist.recv(self._number, peer)
        return int(self._number.item())


def measure(rank: int, world: int, backend: str) -> None:
    """All measurements, told as they are made; the process group exists."""
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
    say({"all_reduce_seconds": seconds})
    link = PairLink(devices[-1])
    turn = torch.zeros(1)
    for one, other in pairs(world):
        for sender, receiver in ((one, other), (other, one)):
            if rank == sender:
                latency, bandwidth = link.lead(receiver)
                say({"from": sender, "to": receiver, "latency_seconds": latency, "bytes_per_second": bandwidth})
            elif rank == receiver:
                link.follow(sender)
        dist.all_reduce(turn)  # nobody disturbs a pair


def main() -> None:
    """Take part in the test; every outcome is told in lines of JSON."""
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--world", "--master-port", "--seconds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    options = parser.parse_args()
    signal.alarm(options.seconds + options.seconds * len(pairs(options.world)))  # ends it even where all else hangs
    threading.Thread(target=_leave_with_the_asking_side, daemon=True).start()
    use_interface_towards(options.master_addr)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    say({"step": "meeting"})
    try:
        if options.backend == "nccl":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "gloo" if options.backend == "gloo" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{_in_url(options.master_addr)}:{options.master_port}",
            rank=options.rank,
            world_size=options.world,
            timeout=timedelta(seconds=options.seconds),
        )
        say({"step": "connected"})
        measure(options.rank, options.world, options.backend)
        dist.destroy_process_group()
    except (RuntimeError, ArithmeticError) as error:
        say({"error": " ".join(str(error).split())})
        sys.stdout.flush()
        os._exit(1)  # a group that is broken can hang when it is destroyed
    say({"step": "done"})


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _leave_with_the_asking_side() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()

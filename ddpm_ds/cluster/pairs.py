"""Run the network test on all hosts at the same time, and judge what it tells. See network.py."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ddpm_ds.cluster.checks import CheckResult, CheckRow
from ddpm_ds.cluster.survey import NO_SSH, Conversation, Ended, RemoteStart, Silent

TEST = "ddpm_ds.cluster.network"
POLL_SECONDS = 0.2
OTHERS_SECONDS = 3.0
"""For the other hosts to say what they have met once one has failed."""
SLOW = 0.5
"""Part of the median bandwidth below which a way is noted."""
WORD_LIMIT = 240


@dataclass(frozen=True)
class Route:
    """From one host to another."""

    sender: str
    receiver: str
    latency_seconds: float
    bytes_per_second: float


@dataclass
class Network:
    """What the test has told, while it runs and afterwards."""

    hosts: Sequence[str]
    backend: str
    all_reduce_seconds: dict[str, float] = field(default_factory=dict)
    ways: list[Route] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """By host; where some have met none, they may have waited for one that has."""
    heard_at: float = field(default_factory=time.monotonic)
    failed_at: float | None = None


def measure(
    hosts: Sequence[str],
    start: RemoteStart,
    address: str,
    port: int,
    *,
    backend: str,
    seconds: float,
    say: Callable[[str], None],
) -> Network:
    """Run the test; given up when no host has said anything for ``seconds``.

    Args:
        hosts: of the hostfile; the first one has ``address``.
        backend: gloo or nccl.
    """
    network = Network(hosts, backend)
    lock = threading.Lock()
    options = ["--world", len(hosts), "--master-addr", address, "--master-port", port, "--seconds", round(seconds)]
    words = [str(word) for word in (*options, "--backend", backend)]
    say(f"{backend} over {address}:{port} between {', '.join(hosts)}")
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as pool:
        talks = [
            stack.enter_context(Conversation(start.command(host, TEST, "--rank", str(rank), *words)))
            for rank, host in enumerate(hosts)
        ]

        def listen(rank: int) -> None:
            step = "starting"
            while step != "done":
                try:
                    said = talks[rank].next(POLL_SECONDS)
                except Silent:
                    if error := _given_up(network, step, seconds):
                        with lock:
                            _fail(network, rank, error)
                        return
                    if network.failed_at is not None and time.monotonic() - network.failed_at > OTHERS_SECONDS:
                        return
                    continue
                except Ended as ended:
                    with lock:
                        lost = "ssh was lost: " if ended.code == NO_SSH else ""
                        _fail(network, rank, lost + (ended.last_line or f"exit code {ended.code}, last: {step}"))
                    return
                with lock:
                    _note(network, rank, said, say)
                if "error" in said:
                    return
                step = said.get("step", step)

        try:
            list(pool.map(listen, range(len(hosts))))
        except BaseException:  # Ctrl-C: the threads need not wait any longer
            network.failed_at = float("-inf")
            raise
    return network


def _given_up(network: Network, step: str, seconds: float) -> str:
    silent = time.monotonic() - network.heard_at
    return f"nothing heard for {seconds:g} s, last: {step}" if silent > seconds and network.failed_at is None else ""


def _fail(network: Network, rank: int, error: str) -> None:
    network.errors[network.hosts[rank]] = error if len(error) <= WORD_LIMIT else f"{error[:WORD_LIMIT]}..."
    network.failed_at = time.monotonic() if network.failed_at is None else network.failed_at


def _note(network: Network, rank: int, said: dict[str, Any], say: Callable[[str], None]) -> None:
    network.heard_at = time.monotonic()
    host = network.hosts[rank]
    if "error" in said:
        _fail(network, rank, said["error"])
    elif "all_reduce_seconds" in said:
        network.all_reduce_seconds[host] = said["all_reduce_seconds"]
    elif "from" in said:
        way = Route(host, network.hosts[said["to"]], said["latency_seconds"], said["bytes_per_second"])
        network.ways.append(way)
        say(f"{way.sender} to {way.receiver}: {way.latency_seconds * 1e3:.3f} ms, {speed(way.bytes_per_second)}")


def network_row(network: Network) -> CheckRow:
    """The all-reduce, and whatever has gone wrong in the test."""
    cells = {host: CheckResult(f"{seconds * 1e3:.1f} ms") for host, seconds in network.all_reduce_seconds.items()}
    for host, why in network.errors.items():
        text = "failed" if host not in cells else "failed later"
        cells[host] = CheckResult(text, "bad", f"{network.backend}: {why}", _fix(host, why, network.backend))
    return CheckRow("all-reduce", {host: cells[host] for host in network.hosts if host in cells})


def slow_ways(network: Network) -> dict[Route, str]:
    """The ways that are much slower than the others, with a reason for each."""
    if len(network.ways) < 3:
        return {}
    median = statistics.median(way.bytes_per_second for way in network.ways)
    return {
        way: f"{speed(way.bytes_per_second)}, the median is {speed(median)}"
        for way in network.ways
        if way.bytes_per_second < SLOW * median
    }


def speed(bytes_per_second: float) -> str:
    """Bandwidth for a reader."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"


def _fix(host: str, why: str, backend: str) -> str:
    lowered = why.lower()
    if lowered.startswith("ssh was lost"):
        return f"is {host} still up, and its network steady? then try again"
    if "no module" in lowered or "cannot import" in lowered or "importerror" in lowered:
        return f"mend the environment on {host}: python -m ddpm_ds.cluster.network --help tells more"
    if "timeout" in lowered or "timed out" in lowered or "nothing heard" in lowered or "connect" in lowered:
        return (
            f"open all TCP ports between the hosts (also those above 1024: {backend} takes free ones), or name the "
            f"interface that connects them: {'GLOO' if backend == 'gloo' else 'NCCL'}_SOCKET_IFNAME in .deepspeed_env"
        )
    return f"on {host} run with {'NCCL_DEBUG=INFO' if backend == 'nccl' else 'TORCH_DISTRIBUTED_DEBUG=INFO'} for more"

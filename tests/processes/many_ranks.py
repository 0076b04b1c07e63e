"""What rank 0 serves in a run of many ranks, for which a few processes of this host stand; see docs/multi_node.md.

    python tests/processes/many_ranks.py 4096

Each rank has its own connections for the rendezvous and the heartbeat, with the values of a run. One row of the grid in
which gloo exchanges values is real, too, and so are the groups that DeepSpeed makes, on rank 0. All share this host's
processors, and a process makes the calls of its ranks one after the other: seconds are upper bounds, but for waits.
"""

import json
import math
import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.build import quiet_deepspeed, use_host_accelerator
from ddpm_ds.processes.process_group import JOIN_TIMEOUT
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.processes.rendezvous import Rendezvous, SealedStore, connect
from ddpm_ds.processes.watchdog import BEAT_SECONDS, KEY, VERDICT, Heartbeat

PROCESSES, SECONDS = 2, 20.0
PREFIX = "ddpm_ds/rendezvous/0"
FACTS = {"facts": "x" * 1000}
"""As much as a small spec has."""


def some_ranks(ranks: range, world_size: int, gate: Any, beats: Any) -> None:
    """Be ``ranks`` of a run, one after the other, as :meth:`Rendezvous.agree` and :class:`Heartbeat` are each."""
    port = int(os.environ["MASTER_PORT"])
    stores = [SealedStore(dist.PrefixStore(PREFIX, connect(rank, port, JOIN_TIMEOUT))) for rank in ranks]
    for rank, store in zip(ranks, stores, strict=True):
        store.set(f"start/{rank}", f"host-{rank // 8}\n{json.dumps(FACTS)}")
    while not stores[0].check(["start"]):
        time.sleep(0.01)
    for store in stores:
        assert len(json.loads(store.get("start"))["places"]) == world_size
    hearts = [
        Heartbeat(rank, world_size, store.clone(), time.monotonic) for rank, store in zip(ranks, stores, strict=True)
    ]
    gate.wait()
    gate.wait()
    begun, ended = time.monotonic(), 0
    while time.monotonic() < begun + SECONDS:
        began = time.monotonic()
        for heart in hearts:
            assert heart._exchange("running", "-")
        ended += len(hearts)
        time.sleep(max(BEAT_SECONDS - (time.monotonic() - began), 0.0))
    with beats.get_lock():
        beats.value += ended
    gate.wait()
    os._exit(0)


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def serve(world_size: int) -> None:
    """Be rank 0 in the rendezvous and of the heartbeat."""
    gate, beats = multiprocessing.Barrier(PROCESSES + 1), multiprocessing.Value("q", 0)
    shares = [range(1 + part, world_size, PROCESSES) for part in range(PROCESSES)]
    others = [multiprocessing.Process(target=some_ranks, args=(share, world_size, gate, beats)) for share in shares]
    for other in others:
        other.start()
    begun, used, opened = time.monotonic(), time.process_time(), files()
    rendezvous = Rendezvous(600.0)
    rendezvous.agree("start", FACTS)
    store = rendezvous.store.clone()
    for key in (*map(KEY.format, range(world_size)), VERDICT):
        store.set(key, "")
    gate.wait()
    seconds, core = time.monotonic() - begun, time.process_time() - used
    print(f"to connect twice and agree once: {seconds:.1f} s, of which rank 0 computes {core:.1f} s")
    print(f"rank 0's connections: {files() - opened:,}")
    heart = Heartbeat(0, world_size, store, time.monotonic)
    heart.start()
    gate.wait()
    begun, used, own = time.monotonic(), time.process_time(), heart._beats
    gate.wait()
    seconds, core, own = time.monotonic() - begun, time.process_time() - used, heart._beats - own
    key = KEY.format(world_size - 1)
    entry = len(store._sealed(key, '[99, 99, "running", "-"]')) + len(f"{PREFIX}/{key}")
    sent = entry * (3 * beats.value + own * world_size)  # a rank sets its own, and reads rank 0's and the verdict
    count, wanted = beats.value / seconds, (world_size - 1) / BEAT_SECONDS
    print(f"beats: {count:,.0f} a second of {wanted:,.0f}, and {own / seconds:.1f} of rank 0")
    print(f"{2 * count:,.0f} requests and {sent / seconds / 1e6:.1f} MB a second, {core / seconds:.2f} cores of rank 0")


def make_groups(world_size: int) -> None:
    """Make DeepSpeed's groups, and connect a row of the grid."""
    begun = time.monotonic()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    with quiet_deepspeed(verbose=False):
        deepspeed.init_distributed(verbose=False)
        PipelineParallelGrid(topology=insides.topology("stages", 4, world_size // 4))
    print(f"groups of 4 stages x {world_size // 4} replicas: {time.monotonic() - begun:.1f} s")
    width = world_size // max(each for each in range(1, math.isqrt(world_size) + 1) if world_size % each == 0)
    row, begun, opened, made = dist.HashStore(), time.monotonic(), files(), list[dist.ProcessGroupGloo]()

    def join(rank: int) -> None:
        made.append(dist.ProcessGroupGloo(row, rank, width, JOIN_TIMEOUT))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(width)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"a row of {width}: {time.monotonic() - begun:.1f} s, {(files() - opened) / width:.0f} descriptors a rank")


if __name__ == "__main__":
    size = int(sys.argv[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    use_host_accelerator()
    serve(size)
    make_groups(size)
    os._exit(0)  # the groups of a row would be destroyed one after the other

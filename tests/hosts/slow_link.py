"""Replicas on two hosts whose link is slowed: bytes on the link, communication that passes do not hide, prediction.

    python -m tests.hosts.slow_link --rate 1gbit --images 64 --micro-batches 1 --zero 1 --steps 6

needs root and two cores. A token bucket (``tc tbf``) slows each host's end of the link. A step of one host alone has as
many images as its share of a step of both, so the difference is communication. Layers are timed on one core, and scaled
so that the simulated step alone is the measured one.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ddpm_ds.config.spec import RunSpec
from tests.ds_json import config_of
from tests.hosts.hosts import Host, Hosts
from tests.launching import REPOSITORY, tiny_spec

SECONDS = 600.0
CHUNK = 2**18  # elements that travel at once
BITS = {"mbit": 1e6, "gbit": 1e9}
WARM_UP = 2
"""Steps before those that are timed and counted."""
PAYLOAD, FRAME, ACKNOWLEDGEMENT = 1448, 1514, 66
"""Bytes of data in a full Ethernet frame of TCP, and of the frame itself and an acknowledgement as the host counts."""


@dataclass(frozen=True)
class Setting:
    zero: int = 1
    micro_batches: int = 1
    images: int = 8  # of a micro-batch
    steps: int = 6
    precision: str = "fp32"


@dataclass(frozen=True)
class Measured:
    parameters: int
    seconds: float  # least of a step
    sent: float  # bytes that the host sends in a step


def slow(host: Host, rate: str) -> None:
    """Slow a host's end of the link; its queue is long enough to lose nothing."""
    host.call("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *f"rate {rate} burst 512kb limit 256mb".split())


def measured(hosts: Hosts, folder: Path, setting: Setting, replicas: int) -> list[Measured]:
    """Train on both hosts at once: ``replicas`` 2 of one run, or a run of 1 on each, with a core each."""
    programs = []
    for rank, host in enumerate(hosts):
        world = {"WORLD_SIZE": str(replicas), "RANK": str(rank % replicas), "MASTER_PORT": "29531"}
        world |= {"MASTER_ADDR": (hosts[0] if replicas > 1 else host).address, "GLOO_SOCKET_IFNAME": "eth0"}
        world |= {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'launch'}", "XDG_CACHE_HOME": str(folder)}
        world |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[rank % len(cores)])
        worker = [sys.executable, "-m", "tests.hosts.slow_link", "--worker", json.dumps(asdict(setting))]
        output = folder / f"said-{replicas}-{rank}"
        programs.append((host.start(["taskset", "-c", core, *worker], world, output), output))
    codes = [program.wait(SECONDS) for program, _ in programs]
    said = [output.read_text() for _, output in programs]
    assert codes == [0, 0], said
    return [Measured(**json.loads(one.splitlines()[-1])) for one in said]


def spec_of(setting: Setting, replicas: int) -> RunSpec:
    """A U-Net of 6.5 million parameters, for one image size."""
    unet = {"channels": 64, "multipliers": [1, 2, 2], "blocks_per_level": 2, "dropout": 0.0}
    return tiny_spec(train={"batch_images": replicas * setting.micro_batches * setting.images}, unet=unet)


def zero_of(setting: Setting) -> dict[str, Any]:
    return {"stage": setting.zero, "reduce_bucket_size": CHUNK}


def train(setting: Setting) -> Measured:
    """Train on this rank."""
    import deepspeed
    import torch

    from ddpm_ds.pipeline.build import use_host_accelerator
    from tests.pipeline.batches import global_batch, micro_batches
    from tests.pipeline.ladder_worker import Case

    use_host_accelerator()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    replicas, counter = int(os.environ["WORLD_SIZE"]), Path("/sys/class/net/eth0/statistics/tx_bytes")
    layout = 1, replicas, setting.zero, setting.precision, 0
    spec = spec_of(setting, replicas)
    engine = Case(*layout, micro_batches=setting.micro_batches, fused=True).engine(  # type: ignore[arg-type]
        spec, zero_optimization=zero_of(setting)
    )
    seconds, before = list[float](), 0
    for step in range(WARM_UP + setting.steps):
        if replicas > 1:
            torch.distributed.barrier()
        before = int(counter.read_text()) if step == WARM_UP else before
        begin = time.perf_counter()
        engine.train_batch(micro_batches(engine, global_batch(spec, step % 3)))
        seconds.append(time.perf_counter() - begin)
    sent = int(counter.read_text()) - before
    parameters = sum(one.numel() for one in engine.module.parameters())
    return Measured(parameters, min(seconds[WARM_UP:]), sent / setting.steps)


def predicted(setting: Setting, rate: str, alone: float) -> float:
    """Return the simulated seconds of a step of both hosts, from timed layers and the link's rate."""
    import torch

    from ddpm_ds.observe.device_speed import LayerSeconds, time_layer
    from ddpm_ds.planning.inputs import Workload, machine
    from ddpm_ds.planning.predictor import Predictor
    from ddpm_ds.schema.layout import Layout

    torch.set_num_threads(1)
    blocks: dict[str, Any] = {"zero_optimization": zero_of(setting)}
    blocks |= {} if setting.precision == "fp32" else {setting.precision: {"enabled": True}}
    job = Workload(spec_of(setting, 2), config_of(**blocks), on_cpu=True)
    timed = [time_layer(layer, setting.images, torch.device("cpu"), torch.float32) for layer in job.layers]
    link = BITS[rate[-4:]] * float(rate[:-4]) / 8 * PAYLOAD / FRAME
    cores = replace(machine("cpu", half=False, devices=2, nodes=2), link_bandwidth=link, network_bandwidth=link)
    layout = Layout(1, 2, "1f1b", setting.images, setting.micro_batches, 0, setting.zero, False)

    def step_seconds(faster: float, replicas: int) -> float:
        times = [LayerSeconds(faster * one.forward, faster * one.backward) for one in timed]
        predictor = Predictor(job, cores, lambda layers, images: times)
        return predictor.simulate(replace(layout, replicas=replicas)).step_seconds

    updating = step_seconds(0.0, 1)
    return step_seconds((alone - updating) / (step_seconds(1.0, 1) - updating), 2)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--rate", default="1gbit", help="200mbit, 1gbit, 5gbit")
    for one in fields(Setting):
        options.add_argument(f"--{one.name.replace('_', '-')}", type=type(one.default), default=one.default)
    given = vars(options.parse_args())
    rate, setting = given.pop("rate"), Setting(**given)
    with tempfile.TemporaryDirectory() as made, Hosts(Path(made) / "made", visible=Path(made)) as hosts:
        for host in hosts:
            slow(host, rate)
        alone, both = (measured(hosts, Path(made), setting, replicas) for replicas in (1, 2))
    step, without = (max(one.seconds for one in found) for found in (both, alone))
    simulated = predicted(setting, rate, without)
    print(
        f"{rate}, ZeRO-{setting.zero}, {setting.micro_batches} x {setting.images} images in {setting.precision}: "
        f"a step takes {1e3 * without:.0f} ms alone, {1e3 * step:.0f} ms with the other host, "
        f"{1e3 * (step - without):.0f} ms of it exposed; simulated {1e3 * simulated:.0f} ms "
        f"({simulated / step - 1:+.0%}); {both[0].sent / 1e6:.1f} MB sent"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(asdict(train(Setting(**json.loads(sys.argv[2]))))), flush=True)
    else:
        main()

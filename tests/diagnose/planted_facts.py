"""FinishedRun of steps that nobody took: simulated on a made-up machine, with one fault or none."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.observe.device_speed import Device, LayerSeconds, write_device
from ddpm_ds.observe.finished_run import FinishedRun, Method, Overflows, RankFacts
from ddpm_ds.observe.observer import Pauses
from ddpm_ds.pipeline.cuts import Schedule, partition, segments, sent_shapes, weighted
from ddpm_ds.pipeline.schedule import PhaseCosts, RankCosts
from ddpm_ds.predict.simulate import Link, simulate
from ddpm_ds.unet.layers import Layer, unet_layers
from tests.launching import tiny_spec

BATCH = 32


@dataclass(frozen=True)
class Bench:
    """A made-up machine and a way to train on it."""

    schedule: Schedule = "1f1b"
    ranks: int = 2
    replicas: int = 1
    micro_batches: int = 16
    cuts: tuple[int, ...] | None = None
    """None makes the ranks' flops as equal as can be."""
    interval: int = 0
    workers: int = 0
    zero_stage: int = 0
    start_seconds: float = 1e-6
    """Of a layer's forward, before it computes."""
    macs_per_second: float = 1e9
    bytes_per_second: float = float("inf")
    read_seconds: float = 0.0
    """To read an image, in the training process."""
    update_seconds: float = 1e-9
    """Of a parameter."""

    @property
    def spec(self) -> RunSpec:
        return tiny_spec(train={"batch_images": BATCH}, data={"workers": self.workers})

    @property
    def layers(self) -> tuple[Layer, ...]:
        spec = self.spec
        return unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)

    @property
    def images(self) -> int:
        """Of a micro-batch."""
        return BATCH // self.replicas // self.micro_batches

    @property
    def bounds(self) -> tuple[int, ...]:
        if self.cuts is not None:
            return partition(self.layers, self.ranks, self.cuts, self.schedule)
        return weighted(self.layers, [layer.macs for layer in self.layers], self.ranks, self.schedule)

    def forward(self, layer: Layer) -> float:
        return self.start_seconds + self.images * layer.macs / self.macs_per_second

    def phases(self, rank: int) -> tuple[PhaseCosts, ...]:
        found = []
        for phase, (start, stop) in enumerate(segments(self.bounds, self.schedule, rank)):
            forward = sum(map(self.forward, self.layers[start:stop]))
            sizes = [self._bytes(cut, phase) for cut in (stop, start)]
            found.append(PhaseCosts(forward, (3 if self.interval else 2) * forward, *sizes))
        return tuple(found)

    def _bytes(self, cut: int, phase: int) -> int:
        if cut in (0, len(self.layers)) or (self.schedule == "folded" and cut == self.bounds[self.ranks]):
            return 0
        shapes = sent_shapes(self.layers, cut, phase=phase, schedule=self.schedule)
        elements = 0
        for shape in shapes:
            size = 1
            for side in shape:
                size *= side
            elements += size
        return 4 * elements * self.images

    def reading(self, rank: int) -> float:
        """Seconds that a rank waits for the images of a micro-batch; loaders read ahead."""
        if rank not in ({0} if self.schedule == "folded" else {0, self.ranks - 1}) or self.workers:
            return 0.0
        return self.read_seconds * self.images

    def parameters(self, rank: int) -> int:
        held = segments(self.bounds, self.schedule, rank)
        return sum(layer.parameters for start, stop in held for layer in self.layers[start:stop])

    def traced(self, **other: Any) -> FinishedRun:
        """What a traced step of it says, with some facts replaced."""
        costs = []
        for rank in range(self.ranks):
            first, *rest = self.phases(rank)
            reading = replace(first, forward_seconds=first.forward_seconds + self.reading(rank))
            owned = self.parameters(rank) / (self.replicas if self.zero_stage else 1)
            costs.append(RankCosts((reading, *rest), optimizer_seconds=owned * self.update_seconds))
        step = simulate(self.schedule, self.micro_batches, costs, lambda *_: Link(self.bytes_per_second))
        ranks = tuple(
            RankFacts(
                self.phases(rank),
                wait=step.wait_seconds[rank],
                data_wait=self.micro_batches * self.reading(rank),
                optimizer=costs[rank].optimizer_seconds,
            )
            for rank in range(self.ranks)
        )
        method: Method | tuple[int, ...] = self.cuts or "measured"
        start = LayerSeconds(self.start_seconds, 2 * self.start_seconds)
        facts = FinishedRun(
            spec=self.spec,
            schedule=self.schedule,
            partition=method,
            bounds=self.bounds,
            replicas=self.replicas,
            micro_batches=self.micro_batches,
            micro_batch_images=self.images,
            precision="fp32",
            zero_stage=self.zero_stage,
            checkpoint_interval=self.interval,
            on_cpu=True,
            ranks=ranks,
            step_seconds=step.step_seconds,
            peak_flops_per_second=4e9,
            overflows=Overflows(),
            pauses=Pauses(),
            evaluation_seconds=0.0,
            device=Device(2**33, {type(layer).__name__: start for layer in self.layers}),
        )
        return replace(facts, **other)


def write_run(run_dir: Path, facts: FinishedRun, **summary: Any) -> Path:
    """The files of a run's folder that say ``facts``, with some values of the trace's summary replaced."""
    (run_dir / "trace").mkdir(parents=True)
    (run_dir / "spec.yaml").write_text(yaml.safe_dump(facts.spec.model_dump(mode="json")))
    partition = facts.partition if isinstance(facts.partition, str) else list(facts.partition)
    config = {
        "train_micro_batch_size_per_gpu": facts.micro_batch_images,
        "gradient_accumulation_steps": facts.micro_batches,
        "zero_optimization": {"stage": facts.zero_stage},
        "pipeline": {
            "schedule": facts.schedule,
            "partition": partition,
            "activation_checkpoint_interval": facts.checkpoint_interval,
        },
    }
    (run_dir / "ds_config.json").write_text(json.dumps(config))
    stages = [
        f"{index}{f' on rank {index}' * (facts.schedule == 'folded')}       {stop - start}  first  last   1,000  0.1"
        for index, (start, stop) in enumerate(pairwise(facts.bounds))
    ]
    (run_dir / "stages.txt").write_text("\n".join(["stage  layers  first  last  parameters", *stages]) + "\n")
    ranks = [
        {
            "rank": rank * facts.replicas + replica,
            "pipeline_rank": rank,
            "replica": replica,
            "data_wait_seconds": own.data_wait,
            "load_seconds": own.load,
            "reduce_seconds": own.reduce,
            "optimizer_seconds": own.optimizer,
            "agreement_wait_seconds": own.agreement_wait,
            "ema_seconds": own.ema,
            "other_seconds": own.other,
            "phases": [
                {
                    "forward_seconds_per_micro_batch": phase.forward_seconds,
                    "backward_seconds_per_micro_batch": phase.backward_seconds,
                    "wait_seconds": own.wait / len(own.phases),
                    "send_seconds": own.send / len(own.phases),
                    "activation_bytes": phase.activation_bytes,
                    "gradient_bytes": phase.gradient_bytes,
                }
                for phase in own.phases
            ],
        }
        for rank, own in enumerate(facts.ranks)
        for replica in range(facts.replicas)
    ]
    values = {
        "schedule": facts.schedule,
        "micro_batches": facts.micro_batches,
        "micro_batch_images": facts.micro_batch_images,
        "pipeline_ranks": facts.stages,
        "replicas": facts.replicas,
        "device": "cpu" if facts.on_cpu else "cuda",
        "step_seconds": facts.step_seconds,
        "peak_flops_per_second": facts.peak_flops_per_second,
        "ranks": ranks,
    }
    (run_dir / "trace" / "summary.json").write_text(json.dumps(values | summary))
    write_device(run_dir, facts.device)
    return run_dir

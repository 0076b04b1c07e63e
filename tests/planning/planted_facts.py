"""Finished runs that nobody trained: their steps are simulated on a made-up machine, with one fault or none."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.observe.observer import Pauses
from ddpm_ds.pipeline.cuts import partition, weighted
from ddpm_ds.planning.costs import SPLIT_COST, weight_share
from ddpm_ds.planning.finished_run import FinishedRun, Overflows, RankFacts, machine_json
from ddpm_ds.planning.inputs import Workload, machine_like, rank_stages
from ddpm_ds.planning.simulate import Link, PhaseCosts, RankCosts, order_of, simulate
from ddpm_ds.schema.layout import Layout, Schedule, SpaceSplit
from ddpm_ds.unet.shards import row_layers, swaps_of
from tests.ds_json import config_of, laid_out
from tests.launching import tiny_spec

BATCH = 32
KINDS = ("forward", "backward", "weight")
LATENCY_SECONDS = 1e-4
"""Latency of a message, as the planner assumes it on a CPU."""


@dataclass(frozen=True)
class Bench:
    schedule: Schedule = "1f1b"
    ranks: int = 2
    replicas: int = 1
    micro_batches: int = 16
    cuts: tuple[int, ...] | None = None  # None makes the ranks' flops as equal as can be
    interval: int = 0
    in_flight: int | Literal["auto"] = "auto"
    accumulation: int | Literal["auto"] = "auto"  # of the spec
    warmup_images: int = 0
    workers: int = 2
    zero_stage: int = 0
    start_seconds: float = 1e-6  # of a layer's forward before it computes
    macs_per_second: float = 1e9
    bytes_per_second: float = float("inf")
    read_seconds: float = 0.0  # to read an image, with two threads
    update_seconds: float = 1e-9  # to step a parameter
    space: int = 1
    swap_seconds: float = 0.0  # of a swap

    @cached_property
    def job(self) -> Workload:
        train = {"batch_images": BATCH, "accumulation": self.accumulation}
        spec = tiny_spec(train=train, data={"workers": self.workers}, optimizer={"warmup_images": self.warmup_images})
        world_size = self.ranks * self.replicas * self.space
        found = laid_out(self.config, spec, world_size=world_size, stages=self.ranks)
        return Workload(spec, config_of(**found.as_json()), on_cpu=True)  # as a run records it

    @property
    def images(self) -> int:
        return BATCH // self.replicas // self.micro_batches

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        if self.cuts is not None:
            return partition(self.job.layers, self.ranks, self.cuts, self.schedule)
        return weighted(self.job.layers, [layer.macs for layer in self.job.layers], self.ranks, self.schedule)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "scheduler": {"type": "WarmupLR"},
            "train_micro_batch_size_per_gpu": self.images,
            "gradient_accumulation_steps": self.micro_batches,
            "zero_optimization": {"stage": self.zero_stage},
            "pipeline": {
                "stages": self.ranks,
                "schedule": self.schedule,
                "in_flight": self.in_flight,
                "partition": list(self.cuts) if self.cuts else "measured",
                "activation_checkpoint_interval": self.interval,
                "space": {"size": self.space},
            },
        }

    def rank(self, number: int) -> tuple[RankFacts, RankCosts]:
        """A rank's trace without its waiting, and its costs for the simulator."""
        phases, waiting = [], 0.0
        layers = row_layers(self.job.layers, SpaceSplit(self.space))
        stages = rank_stages(layers, self.bounds, self.schedule)[number]
        for stage in stages:
            own = layers[stage.start : stage.stop]
            down, up = (self.swap_seconds * swaps.number for swaps in swaps_of(own, self.interval))
            waiting += self.micro_batches * (down + up)
            forwards = [self.start_seconds + self.images * layer.macs / self.macs_per_second for layer in own]
            forward = sum(forwards)
            weights = sum(2 * one * weight_share(layer) for one, layer in zip(forwards, own, strict=True))
            sent, received = (4 * self.images * size for size in (stage.sent_elements, stage.received_elements))
            backward = (3 if self.interval else 2) * forward
            forward, backward = forward + down, backward + up
            phases.append(PhaseCosts(forward, backward, sent, received, weights, 0.0, SPLIT_COST * weights))
        loads = number == 0 or (self.schedule == "1f1b" and number == self.ranks - 1)
        reading = self.read_seconds * self.images if loads and self.workers <= 2 else 0.0  # more threads keep up
        owned = sum(stage.parameters for stage in stages) / (self.replicas if self.zero_stage else 1)
        update = owned * self.update_seconds
        traced = tuple(replace(phase, split_seconds=0.0) for phase in phases)
        first, *rest = phases
        with_reading = replace(first, forward_seconds=first.forward_seconds + reading)
        return (
            RankFacts(
                traced, optimizer_seconds=update, data_wait_seconds=self.micro_batches * reading, swap_seconds=waiting
            ),
            RankCosts((with_reading, *rest), optimizer_seconds=update),
        )

    def traced(self, **other: Any) -> FinishedRun:
        ranks, costs = zip(*(self.rank(number) for number in range(self.ranks)), strict=True)
        sizes = self.images, self.micro_batches, self.interval, self.zero_stage
        layout = Layout(self.ranks, self.replicas, self.schedule, *sizes, offload=False, in_flight=self.in_flight)
        layout = replace(layout, space=SpaceSplit(self.space))
        links = (Link(self.bytes_per_second, LATENCY_SECONDS),) * (self.ranks - 1)
        order = order_of(layout, costs, links)
        step = simulate(self.schedule, self.micro_batches, costs, links, programs=order)
        start = LayerSeconds(self.start_seconds, 2 * self.start_seconds)
        facts = FinishedRun(
            job=self.job,
            layout=layout,
            bounds=self.bounds,
            ranks=tuple(replace(rank, wait_seconds=wait) for rank, wait in zip(ranks, step.wait_seconds, strict=True)),
            step_seconds=step.step_seconds,
            peak_flops_per_second=4e9,
            overflows=Overflows(),
            pauses=Pauses(),
            evaluation_seconds=0.0,
            machine=replace(
                machine_like("cpu", 2**33, half=False, devices=layout.world_size, nodes=1),
                startup={type(layer).__name__: start for layer in self.job.layers},
            ),
        )
        return replace(facts, **other)


def write_run(run_dir: Path, facts: FinishedRun, **summary: Any) -> Path:
    """The files of a run's folder that say ``facts``, with some values of the trace's summary replaced."""
    layout = facts.layout
    (run_dir / "trace").mkdir(parents=True)
    (run_dir / "spec.yaml").write_text(yaml.safe_dump(facts.spec.model_dump(mode="json")))
    (run_dir / "ds_config.json").write_text(json.dumps(facts.job.config.given))
    stages = [
        f"{index}{f' on rank {index}' * (layout.schedule == 'folded')}       {stop - start}  first  last   1,000  0.1"
        for index, (start, stop) in enumerate(pairwise(facts.bounds))
    ]
    (run_dir / "stages.txt").write_text("\n".join(["stage  layers  first  last  parameters", *stages]) + "\n")
    parts = ("data_wait", "load", "reduce", "optimizer", "agreement_wait", "other", "swap")
    ranks = [
        {
            "rank": rank * layout.replicas + replica,
            "pipeline_rank": rank,
            "replica": replica,
            "part": 0,
            **{f"{part}_seconds": getattr(own, f"{part}_seconds") for part in parts},
            "phases": [
                {f"{kind}_seconds_per_micro_batch": getattr(phase, f"{kind}_seconds") for kind in KINDS}
                | {
                    "wait_seconds": own.wait_seconds / len(own.phases),
                    "send_seconds": own.send_seconds / len(own.phases),
                    "activation_bytes": phase.activation_bytes,
                    "gradient_bytes": phase.gradient_bytes,
                }
                for phase in own.phases
            ],
        }
        for rank, own in enumerate(facts.ranks)
        for replica in range(layout.replicas)
    ]
    values = layout.sizes | {
        "schedule": layout.schedule,
        "pipeline_ranks": layout.stages,
        "zero_stage": layout.zero_stage,
        "precision": facts.job.precision,
        "device": "cpu" if facts.job.on_cpu else "cuda",
        "step_seconds": facts.step_seconds,
        "peak_flops_per_second": facts.peak_flops_per_second,
        "ranks": ranks,
    }
    (run_dir / "trace" / "summary.json").write_text(json.dumps(values | summary))
    (run_dir / "machine.json").write_text(machine_json(facts.machine))
    return run_dir

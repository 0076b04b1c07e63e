"""Every way to lay a run out on its devices, and the DeepSpeed JSON of each."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpm_ds.config.ds_config import ResolvedDsConfig, resolve
from ddpm_ds.config.ds_keys import KEYS
from ddpm_ds.pipeline.placement import ACROSS_HOSTS, AcrossHosts
from ddpm_ds.pipeline.schedule import Schedule
from ddpm_ds.predict.workload import Workload

MOST_MICRO_BATCHES_PER_STAGE = 64
"""More than that many micro-batches a stage don't make the bubble worth mentioning smaller."""
INTERVALS = (1, 2, 4)
"""Layers between kept activations that are tried."""


@dataclass(frozen=True)
class Candidate:
    """One way: what the JSON's keys are set to."""

    stages: int
    """Pipeline ranks; the fold has twice as many stages in its cuts."""
    replicas: int
    schedule: Schedule
    micro_batch_images: int
    micro_batches: int
    checkpoint_interval: int
    """0 keeps all activations."""
    zero_stage: int
    offload: bool
    """Adam's state and the averaged weights in host memory."""
    across: AcrossHosts | Literal["auto"] = "auto"
    """What is split over nodes; "auto" where it makes no difference."""

    @property
    def apart(self) -> AcrossHosts:
        """What is in different nodes, where there are several."""
        if self.across == "auto":
            return "replicas" if self.stages == 1 else "stages"
        return self.across

    def words(self) -> str:
        """In a few words, for a sentence."""
        pipeline = f"{self.stages} stages ({self.schedule})" if self.stages > 1 else "1 stage"
        recompute = ", recomputing activations" if self.checkpoint_interval else ""
        across = "" if self.across == "auto" else f", {self.across} across nodes"
        return (
            f"{pipeline} x {self.replicas} replica{'s' * (self.replicas > 1)}{across}, {self.micro_batches} "
            f"micro-batch{'es' * (self.micro_batches > 1)} of {self.micro_batch_images}, "
            f"ZeRO-{self.zero_stage}{' with offload' if self.offload else ''}{recompute}"
        )


def layouts(job: Workload, devices: int, *, offload: bool, nodes: int = 1) -> Iterator[Candidate]:
    """All layouts of a job that share devices, layers and batch without remainder.

    ``offload`` says whether the devices have a host to put Adam's state on. Of micro-batches, those between 1 and 64
    per stage, and for the fold at least 2 per rank; a given ``train.accumulation`` leaves one choice. In several nodes
    either stages or replicas are split over them.
    """
    batch, wanted = job.spec.train.batch_images, job.spec.train.accumulation
    zeros = _zero_choices(job, offload)
    for stages in _divisors(devices):
        replicas = devices // stages
        if stages > len(job.layers) or batch % replicas:
            continue
        share = batch // replicas
        for schedule in _schedules(stages, len(job.layers)):
            for micro_batches in _divisors(share):
                fewest = 2 * stages if schedule == "folded" else 1
                most = MOST_MICRO_BATCHES_PER_STAGE * stages
                if not fewest <= micro_batches <= most or wanted not in ("auto", micro_batches):
                    continue
                for (zero_stage, offloaded), interval, across in itertools.product(
                    zeros, (0, *INTERVALS), placements(stages, replicas, nodes)
                ):
                    yield Candidate(
                        stages,
                        replicas,
                        schedule,
                        share // micro_batches,
                        micro_batches,
                        interval,
                        zero_stage,
                        offloaded,
                        across,
                    )


def placements(stages: int, replicas: int, nodes: int) -> tuple[AcrossHosts | Literal["auto"], ...]:
    """What may be split over nodes, where there is a choice."""
    return ACROSS_HOSTS if nodes > 1 and stages > 1 and replicas > 1 else ("auto",)


def ds_config(job: Workload, layout: Candidate, bounds: Sequence[int]) -> dict[str, Any]:
    """The given DeepSpeed JSON with a layout and its cuts filled in; everything else stays as given."""
    config = copy.deepcopy(job.config)
    config["train_micro_batch_size_per_gpu"] = layout.micro_batch_images
    config["gradient_accumulation_steps"] = layout.micro_batches
    pipeline = config.setdefault("pipeline", {})
    pipeline |= {
        "stages": layout.stages,
        "schedule": layout.schedule,
        "partition": [int(cut) for cut in bounds[1:-1]] if layout.stages > 1 else "flops",
        "across_hosts": layout.across,
        "activation_checkpoint_interval": layout.checkpoint_interval,
    }
    zero = config.setdefault("zero_optimization", {})
    zero["stage"] = layout.zero_stage
    zero.pop("offload_optimizer", None)
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.zero_stage == 0:
        config["zero_optimization"] = {"stage": 0}
        for name in ("hysteresis", "consecutive_hysteresis"):  # only ZeRO's loss scaler has them
            config.get("fp16", {}).pop(name, None)
    return config


def resolved(job: Workload, layout: Candidate, bounds: Sequence[int]) -> ResolvedDsConfig:
    """The JSON of a layout as training would read it.

    Raises:
        DsConfigError, LayoutError: training would refuse it.
    """
    return resolve(
        ds_config(job, layout, bounds),
        job.spec,
        world_size=layout.stages * layout.replicas,
        stages=None,
        path=job.config_path,
    )


def _schedules(stages: int, layers: int) -> tuple[Schedule, ...]:
    folds = stages > 1 and 2 * stages <= layers and KEYS["pipeline.schedule"].kind.accepts("folded")
    return ("1f1b", "folded") if folds else ("1f1b",)


def _zero_choices(job: Workload, offload: bool) -> list[tuple[int, bool]]:
    """ZeRO stages, each without and with offload, as far as the JSON's other keys allow them."""
    accumulates_wide = "grad_accum_dtype" in job.config.get("data_types", {})  # which needs ZeRO
    stages = [1, 2] if accumulates_wide else [0, 1, 2]
    choices = [(stage, False) for stage in stages]
    if offload and KEYS["zero_optimization.offload_optimizer.device"].kind.accepts("cpu"):
        choices += [(1, True), (2, True)]
    return choices


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})

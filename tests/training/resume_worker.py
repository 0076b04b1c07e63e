"""Rung d of the ladder of trust, one rank: train tiny courses, from the beginning or from checkpoints of any layout.

    python tests/training/resume_worker.py COURSES.json FOLDER

A course without sources trains ``STEPS`` steps, saves, trains as many again and saves. With sources, each is loaded in
turn, into the one engine, and trained to the same end. What was seen goes to
``FOLDER/{course}/{source or "whole"}/rank{r}.json``, beside the checkpoints.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.checkpoint.folder import whole
from ddpm_ds.data.cache import Subset
from ddpm_ds.data.loader import MicroBatch, Share
from ddpm_ds.data.prepare import prepare
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.planning.run_plan import RunDraft
from ddpm_ds.training.ema import Ema, averages_of
from ddpm_ds.training.objective import Denoising, Noised, replica_batches
from ddpm_ds.training.saving import Saver, described
from tests.checkpoint.saving import store_of
from tests.launching import drafted
from tests.pipeline.ladder_worker import groups_of_its_own

STEPS = 3
OVERFLOWING = (13, 30)
"""Images of the second and of the fourth step, that overflow whatever the scale: one before and one after the save."""
HALFLIFE_IMAGES, RAMPUP_FRACTION = 15, 0.5


@dataclass(frozen=True)
class Course:
    """One way of training, and the checkpoints to go on from."""

    name: str
    spec: str
    ds_config: str
    stages: int
    accumulation: int
    overflow: bool = False
    on_host: bool = False
    """Whether averages are in host memory."""
    changes: tuple[str, ...] = ()
    """Changes of the spec."""
    sources: dict[str, str] = field(default_factory=dict)


class Overflowing(Denoising):
    """Denoising with a NaN in the noise of some images."""

    def prepare(self, micro_batch: MicroBatch) -> Noised:
        prepared = super().prepare(micro_batch)
        bad = torch.isin(micro_batch.index, torch.tensor(OVERFLOWING))
        return prepared._replace(eps=prepared.eps.masked_fill(bad[:, None, None, None], torch.nan))


def loss_of_all(engine: UnetPipelineEngine, loss: Tensor) -> float:
    """Mean over the replicas of the last stage, in one order of summation."""
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, (engine.stage_id == engine.loss_stage, loss.item()))
    last = [value for knows_it, value in losses if knows_it]
    return sum(last) / len(last)


def averaged(old: list[Tensor], engine: UnetPipelineEngine) -> list[Tensor]:
    """What the average is after one more step, by the formula, from what it was before."""
    halflife = min(HALFLIFE_IMAGES, RAMPUP_FRACTION * engine.images_seen)
    kept = 0.5 ** (engine.train_batch_size() / halflife)
    masters = [master.detach().double() for master in insides.masters(engine)]
    return [kept * mean + (1 - kept) * master for mean, master in zip(old, masters, strict=True)]


def train(plan: RunDraft, engine: UnetPipelineEngine, ema: Ema, report: dict[str, Any]) -> None:
    """``STEPS`` steps; adds what they gave to ``report``."""
    layout = plan.ds.layout
    batches = replica_batches(
        plan.spec,
        Subset.of(prepare(plan.spec.data)),
        Share(layout.micro_batch_images, layout.replicas, engine.grid.get_data_parallel_id()),
        engine.device,
        fields={"images"},
        start_images=engine.next_index,
    )
    used: list[float] = []
    hook = engine.basic_optimizer.register_step_pre_hook(lambda own, *_: used.append(float(own.param_groups[0]["lr"])))
    engine.averages = ema
    for _ in range(STEPS):
        used.clear()
        expected = [shadow.double() for shadow in ema.shadows]
        loss = engine.train_batch(batches)
        report["losses"].append(loss_of_all(engine, loss))
        report["rates"].append((engine.step_rate, [*used]))
        expected = averaged(expected, engine)
        errors = [(shadow - mean).abs().max().item() for shadow, mean in zip(ema.shadows, expected, strict=True)]
        report["ema_errors"].append(max(errors))
    hook.remove()


def run_course(course: Course, folder: Path) -> None:
    """All of a course, in one engine."""
    changes = [f"train.accumulation={course.accumulation}", f"ema.on_host={course.on_host}".lower()]
    changes += course.changes
    world_size = dist.get_world_size()
    plan = drafted(Path(course.spec), changes, Path(course.ds_config), world_size=world_size, stages=course.stages)
    objective = (Overflowing if course.overflow else Denoising)(plan.spec, torch.device("cpu"))
    engine = build_engine(plan.layers, plan.bounds, plan.ds, objective, seed=plan.spec.train.seed)
    ema = averages_of(engine, plan.spec.ema)
    store = store_of(dist.get_rank(), world_size)
    for name, source in (course.sources or {"whole": ""}).items():
        there = folder / course.name / name
        report: dict[str, Any] = {
            "losses": [],
            "rates": [],
            "ema_errors": [],
            "stage_elements": sum(parameter.numel() for parameter in engine.module.parameters()),
            "shadow_elements": sum(shadow.numel() for shadow in ema.shadows),
        }
        about = described(plan.spec, plan.ds, plan.layers, {}, None)
        saver = Saver(engine, ema, there, plan.spec.checkpoint, about, log=print, store=store)
        if source:
            saver.load(whole(Path(source)))
        else:
            train(plan, engine, ema, report)
            saver.save()
        train(plan, engine, ema, report)
        saver.save()
        saver.check_saved()
        dist.barrier()
        (there / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    del engine.basic_optimizer.param_groups[1:]  # of other rates, which DeepSpeed does not know
    engine.destroy()


def main() -> None:
    courses, folder = map(Path, sys.argv[-2:])
    use_host_accelerator()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for course in json.loads(courses.read_text()):
        with groups_of_its_own():
            run_course(Course(**course), folder)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # without freeing one by one what the process was forked with


if __name__ == "__main__":
    main()

"""Changes beside a step's layout: loaders, loss scale, and how often a run is saved and looked at."""

from __future__ import annotations

import math
from dataclasses import replace

from ddpm_ds.verdict.change import Candidates, Change, counted, saved, stepping
from ddpm_ds.verdict.facts import Facts
from ddpm_ds.verdict.whatif import Model

MOST_WORKERS = 16
PAUSE_SHARE = 0.01
"""What pauses may take after a change."""


def workers(facts: Facts, model: Model) -> Candidates:
    """As many loader processes as keep up with the steps."""
    now, workers = model.now, facts.spec.data.workers
    wait = max(rank.data_wait for rank in facts.ranks)
    alone = model.step_seconds(replace(now, data_wait=0.0))
    work = wait if workers == 0 else workers * (alone + wait)
    enough = min(math.ceil(work / alone), MOST_WORKERS)
    if enough <= workers or not wait:
        return
    left = max(0.0, work / enough - alone) / wait
    words = f"With {counted(enough, 'loader')} images are read ahead while the devices compute"
    gain = saved(facts, model, replace(now, data_wait=left))
    yield Change(words, gain, (f"--set data.workers={enough}",))


def loss_scale(facts: Facts, model: Model) -> Candidates:
    """A scale that does not overflow, or a precision without one."""
    found = facts.overflows
    share = stepping(facts) * found.skipped / found.steps
    if found.last_scale < found.first_scale:
        power = max(int(math.log2(found.last_scale)), 0)
        words = "A loss scale that begins where it ended overflows in no step at the beginning"
        yield Change(words, share, config={"fp16": {"initial_scale_power": power}})
    else:
        words = "bf16 has fp32's range and needs no loss scale"
        yield Change(words, share, config={"fp16": {"enabled": False}, "bf16": {"enabled": True}})


def rarer_checkpoints(facts: Facts, model: Model) -> Candidates:
    spec, share = facts.spec.checkpoint, facts.pauses.checkpoint_share
    factor = _factor(share)
    gain, words = share * (1 - 1 / factor), f"Checkpoints {factor} times as rare"
    if spec.every_images is not None:
        yield Change(words, gain, (f"--set checkpoint.every_images={factor * spec.every_images}",))
    elif spec.every_minutes is not None:
        yield Change(words, gain, (f"--set checkpoint.every_minutes={factor * spec.every_minutes:g}",))


def rarer_inspections(facts: Facts, model: Model) -> Candidates:
    """Of samples and held-out losses."""
    share = facts.pauses.inspection_share
    losses = min(facts.evaluation_seconds / facts.pauses.seconds, share)
    for part, key, every, what in (
        (losses, "evaluation", facts.spec.evaluation.every_images, "Held-out losses"),
        (share - losses, "samples", facts.spec.samples.every_images, "Samples"),
    ):
        if every is not None and part:
            factor = _factor(part)
            words = f"{what} {factor} times as rare"
            yield Change(words, part * (1 - 1 / factor), (f"--set {key}.every_images={factor * every}",))


def _factor(share: float) -> int:
    """How much rarer pauses have to be to take no more than they should."""
    return max(2, math.ceil(share / PAUSE_SHARE))

"""Cost of a training step on the host: operators, launches and Python calls of the engine, beside a plain loop.

As a script, with a file of cases and a folder, this counts one step of each. An operator is a call that reaches
PyTorch's dispatcher; it is a launch unless it is a view or an allocation. Draws of noise and timesteps are left out, in
the loop as in the engine. Counts are exact, but depend on the processor's vector instructions, alike in both.
"""

import functools
import itertools
import unittest.mock
from collections.abc import Callable
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from rivals.measure import HostCost
from rivals.rows import Optimizer
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ddpm_ds.config.ds_model import DsConfig
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.schema.layout import BUCKET_ELEMENTS
from ddpm_ds.training.ema import Ema
from ddpm_ds.training.objective import Denoising, Noised
from ddpm_ds.unet.model import UNet
from tests.launching import tiny_spec
from tests.pipeline.batches import device, global_batch, micro_batches
from tests.pipeline.ladder_worker import DTYPES, Case, Precision, layers_of, report_cases, run_cases

pytestmark = pytest.mark.capability
WARM_UP = 2
IMAGES = 2
"""Images of a micro-batch."""
PARAMETERS = {2: 184, 1: 128}
"""Parameters of the U-Net by its blocks per level."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


class Uncounted(Denoising):
    """An objective whose draws are not counted."""

    def prepare(self, micro_batch: MicroBatch) -> Noised:
        with _disable_current_modes():
            return super().prepare(micro_batch)


def counted(step: Callable[[int], object]) -> HostCost:
    """Counts of a step after the warm-up, by its number."""
    for number in range(WARM_UP):
        step(number)
    numbers = itertools.count(WARM_UP)
    return HostCost.of(lambda: step(next(numbers)))


def spec_of(blocks: int, images: int) -> RunSpec:
    """A small U-Net without dropout, whose masks are not the engine's."""
    unet = {"channels": 8, "multipliers": [1, 2], "blocks_per_level": blocks, "attention_resolutions": [4]}
    sections: dict[str, Any] = {"unet": {**unet, "dropout": 0.0, "classes": None}}
    return tiny_spec(**sections, train={"batch_images": images, "label_drop": 0.0})


@functools.cache
def loop_cost(blocks: int, precision: Precision, count: int) -> HostCost:
    """A plain loop over ``count`` micro-batches, with the optimizer of the benchmark's loops and an averaged U-Net."""
    spec = spec_of(blocks, IMAGES * count)
    unet = UNet(layers_of(spec), spec.train.seed).to(device(), DTYPES[precision])
    setting: Any = SimpleNamespace(
        plan=SimpleNamespace(spec=spec, ds=SimpleNamespace(config=DsConfig())), device=device()
    )
    optimizer = Optimizer(setting, unet.parameters(), fused=True, scaled=precision == "fp16")
    trained: list[Tensor] = [*optimizer.masters] or [*unet.parameters()]
    averages, objective = [one.detach().clone() for one in trained], Uncounted(spec, device())
    assert len(trained) == PARAMETERS[blocks]

    def step(number: int) -> None:
        total = torch.zeros((), device=device())
        batch = global_batch(spec, number)
        for first in range(0, len(batch.index), IMAGES):
            one = batch.each(itemgetter(slice(first, first + IMAGES)))
            prepared = objective.prepare(one)
            loss = objective.loss(unet(*objective.inputs(prepared), images=one.index), prepared)
            total += loss.detach()
            optimizer.scaler.scale(loss / count).backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, trained, 0.01)

    return counted(step)


def engine_cost(spec: RunSpec, case: Case) -> HostCost:
    """The engine, with its averaged weights."""
    with unittest.mock.patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        zero = {"stage": case.zero, "reduce_bucket_size": BUCKET_ELEMENTS}
        engine = case.engine(spec, zero_optimization=zero)
    engine.objective = Uncounted(spec, device())
    engine.averages = Ema(engine, spec.ema)

    def step(number: int) -> None:
        engine.train_batch(micro_batches(engine, global_batch(spec, number)))

    cost = counted(step)
    engine.destroy()
    return cost


QUICK = (0, "fp32"), (0, "fp16"), (1, "bf16"), (2, "bf16"), (2, "fp16")
"""Pairs of a ZeRO stage and a precision; each of the others is in one of these."""
ALL = [Case(1, 1, zero, precision, 0, fused=True, micro_batches=1) for zero in (0, 1, 2) for precision in PRECISIONS]
WIDE = Case(1, 1, 2, "bf16", 0, fused=True, micro_batches=1, fp32_accumulation=True)
SEVERAL = [Case(1, 1, 2, "bf16", 0, fused=True, micro_batches=3), WIDE]


def counts(values: dict[str, Any], blocks: int) -> list[dict[str, int]]:
    """Counts of the loop and of the engine."""
    case = Case.of(values)
    engine = engine_cost(spec_of(blocks, IMAGES * case.micro_batches), case)
    return [asdict(cost) for cost in (loop_cost(blocks, case.precision, case.micro_batches), engine)]


@pytest.mark.launch
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_step_of_the_engine_costs_the_host_what_a_plain_loop_does(quick: bool, tmp_path: Path) -> None:
    """And no more for more parameters."""
    own = [case for case in ALL if ((case.zero, case.precision) in QUICK) == quick]
    cases = [(case, 2) for case in own + SEVERAL * quick] + [(case, 1) for case in own]
    (reports,) = run_cases(1, Path(__file__), [[asdict(case), blocks] for case, blocks in cases], tmp_path)
    found = {case: [HostCost(**cost) for cost in costs] for case, costs in zip(cases, reports, strict=True)}
    for case, blocks in cases:
        loop, engine = found[case, blocks]
        few = 16 + 4 * case.micro_batches  # the engine also skips steps that are not finite, and knows images' indices
        assert engine.launches - loop.launches <= few, case
        assert engine.operators - loop.operators <= few, case
        if case.zero or case.precision == "bf16":
            assert engine.calls <= 1.1 * loop.calls, case
        assert engine.slow == 0, f"foreach takes a launch for each tensor in {case}"
        assert engine.waits == 0, case
    for case in own:
        (loop, engine), (small_loop, small) = found[case, 2], found[case, 1]
        assert engine.operators - loop.operators == small.operators - small_loop.operators, case
        assert engine.launches - loop.launches == small.launches - small_loop.launches, case


if __name__ == "__main__":
    report_cases(lambda case: counts(*case))

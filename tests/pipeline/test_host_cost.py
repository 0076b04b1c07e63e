"""What a training step costs the host: operators, launches and Python calls of the engine, beside a plain loop.

As a script, with a folder for its report, this counts one step of each case: an operator is one that reaches PyTorch's
dispatcher, a launch one that is neither a view nor an allocation. Those that draw noise and timesteps are left out, in
the loop as in the engine. Counts are exact, but depend on the processor's vector instructions, alike in both.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
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

from ddpm_ds.config.ds_config import BUCKET_ELEMENTS
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.predict.simulate import typical_programs
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.objective import Denoising, Noised
from ddpm_ds.unet.model import UNet
from tests.launching import run_ranks, tiny_spec
from tests.pipeline.batches import device, global_batch, micro_batches
from tests.pipeline.ladder_worker import DTYPES, Case, Precision, layers_of

pytestmark = pytest.mark.capability
WARM_UP = 2
IMAGES = 2
"""Images of a micro-batch."""
PARAMETERS = {2: 184, 1: 128}
"""Parameters of the U-Net by its blocks per level."""
Costs = dict[str, list[HostCost]]
"""Counts of the loop and the ranks by case."""
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
        plan=SimpleNamespace(spec=spec, ds=SimpleNamespace(blocks={"gradient_clipping": 1.0})), device=device()
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
    """A rank of the engine, with its averaged weights; two ranks have weight-gradient passes."""
    with unittest.mock.patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        zero = {"stage": case.zero, "reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
        engine = case.engine(spec, zero_optimization=zero)
    engine.objective = Uncounted(spec, device())
    if case.stages > 1:
        engine.follow(typical_programs("planned", case.micro_batches, case.stages, case.micro_batches))
    engine.averages = Ema(engine, spec.ema)

    def step(number: int) -> None:
        engine.train_batch(micro_batches(engine, global_batch(spec, number)))

    cost = counted(step)
    engine.destroy()
    return cost


ALL = [Case(1, 1, zero, precision, 0, fused=True, micro_batches=1) for zero in (0, 1, 2) for precision in PRECISIONS]
LONG = [case for case in ALL if (case.zero, case.precision) in ((0, "bf16"), (1, "fp32"), (1, "fp16"), (2, "fp32"))]
"""Pairs of a stage and a precision that each meet others in the quick cases."""
ONE = [pytest.param(case, marks=pytest.mark.long) if case in LONG else pytest.param(case) for case in ALL]
WIDE = Case(1, 1, 2, "bf16", 0, fused=True, micro_batches=1, fp32_accumulation=True)
SEVERAL = [Case(1, 1, 2, "bf16", 0, fused=True, micro_batches=3), WIDE]


def name_of(case: Case, blocks: int = 2) -> str:
    """A case in a report."""
    wide = "-wide" if case.fp32_accumulation else ""
    return f"zero{case.zero}-{case.precision}{wide}-{case.micro_batches} x {blocks} blocks"


def cases_of(what: str) -> list[tuple[Case, int]]:
    """The quick or the long cases, each with the U-Net's blocks per level."""
    found = [(case, blocks) for case in ALL if (case in LONG) == (what == "long") for blocks in PARAMETERS]
    return found + [(case, 2) for case in SEVERAL if what == "quick"]


def report(folder: Path, processes: int, what: str) -> Costs:
    """What the ranks counted, by case; of one process the loop's counts first."""
    done = run_ranks(processes, Path(__file__), str(folder), what)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
    return {name: [HostCost(**cost) for rank in ranks for cost in rank[name]] for name in ranks[0]}


@pytest.fixture(scope="module")
def costs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Costs]:
    return functools.cache(lambda what: report(tmp_path_factory.mktemp("cost"), 1, what))


@pytest.mark.launch
@pytest.mark.parametrize("case", [*ONE, *SEVERAL], ids=name_of)
def test_a_step_of_the_engine_costs_the_host_what_a_plain_loop_does(
    costs_of: Callable[[str], Costs], case: Case
) -> None:
    """And no more for more parameters."""
    costs = costs_of("long" if case in LONG else "quick")
    loop, engine = costs[name_of(case)]
    few = 16 + 4 * case.micro_batches  # the engine also skips steps that are not finite, and knows each image's index
    assert engine.launches - loop.launches <= few
    assert engine.operators - loop.operators <= few
    if case.zero or case.precision == "bf16":
        assert engine.calls <= 1.1 * loop.calls
    assert engine.slow == 0, "foreach takes a launch for each tensor"
    assert engine.waits == 0
    if case in ALL:
        small_loop, small = costs[name_of(case, 1)]
        assert engine.operators - loop.operators == small.operators - small_loop.operators
        assert engine.launches - loop.launches == small.launches - small_loop.launches


def main() -> None:
    use_host_accelerator()
    torch.set_num_threads(1)
    with process_group():
        folder, what = sys.argv[-2:]
        found = {}
        for case, blocks in cases_of(what):
            spec = spec_of(blocks, IMAGES * case.micro_batches)
            loops = [loop_cost(blocks, case.precision, case.micro_batches)] if case.stages == 1 else []
            found[name_of(case, blocks)] = [asdict(cost) for cost in (*loops, engine_cost(spec, case))]
        Path(folder, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

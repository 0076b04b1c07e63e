"""A training step that does not log lets the host run ahead of the device.

As a script, with a file of cases and a folder, this trains tiny cases in one process, and writes where a step waits for
the device; in courses also what a step with infinite gradients changes.
On a CPU nothing waits, so operations that would wait on CUDA are counted: those that hand a value to or from the host
or whose result has a size that depends on values, and the accelerator's synchronize.
"""

import contextlib
import math
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from rivals.measure import WAITS, in_optimizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import Objective, UnetPipelineEngine
from ddpm_ds.training.ema import Ema
from tests.launching import tiny_spec
from tests.pipeline.batches import device, global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, Precision, report_cases, run_cases

WARM_UP = 2
BATCH = 4
POISONED = 1
"""The step of a course whose loss is infinite."""
FROM_THE_HOST = ("lift_fresh",)
"""``torch.tensor(value)``: a copy from memory that is not pinned."""
WARNING = "called a synchronizing CUDA operation"
"""What PyTorch says of a wait; it also warns, once, that it does not see every one."""


class Synchronisations(TorchDispatchMode):
    """Notes every operation that would wait on CUDA, with the innermost places in the code it comes from.

    On CUDA itself what PyTorch warns of is noted instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS + FROM_THE_HOST or (name.startswith("index") and self._picks_by_mask(args)):
            self.note(name)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _picks_by_mask(args: Any) -> bool:
        chosen = args[1] if isinstance(args[1], list | tuple) else ()
        return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in chosen)

    def note(self, what: str) -> None:
        if in_optimizer():
            return
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        places = [
            f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno} {frame.name}" for frame in frames[-8:-1]
        ]
        self.found.append(f"{what}: {' > '.join(places)}")

    def warning(self, words: str) -> None:
        """Note a wait that PyTorch warns of."""
        if WARNING in words:
            self.note(words)

    @contextlib.contextmanager
    def warned(self) -> Iterator[None]:
        """On CUDA."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: self.warning(str(message))
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The accelerator's own wait counts as well."""
        accelerator = get_accelerator()
        waits = accelerator.synchronize
        accelerator.synchronize = lambda *_: self.note("synchronize")
        try:
            with self.warned() if device().type == "cuda" else self:
                yield
        finally:
            accelerator.synchronize = waits


def built(case: Case, clipping: float = 1.0) -> tuple[UnetPipelineEngine, RunSpec]:
    """An engine of one process."""
    spec = tiny_spec(
        unet={"channels": 4, "multipliers": [1], "attention_resolutions": []}, train={"batch_images": BATCH}
    )
    with unittest.mock.patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        return case.engine(spec, gradient_clipping=clipping), spec


def places_of_waits(case: Case) -> list[str]:
    """Places in the code at which a step after the warm-up waits."""
    engine, spec = built(case)
    engine.averages, watch = Ema(engine, spec.ema), Synchronisations()
    steady = WARM_UP + (device().type == "cuda")  # where the step before tries a graph, and waits for both results
    for step in range(steady + 1):
        loads = list(micro_batches(engine, global_batch(spec, step)))
        with watch.watching() if step == steady else contextlib.nullcontext():
            engine.train_batch(iter(loads))
    engine.destroy()
    return watch.found


def course(case: Case) -> tuple[list[str], list[int], list[bool]]:
    """Values that a step with an infinite gradient changes; after each step, how many more would send their messages by
    the hosts; before and after each step, whether samples would.

    If the case skips no step, no gradient is infinite.
    """
    engine, spec = built(case)
    objective, poisoned = engine.objective, Poisoned(engine.objective)
    changed: list[str] = []
    cautious, sampling = [], [engine.warm_up(1, gradients=False) for _ in range(2)]
    for step in range(3):
        bad = step == POISONED and skips(case)
        engine.objective = poisoned if bad else objective
        before = state_of(engine) if bad else {}
        engine.train_batch(micro_batches(engine, global_batch(spec, step)))
        changed += [name for name, value in before.items() if not torch.equal(value, state_of(engine)[name])]
        finite = math.isfinite(engine.gradients.norm())
        changed += [f"step {step}: norm"] if finite == bad else []
        cautious.append(engine._cautious_steps)
        sampling.append(engine.warm_up(1, gradients=False))
    changed += [] if engine.count_skipped_steps() == skips(case) else ["count"]
    engine.destroy()
    return changed, cautious, sampling


def state_of(engine: UnetPipelineEngine) -> dict[str, Tensor]:
    """Copies of the weights, and of all that the optimizer keeps of them."""
    state = {f"master {number}": master.detach().clone() for number, master in enumerate(insides.masters(engine))}
    for number, master in enumerate(insides.masters(engine)):
        kept = engine.basic_optimizer.state[master]
        state |= {f"{name} {number}": value.clone() for name, value in kept.items() if torch.is_tensor(value)}
    return state | {f"weight {name}": value.detach().clone() for name, value in engine.module.named_parameters()}


class Poisoned:
    """An objective whose loss is infinite."""

    def __init__(self, objective: Objective) -> None:
        self.context, self.prepare, self.inputs = objective.context, objective.prepare, objective.inputs
        self.loss: Callable[..., Tensor] = lambda *given: objective.loss(*given) * float("inf")


WAYS: dict[bool, tuple[tuple[int, Precision, bool], ...]] = {
    False: ((0, "fp32", False), (0, "bf16", True), (1, "bf16", False), (0, "fp16", False), (2, "fp16", True)),
    True: ((2, "fp32", True), (2, "fp16", False), (0, "fp16", True)),
}
"""ZeRO stages, precisions and whether Adam is fused, in quick cases and in long ones, whose values each meet others in
the quick ones."""
CASES = {
    slow: [Case(1, 1, zero, precision, 0, micro_batches=1, fused=fused) for zero, precision, fused in ways]
    for slow, ways in WAYS.items()
}


def skips(case: Case) -> bool:
    """Whether a step with an infinite gradient is skipped."""
    return (case.zero, case.precision) != (0, "fp32")


def expected(case: Case) -> dict[str, Any]:
    """Findings that a case must have; of its waits only their number."""
    return {
        "waits": 0 if case.fused else 1,  # the host hears whether to step, unless the optimizer decides that itself
        "changed by a skipped step": [],
        # one of these steps allocates no moments if it is skipped, so the allocator reaches its peak in a later one
        "steps that will send by the hosts": [1, 1, 0] if skips(case) else [1, 0, 0],
        "samples sent by the hosts": [True, False, True, False, False],
    }


def run(values: dict[str, Any], course_too: bool) -> dict[str, Any]:
    """The places where a case waits, and what else is expected of a course."""
    case = Case.of(values)
    names = list(expected(case))[1:] if course_too else []
    return {"waits": places_of_waits(case), **dict(zip(names, course(case) if course_too else (), strict=True))}


@pytest.mark.launch
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_step_waits_as_seldom_as_it_can_and_a_skipped_one_changes_nothing(slow: bool, tmp_path: Path) -> None:
    cases = CASES[slow]
    (reports,) = run_cases(1, Path(__file__), [[asdict(case), True] for case in cases], tmp_path)
    for case, found in zip(cases, reports, strict=True):
        assert found | {"waits": len(found["waits"])} == expected(case), (case, found["waits"])


@pytest.mark.launch
@pytest.mark.gpu
def test_on_a_gpu_pytorch_sees_no_other_waits(tmp_path: Path) -> None:
    cases = [*CASES[False], *CASES[True]]
    given = [[asdict(case), False] for case in cases]
    (reports,) = run_cases(1, Path(__file__), given, tmp_path, DS_ACCELERATOR="cuda")
    for case, found in zip(cases, reports, strict=True):
        assert len(found["waits"]) == expected(case)["waits"], (case, found["waits"])


if __name__ == "__main__":
    report_cases(lambda case: run(*case))

"""Graphs that are kept, dropped and captured again in a long run give the bits of eager steps.

As a script, with a file of cases and a folder, this trains replicas eagerly and by graphs in one process each, so that
both choose the same algorithms. Without a GPU graphs are recordings (``test_graph.py``).
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from torch import Tensor

from ddpm_ds.config.spec import EmaSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.ground import cuda_graphs
from ddpm_ds.pipeline.graph import StepGraph
from ddpm_ds.training.ema import averages_of
from ddpm_ds.training.held_out_loss import HeldOutLoss
from ddpm_ds.training.objective import Denoising
from ddpm_ds.training.validation import measured
from tests.launching import tiny_spec
from tests.pipeline.batches import device, global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, report_cases, run_cases
from tests.pipeline.test_graph import FEW, RecordedGraph, Recording, recordings_of
from tests.training.validation_worker import HELD_OUT, WATCHDOG, held_out_of, store_of

REPLICAS = Case(1, 2, 1, "bf16", 0, fused=True)
REPEATABLE = {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables of ranks on GPUs whose kernels give the same bits each time."""
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SIZES = [(height, width) for height in (8, 12, 16, 20) for width in (8, 16, 24)]
"""Twelve heights and widths, more than SDXL's buckets of aspect."""


def course(values: dict[str, Any], graphs: bool) -> list[Any]:
    """Loss and norm of each step, and each held-out loss, with eager steps or with graphs; number of recordings."""
    on_cuda, case = device().type == "cuda", Case.of(values["case"])
    spec = tiny_spec(data={"held_out_images": HELD_OUT}, unet={} if on_cuda else FEW)
    with patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        engine = case.engine(spec)
    ema = engine.averages = averages_of(engine, EmaSpec())
    engine.rate = lambda before, batch: 1e-3 / (1 + before)
    engine.graph = StepGraph(engine, graphs) if on_cuda or not graphs else RecordedGraph(engine)
    store = store_of(spec)
    held_out = HeldOutLoss(spec, engine.device, store, held_out_of(spec, store), images=engine.micro_batch_size)
    given: list[list[float]] = []
    for step in range(1, values["steps"] + 1):
        loss = engine.train_batch(micro_batches(engine, global_batch(spec, step)))
        given.append([float(loss), engine.gradients.norm()])
        if step % values["validate_every"] == 0:
            with ema.applied():
                given.append([*measured(held_out, engine, WATCHDOG).values()])
    assert not (graphs and engine.graph.why_eager), engine.graph.why_eager
    engine.graph.drop()  # NCCL would wait for it when its groups are destroyed
    engine.destroy()
    return [given, len(recordings_of(engine))]


def run(values: dict[str, Any]) -> list[list[Any]]:
    """The courses of a case: twice with eager steps, then with graphs."""
    torch.use_deterministic_algorithms(device().type == "cuda", warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return [course(values, graphs) for graphs in (False, False, True)]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("steps", "environment"),
    [
        pytest.param(12, {}, id="cpu"),
        *(
            pytest.param(200, REPEATABLE | {"NCCL_GRAPH_REGISTER": register} | more, id=name, marks=pytest.mark.gpu(2))
            for register, more, name in (
                ("0", {}, "graphs"),
                ("1", {}, "registered memory"),
                ("0", EXPANDABLE, "expandable segments"),  # with which NCCL can't register memory
            )
        ),
    ],
)
def test_graphs_captured_again_after_each_validation_train_as_eager_steps_on_several_gpus(
    steps: int, environment: dict[str, str], tmp_path: Path
) -> None:
    every = steps // 10 if environment else steps // 3
    values = {"case": asdict(REPLICAS), "steps": steps, "validate_every": every}
    for (found,) in run_cases(2, Path(__file__), [values], tmp_path, **environment):
        (eager, _), (again, _), (replayed, made) = found
        assert again == eager, "kernels do not repeat their bits"
        assert replayed == eager
        assert len(eager) == steps + steps // every
        assert made == (0 if environment else 3), "the last validation is followed by no step"


@contextlib.contextmanager
def captures(kind: str) -> Iterator[None]:
    """Let CUDA graphs be captured inside, or recordings that stand for them on a CPU."""
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        else:
            on_cpu: Any = {"CUDAGraph": Recording, "graph_pool_handle": lambda: None, "current_device": lambda: 0}
            stack.enter_context(patch.multiple(torch.cuda, **on_cpu))
            stack.enter_context(patch.object(cuda_graphs, "_spare_generator", contextlib.nullcontext))
        yield


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_draw_the_noise_of_eager_steps_after_all_sizes_were_captured(kind: str) -> None:
    """A graph reads numbers of its size at an address that must stay theirs while later sizes are captured."""
    device, images = torch.device(kind), torch.arange(4, device=kind)
    data = {"buckets": {"step": 8}, "source": "folder", "path": "pictures"}
    spec = tiny_spec(unet={**FEW, "dropout": 0.0}, data=data, diffusion={"input_perturbation": 0.1})
    objective = Denoising(spec, device)

    def noised(size: tuple[int, int], index: Tensor) -> Tensor:
        pixels = torch.zeros(4, 1, *size, dtype=torch.uint8, device=device)
        prepared = objective.prepare(MicroBatch(images=pixels, labels=torch.zeros_like(index), index=index))
        return objective.inputs(prepared)[0]

    captured = []
    with captures(kind):
        pool = torch.cuda.graph_pool_handle()
        for size in SIZES:
            noised(size, index := images.clone())  # as the trial does, whose memory outlives it
            graphs, found = cuda_graphs.Graphs(device, pool), list[Tensor]()
            graphs.capture(lambda size=size, index=index, found=found: found.append(noised(size, index)))  # type: ignore[misc]
            captured.append((size, index, graphs, found))
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()
        spoilt = [torch.full((2**20,), -1.0, device=device) for _ in range(8)]  # where freed memory lay
        for first, (size, index, graphs, results) in enumerate(captured):
            index.add_(1000 * first)
            graphs.replay()
            assert torch.equal(results[0], noised(size, index)), size
    del spoilt


if __name__ == "__main__":
    report_cases(run)

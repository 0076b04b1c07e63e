"""A step is a function of tensors at fixed addresses, so that a CUDA graph of it trains as eager steps do.

Without a GPU a graph is played by :class:`Recording`, which like one replays the operations of a step at the same
addresses and with the numbers that the host had: whatever a step takes from the host, or keeps at another address,
makes a replay differ from an eager step. As a script, with a file of cases and a folder, this trains both.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from ddpm_ds.config.spec import EmaSpec, RunSpec
from ddpm_ds.ground import cuda_graphs, keyed
from ddpm_ds.pipeline import build
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline import graph as graphs
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.gradients import FlatGradients
from ddpm_ds.pipeline.graph import StepGraph
from ddpm_ds.training.ema import averages_of
from ddpm_ds.unet import model
from tests.launching import on_a_shared_gpu, tiny_spec, tiny_text_spec
from tests.pipeline.batches import device, global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, Precision, report_cases, run_cases, spec_of
from tests.pipeline.random_programs import random_programs
from tests.pipeline.test_ladder import LATER, LOSS_TOLERANCE
from tests.pipeline.test_synchronisation import Poisoned

LINES = "each step is one CUDA graph", "each step is CUDA graphs with messages between them"
EAGER_STEP, BAD_STEP, STEPS = 4, 5, 7
"""Step that an observer watches, step whose loss is infinite, number of steps."""
SIZED_STEPS = 13
"""Steps whose images have three orders of sizes in turn."""
FEW: dict[str, Any] = {"multipliers": [1], "attention_resolutions": []}
"""Layers of most cases on a CPU; fields that are stored have every kind of layer but transformers, which text has."""
SMALL: dict[str, RunSpec] = {
    "plain": tiny_spec(unet=FEW),
    "text": tiny_text_spec(levels=1),
    "buckets": tiny_text_spec(
        levels=1,
        unet={"dropout": 0.0, "time_conditioning": "scale_shift"},
        data={"buckets": {"step": 8}},
        diffusion={"input_perturbation": 0.1},
    ),
}
"""Specs of cases on a CPU by their process; others are the ladder's."""


def write(images: Tensor, codes: Tensor, seed: int, stream: int, words: Tensor, normals: Tensor) -> None:
    """Draws like those of :mod:`ddpm_ds.ground.keyed_draws`, which read the same table; normal ones are uniform."""
    table = (codes & 0xFFFFFFFF)[None], (codes >> 32)[None] + stream
    with patch.object(keyed, "_columns", lambda *_: table):
        bits = torch.stack(keyed._philox(seed, {}, images), dim=-1).flatten(1)
    words.copy_(bits[:, : words.shape[1]])
    normals.copy_(bits[:, words.shape[1] :] * 2.0**-32)


class Recording(TorchDispatchMode):
    """Operations of a step on a CPU or of a part of one, kept like those of a CUDA graph."""

    made: ClassVar[set[int]] = set()
    """Storages that the parts of a step have made so far."""
    swapping: ClassVar[str] = ""
    """Name of the group whose ranks share images: its messages are part of a graph."""

    def __init__(self, ends: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.replays, self.compiled, self._ends = 0, 0, ends
        self.read: dict[int, StorageWeakRef] = {}
        """Storages that were read and that the step did not make; a CUDA graph keeps only their addresses."""
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers run compiled; :class:`CompiledCode` notes them."""
        return True

    def capture_begin(self, **_: Any) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self._ends()
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("send", "recv_"):
            group = dist.ProcessGroup.unbox(args[1])
            assert group.group_name == self.swapping, "a message is part of a graph"
        return self.note(func, args, kwargs or {})

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and keep it."""
        outputs = func(*args, **kwargs)
        self.compiled += isinstance(func, CompiledCode)
        for tensor in tensors([*args, *kwargs.values()]):
            if (storage := tensor.untyped_storage())._cdata not in self.made:
                self.read.setdefault(storage._cdata, StorageWeakRef(storage))
        self.made.update(tensor.untyped_storage()._cdata for tensor in tensors(outputs))
        if not func.is_view:
            self._calls.append((func, args, kwargs, tensors(outputs)))
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again on the recorded tensors, with the numbers that the host had then."""
        self.replays += 1
        for func, args, kwargs, outputs in self._calls:
            fresh = func(*args, **kwargs)
            if func.namespace == "c10d":
                (work,) = (dist.Work.unbox(one) for one in tree_leaves(fresh) if isinstance(one, torch.ScriptObject))
                work.wait()
                continue
            for kept, new in zip(outputs, tensors(fresh), strict=True):
                if kept is not new:
                    kept.copy_(new)

    def reset(self) -> None:
        self._calls.clear()


def tensors(values: Any) -> list[Tensor]:
    """Tensors of an operation's outputs; PyTorch's own walk takes as long as the operations."""
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in tensors(value)]
    return [values] if isinstance(values, Tensor) else []


class CompiledCode:
    """Code of a layer's forward or backward as one operation of a step, which a :class:`Recording` notes."""

    _boxed_call, is_view, namespace = True, False, "compiled"

    def __init__(self, code: Any) -> None:
        self._code = code

    def __call__(self, *inputs: Any) -> Any:
        modes = _get_current_dispatch_mode_stack()
        if len(inputs) == 1 and isinstance(inputs[0], list):  # from the compiler's own code, which gives them up
            (given,) = inputs
            inputs = tuple(given)
            given.clear()
        if modes and isinstance(modes[-1], Recording):
            with _disable_current_modes():
                return modes[-1].note(self, inputs, {})
        return self._code(list(inputs))


def compile_noted(layers: Sequence[nn.Module], cache: Path) -> None:
    """Compile two of the layers, which take long enough, to code that a recording can replay."""

    def noted(graph: Any, inputs: Any, **more: Any) -> Any:
        return CompiledCode(compile_fx_inner(graph, inputs, **more))

    backend = functools.partial(compile_fx, inner_compile=noted)
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        model.compile_layers(layers[2:4], cache)


class RecordedGraph(StepGraph):
    """The graphs of an engine on a CPU."""

    def __init__(self, engine: UnetPipelineEngine) -> None:
        with patch.object(engine, "device", torch.device("cuda")), patch.object(torch.cuda, "Stream"):
            self.reason = graphs.why_eager(engine, "auto")
            super().__init__(engine, True)
        self._stream, self._asked = None, "auto"
        self.recordings: list[list[Recording]] = []

    def _capture(self) -> str:
        recording = functools.partial(Recording, self._check_joined)
        on_cpu: Any = {"CUDAGraph": recording, "graph_pool_handle": lambda: None, "current_device": lambda: 0}
        no_draws = patch.object(cuda_graphs, "_spare_generator", contextlib.nullcontext)
        with self._engine.step_withheld(), patch.multiple(torch.cuda, **on_cpu), no_draws:
            Recording.made = set()
            why_not = super()._capture()  # a recording runs what it records
        assert self._now.graphs is not None
        self.recordings.append(self._now.graphs._graphs)  # type: ignore[arg-type]
        return why_not

    def _check_joined(self) -> None:
        """CUDA refuses to end a graph with work under way on other streams that was begun in it."""
        gradients = self._gradients()
        assert not gradients._under_way and not any(chunk.gathered for chunk in gradients._arriving)


def course(case: Case, recorded: bool) -> dict[str, Any]:
    """Results of some steps, as bits: losses, norms, weights, averages and the loss scale, eager or by a graph.

    On a CPU draws read the same tables as on CUDA."""
    on_cuda = device().type == "cuda"
    if not on_cuda:
        build.compile_layers = compile_noted  # type: ignore[assignment]
        keyed._fused = lambda device: write  # type: ignore[assignment]
    spec = spec_of(compiled=False, process=case.process)
    spec = spec if on_cuda else SMALL.get(case.process, spec)
    case = replace(case, cuts=()) if on_cuda else case  # cuts are those of the small U-Net
    with patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        engine = case.engine(spec)
    if case.random_programs is not None:
        engine.follow(random_programs(case.schedule, case.micro_batches, case.stages, case.random_programs))
    assert isinstance(engine.gradients, FlatGradients)
    ema = engine.averages = averages_of(engine, EmaSpec(on_host=case.eight_bit))
    engine.rate = lambda before, batch: 1e-3 / (1 + before)
    lines: list[str] = []
    group = engine.module.space.group
    Recording.swapping = "" if group is None else group.group_name
    engine.graph = StepGraph(engine, recorded) if on_cuda or not recorded else RecordedGraph(engine)
    engine.graph.log = lines.append
    objective, given = engine.objective, []
    for step in range(STEPS if case.process != "buckets" else SIZED_STEPS):
        # What an objective does is recorded, so a step that does something else is sent by the hosts, and is eager.
        engine.objective, engine._cautious_steps = objective, engine._cautious_steps if step < BAD_STEP else 0
        if step == BAD_STEP:
            engine.objective, engine._cautious_steps = Poisoned(objective), 1
        with engine.watched() if step == EAGER_STEP else contextlib.nullcontext():
            loss = engine.train_batch(micro_batches(engine, global_batch(spec, step)))
        gradients = engine.gradients
        given.append([float(loss), gradients.norm(), engine.count_skipped_steps(), float(gradients.scale)])
    kept = [tensor.detach().double() for tensor in (*insides.masters(engine), *ema.shadows)]
    result = {
        "steps": given,
        "weights": [[float(tensor.sum()), float(tensor.norm())] for tensor in kept],
        "replays": [sorted({part.replays for part in parts}) for parts in recordings_of(engine)],
        "parts": [len(parts) for parts in recordings_of(engine)],
        "compiled": sum(part.compiled for parts in recordings_of(engine) for part in parts),
        "lines": lines,
        "reason": engine.graph.reason if isinstance(engine.graph, RecordedGraph) else "",
        "lasting nodes": lasting_nodes(engine),
        "read and freed": read_and_freed(engine),
    }
    engine.graph.drop()  # NCCL would wait for it when its groups are destroyed
    engine.destroy()
    return result


def lasting_nodes(engine: UnetPipelineEngine) -> int:
    """How many parameters keep the node that adds up their gradient: on CUDA with the stream that it was made on, for
    which the backward of a captured step would wait.
    """
    for parameter in engine.module.parameters():
        gradient_node(parameter).metadata["seen"] = True
    return sum("seen" in gradient_node(parameter).metadata for parameter in engine.module.parameters())


def read_and_freed(engine: UnetPipelineEngine) -> list[int]:
    """How many storages the recorded graphs read, and how many of those are freed once every cache has forgotten all
    and the records hold nothing themselves, as CUDA graphs don't."""
    found = [captured.graphs for captured in engine.graph._of_sizes.values() if captured.graphs is not None]
    parts: list[Any] = [part for graphs in found for part in graphs._graphs]
    for part in parts:
        part._calls.clear()
    gc.unfreeze()  # what was there when this process was forked
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper and one.__module__.startswith("ddpm_ds"):
            one.cache_clear()
    gc.collect()
    read = [storage for part in parts for storage in part.read.values()] if recordings_of(engine) else []
    return [len(read), sum(storage.expired() for storage in read)]


def gradient_node(parameter: Tensor) -> Any:
    view = parameter.view_as(parameter).grad_fn
    assert view is not None
    return view.next_functions[0][0]


def recordings_of(engine: UnetPipelineEngine) -> list[list[Recording]]:
    return engine.graph.recordings if isinstance(engine.graph, RecordedGraph) else []


def run(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The course of a case, eagerly and by a graph."""
    return [course(Case.of(values), recorded=recorded) for recorded in (False, True)]


def one(zero: int, precision: Precision, micro_batches: int = 2, checkpoint: int = 0, **others: Any) -> Case:
    return Case(1, 1, zero, precision, checkpoint, micro_batches=micro_batches, fused=True, **others)


SIZED_REPLAYS = [[2], [2], [1], [3], [2], [2]]
"""Replays of each graph of three orders of sizes. Steps 2, 3 and 7 are the first of theirs, whose trials drop the
others; steps 10 to 12 replay kept graphs."""
PIPELINE_REPLAYS = [[2], [1], [2], [3], [2], [1]]
"""The same in a pipeline, where step 2, the first of its order, is eager: the trials are in steps 3, 7 and 8."""
CASES = [
    one(1, "bf16", fp32_accumulation=True),
    one(0, "bf16", micro_batches=1, checkpoint=2),
    one(1, "fp32", process="reduced"),
    one(2, "fp16", checkpoint=1, growing_scale=True),
    one(2, "fp16", eight_bit=True),
    one(2, "fp16", micro_batches=4, process="buckets"),
    Case(2, 1, 2, "fp16", 0, fused=True, micro_batches=2),
    Case(2, 1, 2, "bf16", 0, fused=True, schedule="folded", random_programs=1),
    Case(2, 1, 1, "fp32", 0, fused=True, schedule="folded", process="text", cuts=(4, 8, 14)),
    Case(1, 2, 2, "bf16", 0, fused=True, micro_batches=2),
    Case(1, 1, 2, "fp16", 0, fused=True, micro_batches=2, process="stored", space=2),
]
"""Each setting, and the pairs of them whose code meets."""
MORE = [
    one(1, "bf16"),
    one(2, "fp32"),
    one(2, "fp16"),
    one(2, "bf16", process="stored"),
    one(2, "fp16", process="text"),
    Case(2, 1, 0, "bf16", 0, fused=True, micro_batches=2),
    Case(2, 1, 2, "fp16", 0, fused=True, schedule="folded", process="buckets"),
    Case(1, 2, 1, "fp16", 0, fused=True, micro_batches=2),
    Case(2, 1, 2, "fp16", 0, fused=True),
    Case(2, 1, 1, "fp32", 1, fused=True, schedule="folded"),
    Case(2, 1, 1, "fp32", 1, fused=True, schedule="folded", process="text", cuts=(4, 8, 14)),
    Case(1, 2, 2, "bf16", 0, eight_bit=True, micro_batches=2),
    Case(1, 1, 2, "fp16", 0, fused=True, micro_batches=2, process="text", tensor=2),
    Case(1, 1, 1, "fp32", 1, fused=True, micro_batches=2, process="text", space=2),
    Case(2, 2, 1, "fp32", 0, fused=True, micro_batches=2),
]
"""Other combinations."""
COMPILED = [one(1, "fp32", compile=True, random_programs=8)]
"""Compiled layers, some of whose weight gradients have passes of their own."""


def ranks_of(case: Case) -> int:
    return case.stages * case.replicas * case.tensor * case.space


def courses(folder: Path, cases: list[Case], **environment: str) -> list[list[list[dict[str, Any]]]]:
    """The two courses of each case on each rank: ``[case][rank][eager or replayed]``."""
    given = [asdict(case) for case in cases]
    ranks = run_cases(ranks_of(cases[0]), Path(__file__), given, folder, **environment)
    return [list(found) for found in zip(*ranks, strict=True)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((CASES, 1), id="1 process"),
        pytest.param((CASES, 2), id="2"),
        pytest.param((COMPILED, 1), id="compiled", marks=pytest.mark.needs_programs("g++|clang++")),
        pytest.param((MORE, 1), id="1 process, more", marks=pytest.mark.long),
        pytest.param((MORE, 2), id="2, more", marks=pytest.mark.long),
        pytest.param((MORE, 4), id="4, more", marks=pytest.mark.long),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, Any]]:
    cases = [case for case in request.param[0] if ranks_of(case) == request.param[1]]
    folder = tmp_path_factory.mktemp("graphs")
    compiling = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    both = courses(folder, cases, **compiling)
    return [*zip(cases, both, strict=True)]


@pytest.mark.launch
def test_replayed_steps_give_the_bits_of_eager_ones_and_all_that_may_be_are_replays(
    found: list[tuple[Case, Any]],
) -> None:
    """Also around a step that is watched and one that is skipped, after both of which the step is recorded again."""
    for case, ranks in found:
        for eager, replayed in ranks:
            assert replayed["steps"] == eager["steps"], case
            assert replayed["weights"] == eager["weights"], case
            assert eager["lasting nodes"] == 0, case
            assert (replayed["compiled"] > 0) == case.compile, case
            assert replayed["read and freed"][0] > 20 and replayed["read and freed"][1] == 0, case
            later = len(eager["steps"]) - BAD_STEP
            assert [step[2] for step in eager["steps"]] == [0] * BAD_STEP + [1] * later, case
            sized = SIZED_REPLAYS if case.stages == 1 else PIPELINE_REPLAYS
            # the first of the three is the trial
            assert replayed["replays"] == (sized if case.process == "buckets" else [[3], [1]]), case
            assert {parts > 1 for parts in replayed["parts"]} == {case.stages > 1}, case
            assert replayed["lines"] == [LINES[case.stages > 1]], case
            assert ("graphs is true" in replayed["reason"]) == (case.stages * case.tensor * case.space > 1), case


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        pytest.param(1, False, marks=pytest.mark.gpu),
        pytest.param(2, False, marks=pytest.mark.gpu(2)),
        pytest.param(2, True, marks=pytest.mark.gpu),
    ],
)
def test_on_gpus_replayed_steps_train_as_eager_ones(ranks: int, shared: bool, tmp_path: Path) -> None:
    """Losses and norms of replayed steps are those of eager ones, within what two eager courses may differ by."""
    cases = [case for case in CASES + MORE + COMPILED if ranks_of(case) == ranks]
    environment = on_a_shared_gpu() if shared else {"DS_ACCELERATOR": "cuda"}
    found = courses(tmp_path, cases, **environment)
    for case, reports in zip(cases, found, strict=True):
        slack = LATER[case.precision] * LOSS_TOLERANCE[case.precision]
        for eager, replayed in reports:
            assert replayed["lines"] == [LINES[case.stages > 1]], case
            for one, other in zip(eager["steps"], replayed["steps"], strict=True):
                assert other == pytest.approx(one, rel=slack, nan_ok=True), case


@pytest.mark.gpu
def test_on_a_gpu_a_capture_that_fails_leaves_memory_and_random_numbers_usable() -> None:
    cuda = torch.device("cuda")
    expected = torch.rand(8, device=cuda, generator=torch.Generator(cuda).manual_seed(3))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def work() -> None:
        float(torch.ones(2**26, device=cuda).sum())  # which the host waits for

    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="captur"):
        cuda_graphs.Graphs(cuda).capture(work)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(8, device=cuda), expected)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**21  # a block for small tensors


if __name__ == "__main__":
    report_cases(run)

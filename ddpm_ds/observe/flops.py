"""The flops profile: DeepSpeed's text for each stage, and a table of multiply-accumulates for each layer and stage.

The JSON's ``flops_profiler`` block switches it on; DeepSpeed's own pipeline engine crashes with it. The first replica
of each stage runs DeepSpeed's profiler around one forward pass, and rank 0 gathers the results. They have two sources:

    parameters, multiply-accumulates, flops    arithmetic on the stage's layers (:attr:`Layer.macs`)
    latency                                    DeepSpeed's profiler; its own count of flops is only in its text

In a tensor group the profiler runs on the first rank: its latency includes the sums, its text has its share of flops.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.profiling.flops_profiler.profiler import get_module_duration
from torch import nn

from ddpm_ds.config import ds_model
from ddpm_ds.ground.errors import faults_logged
from ddpm_ds.ground.units import aligned
from ddpm_ds.observe.observer import Observer, Report, instructions_wrapped, keep
from ddpm_ds.pipeline.cuts import stages_of
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import gather_objects
from ddpm_ds.pipeline.schedule import Instruction
from ddpm_ds.unet.layers import Layer


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass of a micro-batch through some layers."""

    parameters: int
    macs: int
    """Multiply-accumulates of convolutions, linear layers and attention."""
    flops: int
    """Floating-point operations, two for each multiply-accumulate."""
    seconds: float


@dataclass(frozen=True)
class StageProfile:
    """Profile of one stage, from the rank that holds it."""

    stage: int
    rank: int
    layers: dict[str, Cost]
    """Costs by the layers' names, in order."""
    text: str
    """DeepSpeed's own profile."""

    @property
    def total(self) -> Cost:
        return summed(self.layers.values())


def summed(costs: Iterable[Cost]) -> Cost:
    """Return the sum of some costs."""
    return Cost(*(sum(values) for values in zip(*map(astuple, costs), strict=True)))


NUMBERS = "flops.json"


class FlopsProfile(Observer):
    """Profiler of the first forward pass of every stage in step ``profile_step``.

    ``settings`` is the JSON's ``flops_profiler`` block, ``steps`` the length of the whole run. Rank 0 writes
    ``folder/flops.stage{i}.txt`` (or ``{output_file}.stage{i}.txt``), ``table.txt`` and ``flops.json``.
    """

    def __init__(
        self,
        engine: UnetPipelineEngine,
        layers: Sequence[Layer],
        settings: ds_model.FlopsProfiler,
        folder: Path,
        report: Report,
        *,
        steps: int,
    ) -> None:
        self._engine, self._layers, self._settings = engine, layers, settings
        self._folder, self._report, self._step = folder, report, settings.profile_step
        self._waits = settings.enabled
        self._found: list[StageProfile] | None = None
        self._watching = contextlib.ExitStack()
        done = engine.global_steps
        if self._waits and not done < self._step <= steps and not (folder / NUMBERS).exists():
            comes = f"{done + 1:,} to {steps:,}" if done < steps else "none"
            report.log(f"flops_profiler.profile_step = {self._step} does not come (steps to come: {comes}); name one")

    def begin_step(self, step: int) -> None:
        self.finish()
        if not self._waits or step != self._step:
            return
        self._waits, self._found = False, []
        engine = self._engine
        self._watching.enter_context(engine.watched())  # the profiler waits for the device at each module
        if engine.grid.get_data_parallel_id() == engine.module.tensor.rank == 0:
            self._left = dict(enumerate(stages_of(engine.stage_id, engine.num_stages, engine.module.schedule)))
            self._watching.enter_context(instructions_wrapped(engine, self._around))
            # In this step alone: DeepSpeed replaces functions, for which layers would be compiled again.
            self._watching.callback(torch.compiler.set_stance, "default")
            torch.compiler.set_stance("force_eager")

    def finish(self) -> None:
        if self._found is None:
            return
        self._watching.close()
        found, self._found = gather_objects(self._found, list[StageProfile]), None
        if found is None:
            return
        with faults_logged("flops profile", self._report.log):
            stages = sorted((stage for own in found for stage in own), key=lambda stage: stage.stage)
            whole = summed(stage.total for stage in stages)
            values = {"flops/forward_gflops": whole.flops / 1e9}
            for stage in stages:
                values[f"flops/stage{stage.stage}_gflops"] = stage.total.flops / 1e9
                values[f"flops/stage{stage.stage}_latency_ms"] = stage.total.seconds * 1e3
            self._report.observed(values, self._step)
            if keep(self._report, "flops", self._files(stages)):
                shares = ", ".join(f"{stage.total.flops / whole.flops:.0%}" for stage in stages)
                times = ", ".join(f"{stage.total.seconds * 1e3:.3g}" for stage in stages)
                each = f"{whole.flops / 1e9:.4g} GFLOP per forward of {self._engine.micro_batch_size} images"
                what = f"{each}, by stage {shares} in {times} ms: {self._folder / 'table.txt'}"
                self._report.log(f"flops of step {self._step}: {what}")

    def _around(self, instruction: Instruction, execute: Callable[[], None]) -> None:
        """Profile the first forward pass of each of this rank's stages."""
        phase = instruction.phase
        if instruction.name != "ForwardPass" or phase not in self._left:
            execute()
            return
        modules = self._engine.module.own_layers(phase)
        seconds, text = profile_layers(modules, execute, self._settings, step=self._step)
        images = self._engine.micro_batch_size
        costs = {
            layer.name: Cost(layer.parameters, layer.macs * images, 2 * layer.macs * images, took)
            for layer, took in zip((self._layers[index] for index in modules), seconds, strict=True)
        }
        assert self._found is not None
        self._found.append(StageProfile(self._left.pop(phase), dist.get_rank(), costs, text))

    def _files(self, stages: Sequence[StageProfile]) -> dict[Path, str | bytes]:
        engine = self._engine
        facts = {
            "step": self._step,
            "micro_batch_images": engine.micro_batch_size,
            "dtype": str(next(engine.module.parameters()).dtype).removeprefix("torch."),
            "schedule": engine.module.schedule,
            "tensor_size": engine.module.tensor.size,
            "deepspeed": version("deepspeed"),
        }
        output = self._settings.output_file or self._folder / "flops"
        texts: dict[Path, str | bytes] = {}
        for stage in stages:
            names = list(stage.layers)
            heading = f"stage {stage.stage} of {len(stages)}, on rank {stage.rank}: layers {names[0]} to {names[-1]}"
            texts[Path(f"{output}.stage{stage.stage}.txt")] = f"{heading}\n{stage.text}\n"
        texts[self._folder / "table.txt"] = table(stages, facts) + "\n"
        layers = [(stage.stage, name, cost) for stage in stages for name, cost in stage.layers.items()]
        numbers = {
            **facts,
            "total": asdict(summed(stage.total for stage in stages)),
            "stages": [{"stage": stage.stage, "rank": stage.rank, "total": asdict(stage.total)} for stage in stages],
            "layers": [{"stage": stage, "name": name, "total": asdict(cost)} for stage, name, cost in layers],
        }
        return texts | {self._folder / NUMBERS: json.dumps(numbers, indent=2) + "\n"}


class UnetStage(nn.ModuleDict):
    """Layers of a stage as one module, by their index; DeepSpeed prints the name of this class."""


def profile_layers(
    modules: Mapping[int, nn.Module], forward: Callable[[], None], settings: ds_model.FlopsProfiler, *, step: int
) -> tuple[list[float], str]:
    """Run ``forward``, which calls each of ``modules`` once, under DeepSpeed's profiler.

    Returns the seconds of each module, and DeepSpeed's text. ``module_depth`` is limited to the levels of the modules,
    beyond which DeepSpeed raises KeyError.
    """
    stage = UnetStage({str(index): module for index, module in modules.items()})
    profiler = FlopsProfiler(stage)
    try:
        profiler.start_profile()
        forward()
        profiler.stop_profile()
        levels, depth = _levels(stage), settings.module_depth
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            profiler.print_model_profile(
                profile_step=step,
                module_depth=levels if depth == -1 else min(depth + 1, levels),
                top_modules=settings.top_modules,
                detailed=settings.detailed,
            )
        return [get_module_duration(module) for module in modules.values()], printed.getvalue()
    finally:
        profiler.end_profile()


def _levels(module: nn.Module) -> int:
    return 1 + max(map(_levels, module.children()), default=0)


def table(stages: Sequence[StageProfile], facts: Mapping[str, object]) -> str:
    """Return parameters, multiply-accumulates and latency of every stage and of every layer, as text."""
    whole = summed(stage.total for stage in stages)
    columns = ("parameters", "MACs (M)", "flops (M)", "flops share", "latency (ms)", "latency share", "GFLOP/s")

    def cells(cost: Cost) -> tuple[str, ...]:
        macs, flops, share = f"{cost.macs / 1e6:,.3f}", f"{cost.flops / 1e6:,.3f}", f"{cost.flops / whole.flops:.1%}"
        took, time_share = f"{cost.seconds * 1e3:,.3f}", f"{cost.seconds / (whole.seconds or 1):.1%}"
        rate = f"{cost.flops / (cost.seconds or 1) / 1e9:,.1f}"
        return f"{cost.parameters:,}", macs, flops, share, took, time_share, rate

    totals = [(str(stage.stage), str(stage.rank), *cells(stage.total)) for stage in stages]
    layers = [(name, str(stage.stage), *cells(cost)) for stage in stages for name, cost in stage.layers.items()]
    lines = [
        f"one forward pass of a micro-batch of {facts['micro_batch_images']} images in step {facts['step']}, "
        f"{facts['dtype']}, schedule {facts['schedule']}",
        "",
        *aligned([("stage", "rank", *columns), *totals, ("all", "", *cells(whole))], left={0}),
        "",
        *aligned([("layer", "stage", *columns), *layers], left={0}),
        "",
        "MACs are multiply-accumulates of convolutions, linear layers and attention, by the layers' arithmetic;",
        f"flops are twice as many. DeepSpeed {facts['deepspeed']}'s profiler measures the latency of each layer,",
        "without any wait for messages. The profiled step is slower than others.",
    ]
    if facts["tensor_size"] != 1:
        lines.append(
            "The ranks of a tensor group share the counts of a split layer; its latency is the first rank's, with"
        )
        lines.append("the sums of the group.")
    return "\n".join(lines)

"""What DeepSpeed's flops profiler counts wrongly, put right while it counts.

The profiler replaces functions such as ``F.conv2d`` by ones that add what a formula says to the module that is running,
and then call the original. Convolutions, matrix products and attention come out right; around them it miscounts.
``tests/observe/test_flops_counts.py`` holds both numbers of each function below, so that an upgrade of DeepSpeed fails
there and says what moved.

What a flops profile found, of all stages together: records, one table, JSON.

DeepSpeed's flops profiler, per stage of a pipeline: the JSON's ``flops_profiler`` block.

The stock pipeline engine crashes with the profiler's timers, profiles rank 0 alone, restarts it for every micro-batch
and never prints it. Here the first replica of each stage profiles one forward of one step, so that recomputed
activations are not counted as work; rank 0 gathers what all of them found.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.profiling.flops_profiler import FlopsProfiler, profiler
from deepspeed.runtime.pipe import schedule
from torch import Tensor, nn

from ddpm_ds.command_line import aligned
from ddpm_ds.observe.observer import Observer, Report
from ddpm_ds.pipeline.cuts import stages_of
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.unet.layers import Layer

Formula = Callable[..., tuple[int, int]]
"""Flops and multiply-accumulates of a call, from its arguments."""

CORRECTED = (
    "the operators + - * / between tensors, torch.sub and torch.div: left out; now one flop per element of the result",
    "sums and products of whole numbers, such as those that draw a dropout mask: counted; now left out",
    "the bias of a linear layer: left out, though that of a convolution is counted; now one flop per element",
    "softmax of torch, of a tensor and inside attention: left out; now one flop per element, as F.softmax",
    "einsum: no MACs; now half its flops. einops.einsum: counted twice, for what it calls is counted; now once",
    "a tensor's baddbmm: left out; now counted as torch.baddbmm is",
    "matrix products whose right side has more dimensions, or only one: as if it were one matrix; now by its shape",
    "interpolate to a size: as if there were one image of one channel; now by the elements of the result",
    "module_depth: without the innermost level, and a crash where it is deeper than the modules; now as documented",
    "lines that end in `of model`: this stage's numbers, or 0; now the whole U-Net's",
)
"""Of DeepSpeed's counts, what is put right; one line each."""

NOT_COUNTED = (
    "the loss, the noising of images, the optimizer and the EMA, which are in no layer",
    "sines and exponentials of the time embedding, and the drawing of dropout masks",
    "copies: casts (fp16 on a CPU computes in fp32 between two), concatenations, padding, packing for the next stage",
    "the backward pass: about twice the forward; what activation checkpointing computes again is no work of the model",
    "what goes around torch.nn.functional: torch.conv2d, torch.ops, compiled extensions; addbmm, mv, dot, tensordot",
    "attention counts its whole square of scores, whatever is masked; normalisation and SiLU are estimates",
)
"""What is in no count; one line each."""

_EINSUM, _EINOPS_EINSUM = profiler._einsum_flops_compute, profiler._einops_einsum_flops_compute
_ATTENTION, _UPSAMPLE = profiler._attn_flops_compute, profiler._upsample_flops_compute

OPERATORS = tuple(
    f"__{prefix}{operator}__" for operator in ("add", "sub", "mul", "truediv") for prefix in ("", "r", "i")
)


@contextlib.contextmanager
def corrected_counts() -> Iterator[None]:
    """Surround a FlopsProfiler's work from ``start_profile`` to ``stop_profile``.

    Assumes that ``start_profile`` looks up ``wrapFunc`` and the formulas as globals of its module when it is called,
    and that ``stop_profile`` puts a function back by the ``__str__`` of what replaced it.
    """
    with contextlib.ExitStack() as replaced:
        for name, value in _REPLACED.items():
            replaced.enter_context(_replace(profiler, name, value))
        for owner, name, formula in _ADDED:
            replaced.enter_context(_replace(owner, name, _counted(getattr(owner, name), formula)))
        yield


def _counted(function: Callable[..., Any], formula: Formula) -> Callable[..., Any]:
    """As DeepSpeed's ``wrapFunc``, but what a counted function calls is not counted again."""
    name = function.__str__
    profiler.old_functions[name] = function

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not profiler.module_flop_count:
            return function(*args, **kwargs)
        flops, macs = formula(*args, **kwargs)
        for counts, number in ((profiler.module_flop_count, flops), (profiler.module_mac_count, macs)):
            counts[-1].append((name, number))
            counts.append([])
        try:
            return function(*args, **kwargs)
        finally:
            profiler.module_flop_count.pop()
            profiler.module_mac_count.pop()

    counted.__str__ = name  # type: ignore[method-assign]
    return counted


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[int, int]:
    macs = input.numel() * weight.shape[0]
    return 2 * macs + (0 if bias is None else macs // weight.shape[1]), macs


def _matmul(input: Tensor, other: Tensor, **_: Any) -> tuple[int, int]:
    rows = input.shape[-2] if input.ndim > 1 else 1
    columns = other.shape[-1] if other.ndim > 1 else 1
    macs = math.prod(torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])) * rows * input.shape[-1] * columns
    return 2 * macs, macs


def _einsum(equation: str, *operands: Any) -> tuple[int, int]:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    macs = _EINSUM(equation, *given)[0] // 2  # numpy's count of both has 4 digits, and 1 too many
    return 2 * macs, macs


def _einops_einsum(*operands: Any) -> tuple[int, int]:
    macs = _EINOPS_EINSUM(*operands)[0] // 2
    return 2 * macs, macs


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[int, int]:
    flops, macs = _ATTENTION(query, key, value)
    return flops + math.prod(query.shape[:-1]) * key.shape[-2], macs


def _interpolate(input: Tensor, size: Any = None, *args: Any, **kwargs: Any) -> tuple[int, int]:
    if size is None:
        flops, macs = _UPSAMPLE(input, None, *args, **kwargs)
        return flops, macs
    sizes = size if isinstance(size, list | tuple) else [size] * (input.ndim - 2)
    return math.prod((*input.shape[:2], *sizes)), 0


def _softmax(input: Tensor, *_: Any, **__: Any) -> tuple[int, int]:
    return input.numel(), 0


def _elementwise(input: Any, other: Any, **_: Any) -> tuple[int, int]:
    if not torch.result_type(input, other).is_floating_point:
        return 0, 0
    shapes = [operand.shape for operand in (input, other) if isinstance(operand, Tensor)]
    return math.prod(torch.broadcast_shapes(*shapes)), 0


_REPLACED: dict[str, Callable[..., Any]] = {
    "wrapFunc": _counted,
    "_linear_flops_compute": _linear,
    "_matmul_flops_compute": _matmul,
    "_einsum_flops_compute": _einsum,
    "_einops_einsum_flops_compute": _einops_einsum,
    "_attn_flops_compute": _attention,
    "_upsample_flops_compute": _interpolate,
    "_mul_flops_compute": _elementwise,
    "_add_flops_compute": _elementwise,
}
"""In DeepSpeed's module of the profiler."""

_ADDED: tuple[tuple[Any, str, Formula], ...] = (
    *((Tensor, operator, _elementwise) for operator in OPERATORS),
    *((owner, name, _elementwise) for owner in (torch, Tensor) for name in ("sub", "div")),
    *((owner, "softmax", _softmax) for owner in (torch, Tensor)),
    (Tensor, "baddbmm", profiler._tensor_addmm_flops_compute),
)
"""Functions that DeepSpeed does not know."""


@contextlib.contextmanager
def _replace(owner: Any, name: str, value: Any) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:  # inherited
            delattr(owner, name)


TOLERANCE = 0.02
"""By which counted MACs may differ from those of the cost model."""


@dataclass(frozen=True)
class Counts:
    """Of one forward of one micro-batch."""

    parameters: int = 0
    macs: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.parameters + other.parameters,
            self.macs + other.macs,
            self.flops + other.flops,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class LayerProfile:
    """One layer of the U-Net's list."""

    index: int
    name: str
    kind: str
    total: Counts
    modelled_macs: int
    """What the cost model says, by which stages are cut."""
    parts: dict[str, Counts]
    """The modules that it is made of; what it computes itself, such as attention's two products, is in no part."""


@dataclass(frozen=True)
class StageProfile:
    """One stage, as the rank that holds it saw it."""

    stage: int
    rank: int
    layers: tuple[LayerProfile, ...]
    text: str
    """As DeepSpeed prints it."""

    @property
    def total(self) -> Counts:
        return total(layer.total for layer in self.layers)


@dataclass(frozen=True)
class Circumstances:
    """Of the profile."""

    step: int
    micro_batch_images: int
    dtype: str
    schedule: str
    deepspeed: str

    def __str__(self) -> str:
        return (
            f"one forward of a micro-batch of {self.micro_batch_images} images in step {self.step}, {self.dtype}, "
            f"schedule {self.schedule}; DeepSpeed {self.deepspeed}'s profiler"
        )


def total(counts: Iterable[Counts]) -> Counts:
    """Their sum."""
    return sum(counts, Counts())


def table(profiles: Sequence[StageProfile], circumstances: Circumstances) -> str:
    """Totals by stage, all layers, and what the numbers leave out."""
    whole = total(profile.total for profile in profiles)
    columns = ("parameters", "MACs (M)", "flops (M)", "flops share", "latency (ms)", "latency share", "GFLOP/s")
    stages = [
        *((str(profile.stage), str(profile.rank), *_cells(profile.total, whole)) for profile in profiles),
        ("all", "", *_cells(whole, whole)),
    ]
    layers = [
        (layer.name, str(profile.stage), *_cells(layer.total, whole))
        for profile in profiles
        for layer in profile.layers
    ]
    lines = [
        str(circumstances),
        "",
        *aligned([("stage", "rank", *columns), *stages], left={0}),
        "",
        *aligned([("module", "stage", *columns), *layers], left={0}),
        "",
        agreement(profiles),
        "Latency is of each layer alone, the device waited for before and after it; nothing between layers and no wait",
        "for a message is in it. The profiled step is slower than others.",
        "",
        notes(),
    ]
    return "\n".join(lines)


def agreement(profiles: Sequence[StageProfile]) -> str:
    """How far the counted MACs are from those of the cost model, and in which layers by more than 2 %."""
    differences = {
        layer.name: layer.total.macs / layer.modelled_macs - 1 for profile in profiles for layer in profile.layers
    }
    far = [f"{name} ({difference:+.1%})" for name, difference in differences.items() if abs(difference) > TOLERANCE]
    if far:
        return f"MACs differ from those of the cost model by over {TOLERANCE:.0%} in {', '.join(far)}."
    return f"MACs are within {max(map(abs, differences.values())):.2%} of those of the cost model in every layer."


def notes() -> str:
    """What DeepSpeed miscounts and is put right, and what is in no count."""
    return "\n".join(
        [
            "Put right of DeepSpeed's counts:",
            *(f"  - {line}" for line in CORRECTED),
            "Not counted, or estimated:",
            *(f"  - {line}" for line in NOT_COUNTED),
        ]
    )


def as_json(profiles: Sequence[StageProfile], circumstances: Circumstances) -> dict[str, Any]:
    """Everything of the table and the parts of each layer; latencies in seconds."""
    return {
        **asdict(circumstances),
        "total": asdict(total(profile.total for profile in profiles)),
        "stages": [
            {"stage": profile.stage, "rank": profile.rank, "total": asdict(profile.total)} for profile in profiles
        ],
        "layers": [{"stage": profile.stage, **asdict(layer)} for profile in profiles for layer in profile.layers],
        "corrected": list(CORRECTED),
        "not_counted": list(NOT_COUNTED),
    }


def _cells(counts: Counts, whole: Counts) -> tuple[str, ...]:
    return (
        f"{counts.parameters:,}",
        f"{counts.macs / 1e6:,.3f}",
        f"{counts.flops / 1e6:,.3f}",
        f"{counts.flops / max(whole.flops, 1):.1%}",
        f"{counts.seconds * 1e3:,.3f}",
        f"{counts.seconds / (whole.seconds or 1):.1%}",
        f"{counts.flops / (counts.seconds or 1) / 1e9:,.1f}",
    )


class FlopsProfile(Observer):
    """Profiles the first forward of every stage in step ``profile_step``, once, and writes it down on rank 0.

    ``settings`` is the JSON's ``flops_profiler`` block: unless it is enabled nothing happens. ``steps`` are those of
    the whole run. Written are ``folder/flops.stage{i}.txt`` (or ``{output_file}.stage{i}.txt``), ``folder/table.txt``
    and ``folder/flops.json``. Layers are timed one by one, so that step is slower than others.
    """

    def __init__(
        self,
        engine: UnetPipelineEngine,
        layers: Sequence[Layer],
        settings: Mapping[str, Any],
        folder: Path,
        report: Report,
        *,
        steps: int,
    ) -> None:
        self._engine, self._layers, self._settings = engine, layers, settings
        self._folder, self._report = folder, report
        self._step = int(settings.get("profile_step", 1))
        self._waits = bool(settings.get("enabled", False))
        self._found: list[StageProfile] | None = None
        self._watching = contextlib.ExitStack()
        if self._waits:
            self._say_if_out_of_reach(steps)

    def begin_step(self, step: int) -> None:
        if self._found is not None:
            self._report_found(self._found)
        if self._waits and step == self._step:
            self._waits, self._found = False, []
            self._watching.enter_context(self._engine.watched())  # the profiler waits for the device at each module
            if self._engine.grid.get_data_parallel_id() == 0:
                self._watch(self._found)

    def finish(self) -> None:
        if self._found is not None:
            self._report_found(self._found)

    def _say_if_out_of_reach(self, steps: int) -> None:
        done = self._engine.global_steps
        if self._step > steps:
            why, fix = f"the run has {steps:,} steps", f"a step up to {steps}"
        elif self._step <= done and not (self._folder / "flops.json").exists():
            why, fix = f"the run goes on after step {done:,}", f"a step from {done + 1} on"
        else:
            return
        self._report.say(f"flops_profiler.profile_step = {self._step}, but {why}: nothing is profiled; write {fix}")

    def _watch(self, found: list[StageProfile]) -> None:
        """Profile the next forward of each of this rank's stages into ``found``."""
        engine = self._engine
        forward = engine.execute[schedule.ForwardPass]
        left = dict(enumerate(stages_of(engine.stage_id, engine.num_stages, engine.module.schedule)))

        def run(**arguments: Any) -> None:
            phase = arguments.get("phase", 0)
            if phase in left:
                found.append(self._profile(left.pop(phase), phase, lambda: forward(**arguments)))
            else:
                forward(**arguments)

        def stop() -> None:
            torch.compiler.set_stance("default")
            if engine.execute[schedule.ForwardPass] is run:  # else another observer has wrapped it
                engine.execute[schedule.ForwardPass] = forward

        engine.execute[schedule.ForwardPass] = run
        self._watching.callback(stop)
        # In this step alone: what is compiled calls nothing that could be counted, and would be compiled again.
        torch.compiler.set_stance("force_eager")

    def _profile(self, stage: int, phase: int, forward: Callable[[], None]) -> StageProfile:
        engine = self._engine
        first, stop = engine.ends(phase)
        modules = {index: engine.module.get_submodule(str(index)) for index in range(first, stop)}
        layers, text = profile_layers(
            modules, self._layers, engine.micro_batch_size, forward, self._settings, step=self._step
        )
        return StageProfile(stage, dist.get_rank(), layers, text)

    def _report_found(self, found: list[StageProfile]) -> None:
        """Gather what all ranks have found and write it down; a collective over all ranks."""
        self._watching.close()
        self._found = None
        everyone: list[list[StageProfile]] | None = [[]] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(found, everyone, dst=0)
        if everyone is None:
            return
        profiles = sorted((profile for profiles in everyone for profile in profiles), key=lambda profile: profile.stage)
        whole = total(profile.total for profile in profiles)
        self._report.observed(
            {
                "flops/forward_gflops": whole.flops / 1e9,
                **{f"flops/stage{profile.stage}_gflops": profile.total.flops / 1e9 for profile in profiles},
                **{f"flops/stage{profile.stage}_latency_ms": profile.total.seconds * 1e3 for profile in profiles},
            },
            self._step,
        )
        try:
            written = self._write(profiles)
        except OSError as error:
            self._report.say(f"{error.filename} can't be written ({error.strerror}); training goes on")
            return
        for path in written:
            self._report.artifact(path, "flops")
        shares = ", ".join(f"{profile.total.flops / whole.flops:.0%}" for profile in profiles)
        times = ", ".join(f"{profile.total.seconds * 1e3:.3g}" for profile in profiles)
        self._report.say(
            f"flops of step {self._step}: {whole.flops / 1e9:.4g} GFLOP forward per micro-batch of "
            f"{self._engine.micro_batch_size} images, by stage {shares} in {times} ms: {self._folder / 'table.txt'}"
        )

    def _write(self, profiles: Sequence[StageProfile]) -> list[Path]:
        """The files of all stages together; returns them."""
        engine = self._engine
        circumstances = Circumstances(
            self._step,
            engine.micro_batch_size,
            str(next(engine.module.parameters()).dtype).removeprefix("torch."),
            engine.module.schedule,
            version("deepspeed"),
        )
        texts = {
            Path(f"{self._settings.get('output_file') or self._folder / 'flops'}.stage{profile.stage}.txt"): stage_text(
                profile, profiles, circumstances
            )
            for profile in profiles
        }
        texts[self._folder / "table.txt"] = table(profiles, circumstances)
        texts[self._folder / "flops.json"] = json.dumps(as_json(profiles, circumstances), indent=2)
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return list(texts)


class UnetStage(nn.ModuleDict):
    """The layers of a stage by their index in the list, as one module."""


def profile_layers(
    modules: Mapping[int, nn.Module],
    layers: Sequence[Layer],
    images: int,
    forward: Callable[[], None],
    settings: Mapping[str, Any],
    *,
    step: int,
) -> tuple[tuple[LayerProfile, ...], str]:
    """Profile ``forward``, which calls each of ``modules`` once, with ``images`` images.

    ``modules`` are those of a stage by their index in ``layers``. Returns what each did, and what DeepSpeed prints.
    """
    stage = UnetStage({str(index): module for index, module in modules.items()})
    counting = FlopsProfiler(stage)
    try:
        with corrected_counts():
            counting.start_profile()
            forward()
            counting.stop_profile()
        found = tuple(
            LayerProfile(
                index=index,
                name=layers[index].name,
                kind=type(module).__name__,
                total=_counts(module),
                modelled_macs=layers[index].macs * images,
                parts={name: _counts(part) for name, part in module.named_children()},
            )
            for index, module in modules.items()
        )
        return found, _printed(counting, stage, settings, step)
    finally:
        counting.end_profile()


def _counts(module: nn.Module) -> Counts:
    return Counts(
        module.__params__,  # type: ignore[arg-type]
        profiler.get_module_macs(module),
        profiler.get_module_flops(module),
        profiler.get_module_duration(module),
    )


def _printed(counting: FlopsProfiler, stage: nn.Module, settings: Mapping[str, Any], step: int) -> str:
    """What DeepSpeed prints. Its ``module_depth`` is a number of levels, and more than there are raises KeyError."""
    levels, depth = _levels(stage), settings.get("module_depth", -1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        counting.print_model_profile(
            profile_step=step,
            module_depth=levels if depth == -1 else min(depth + 1, levels),
            top_modules=settings.get("top_modules", 1),
            detailed=settings.get("detailed", True),
        )
    return printed.getvalue()


def _levels(module: nn.Module) -> int:
    return 1 + max(map(_levels, module.children()), default=0)


def stage_text(profile: StageProfile, profiles: Sequence[StageProfile], circumstances: Circumstances) -> str:
    """DeepSpeed's text of one stage, with what it says of the whole model put right."""
    whole = total(other.total for other in profiles)
    text = profile.text
    for name, value in (
        ("params of model", profiler.params_to_string(whole.parameters)),
        ("fwd flops of model", profiler.number_to_string(whole.flops)),
    ):
        text = re.sub(rf"^{name}.*$", f"{name + ': ':<70}  {value:<8}", text, flags=re.MULTILINE)
    first, last = profile.layers[0].name, profile.layers[-1].name
    heading = f"stage {profile.stage} of {len(profiles)}, on rank {profile.rank}: layers {first} to {last}"
    return "\n".join([heading, str(circumstances), text, agreement([profile]), "", notes()])

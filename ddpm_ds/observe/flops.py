"""DeepSpeed's flops profiler, per stage of a pipeline: the JSON's ``flops_profiler`` block.

The stock pipeline engine crashes with the profiler's timers, profiles rank 0 alone, restarts it for every micro-batch
and never prints it. Here the first replica of each stage profiles one forward of one step, so that recomputed
activations are not counted as work; rank 0 gathers what all of them found.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.profiling.flops_profiler import FlopsProfiler, profiler
from deepspeed.runtime.pipe import schedule
from torch import nn

from ddpm_ds.observe.flops_counts import corrected_counts
from ddpm_ds.observe.flops_table import (
    Circumstances,
    Counts,
    LayerProfile,
    StageProfile,
    agreement,
    as_json,
    notes,
    table,
    total,
)
from ddpm_ds.observe.observer import Observer, Report
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.partition import stages_of
from ddpm_ds.unet.layers import Layer


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

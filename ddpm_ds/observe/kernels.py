"""Kernel profile: PyTorch's profiler over some optimizer steps.

kernels/rank{r}.txt            PyTorch's own table of a rank's operators
kernels/rank{r}.trace.json.gz  every event, for https://ui.perfetto.dev
"""

import atexit
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from ddpm_ds.ground.device import wait_for_device
from ddpm_ds.ground.files import replace_file
from ddpm_ds.observe.observer import Observer, Report, instructions_wrapped, reported
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import gather_objects
from ddpm_ds.pipeline.schedule import Instruction

TABLE_ROWS, WIDEST_NAME = 100, 60
SILENT = "6"  # log level of the profiler's library, which else announces itself and warns if there is no GPU
INSTRUCTION, SPAN, WAIT = "instruction ", "between steps: ", "wait for other ranks"
"""Our own ranges in a profile: an instruction of the schedule, work between two steps, and a wait of the host."""


class KernelProfile(Observer):
    """Observer that profiles ``steps`` once, even if a rollback repeats them.

    The step before them warms the profiler up. A process that exits before the last one stops the profiler, which would
    crash otherwise, and writes nothing.
    """

    def __init__(self, engine: UnetPipelineEngine, steps: range, folder: Path, report: Report) -> None:
        self._engine, self._steps, self._folder, self._report = engine, steps, folder, report
        self._profiler: profile | None = None
        self._recorded, self._last, self._on_device = 0, 0, False
        self._labels = contextlib.ExitStack()

    def begin_step(self, step: int) -> None:
        if self._profiler is not None and step in self._steps and step == self._profiler.step_num + 1:
            self._profiler.step()
        else:
            self._stop()
        begins = step in self._steps or step + 1 == self._steps.start
        if self._profiler is None and begins and not self._recorded:
            os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
            self._on_device = self._engine.device.type == "cuda"

            def action(step: int) -> ProfilerAction:
                return ProfilerAction.RECORD if step in self._steps else ProfilerAction.WARMUP

            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
            self._profiler = profile(activities=kinds, schedule=action, profile_memory=True)
            self._profiler.step_num = step  # by which steps are named in the trace
            self._profiler.current_action = action(step)  # type: ignore[assignment]
            wait = dist.Work.wait

            def labelled_wait(*arguments: Any, **options: Any) -> Any:
                with record_function(WAIT):  # PyTorch records no event of it
                    return wait(*arguments, **options)

            dist.Work.wait = labelled_wait  # type: ignore[method-assign]
            self._labels.callback(setattr, dist.Work, "wait", wait)

            def labelled(instruction: Instruction, execute: Callable[[], None]) -> None:
                with record_function(INSTRUCTION + instruction.name):
                    execute()

            self._labels.enter_context(instructions_wrapped(self._engine, labelled))
            self._labels.enter_context(self._engine.watched())
            self._profiler.start()
            atexit.register(self._profiler.stop)
        if self._profiler is not None and step in self._steps:
            self._recorded, self._last = self._recorded + 1, step

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return record_function(SPAN + name) if self._profiler is not None else contextlib.nullcontext()

    def finish(self) -> None:
        self._stop()
        if self._steps and not self._recorded:
            which = f"--profile-kernels {self._steps[0]}-{self._steps[-1]}"
            self._report.log(f"{which}: none of these steps was taken since the run was started or resumed")

    def _stop(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        wait_for_device(self._engine.device)
        profiler.stop()
        atexit.unregister(profiler.stop)
        self._labels.close()
        if not self._recorded:
            return

        own, written = self._folder / f"rank{dist.get_rank()}", list[str]()
        key = "self_device_time_total" if self._on_device else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=TABLE_ROWS, max_name_column_width=WIDEST_NAME)
        with reported(self._report, own):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(own.with_suffix(".txt"), table.encode())
            profiler.export_chrome_trace(f"{own}.trace.json.gz")
            written = [f"{own}.txt", f"{own}.trace.json.gz"]
        if (files := gather_objects(written, list[str])) is not None:
            for path in (path for own in files for path in own):
                self._report.artifact(Path(path), "kernels")
            first = self._last - self._recorded + 1
            self._report.log(f"kernels of steps {first}-{self._last}: {self._folder}, a table for each rank")

"""Kernel profile: PyTorch's profiler over some optimizer steps, and the time of each kind of work.

    kernels/groups.txt             the groups of all ranks together
    kernels/rank{r}.txt            PyTorch's own table of a rank's operators
    kernels/rank{r}.trace.json.gz  every event, for https://ui.perfetto.dev

Only self times count, an event's time less that of its children, so that the groups add up to the profile. An event
belongs to the first group of :data:`GROUPS` whose pattern its own name or that of an event around it matches.
"""

import atexit
import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from ddpm_ds.ground.device import wait_for_device
from ddpm_ds.ground.errors import faults_logged
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.units import aligned
from ddpm_ds.observe.observer import Observer, Report, instructions_wrapped, keep
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import gather_objects
from ddpm_ds.pipeline.schedule import Instruction

TABLE_ROWS, WIDEST_NAME = 100, 60
SILENT = "6"  # the profiler's library then neither announces itself nor warns that there is no GPU
INSTRUCTION, SPAN, WAIT = "instruction ", "between steps: ", "wait for other ranks"
"""Our own ranges in a profile: an instruction of the schedule, work between two steps, and a wait of the host."""
OF_HOST = ("synchronisation", "launch_overhead")  # the host's time also where there is a device, which works meanwhile
GROUPS = {
    "left_out": re.compile(rf"{SPAN}(sampling|checkpoint)$"),
    "synchronisation": re.compile(rf"{WAIT}$|(cuda|cu|hip)\w*Synchronize"),
    "launch_overhead": re.compile(r"(cuda|cu|hip)[A-Z]"),
    "communication": re.compile(r"c10d::|gloo:|nccl|mpi:|record_param_comms|_c10d_functional::"),
    "optimizer": re.compile(rf"{INSTRUCTION}OptimizerStep$|Optimizer\.(step|zero_grad)#"),
    "loader": re.compile(rf"{INSTRUCTION}LoadMicroBatch$"),
    "attention": re.compile(r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)"),
    "convolution_backward": re.compile(r"(aten|ddpm_ds)::\w*conv\w*_backward"),
    "convolution_forward": re.compile(r"aten::\w*conv(olution|\dd|_transpose|_depthwise)"),
    "normalisation": re.compile(r"aten::\w*(group|layer|batch|instance|rms)_norm|ddpm_ds::norm_silu"),
    "copies": re.compile(
        r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_foreach_copy_?|_copy_from\w*|flatten_dense_tensors)$"
        r"|Memcpy |void at::native::\w*(Cat|copy)"
    ),
    "other": re.compile(""),
}
"""Pattern of each group; the first is no training, and is not reported."""


def group_of(*names: str) -> str:
    """Return the group of an event by its name and the names around it."""
    return next(group for group, pattern in GROUPS.items() if any(map(pattern.match, names)))


def shares(events: Iterable[Any], *, on_device: bool) -> dict[str, float]:
    """Return the self seconds of ``torch.profiler.profile.events()`` by group.

    Without a device an operator's time is the host's. With one it is the time of the kernels it launched; kernels that
    no operator launched count under their own names.
    """
    found, kernels, host = dict.fromkeys(GROUPS, 0.0), defaultdict[str, float](float), list[Any]()
    for event in events:
        if event.device_type.name == "CPU":
            host.append(event)
        elif not event.is_user_annotation:
            kernels[event.name] += event.self_device_time_total
    for event in (one for one in host if not one.is_async):
        names, above = [event.name], event.cpu_parent
        while above is not None:
            names.append(above.name)
            above = above.cpu_parent
        group = group_of(*names)
        if not on_device or group_of(event.name) in OF_HOST:
            found[group] += event.self_cpu_time_total * 1e-6
        for kernel in event.kernels:
            if kernel.name in kernels:  # others are ranges, which have kernels of their own
                found[group] += kernel.duration * 1e-6
                kernels[kernel.name] -= kernel.duration
    for name, microseconds in kernels.items():
        found[group_of(name)] += max(microseconds, 0.0) * 1e-6
    del found["left_out"]
    return found


class KernelProfile(Observer):
    """Observer that profiles the steps once, even if a rollback repeats them.

    The step before them warms the profiler up. A process that exits before the last of them stops the profiler, which
    would crash it otherwise, and writes nothing.
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
        if self._profiler is None and not self._recorded and begins:
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

        def write() -> list[Path]:
            self._folder.mkdir(parents=True, exist_ok=True)
            own = self._folder / f"rank{dist.get_rank()}"
            key = "self_device_time_total" if self._on_device else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=key, row_limit=TABLE_ROWS, max_name_column_width=WIDEST_NAME)
            replace_file(own.with_suffix(".txt"), table.encode())
            profiler.export_chrome_trace(f"{own}.trace.json.gz")
            return []  # rank 0 keeps all of them

        keep(self._report, "kernels", write)
        ranks = gather_objects(shares(profiler.events() or (), on_device=self._on_device), dict[str, float])
        if ranks is None:
            return
        steps, file = f"steps {self._last - self._recorded + 1}-{self._last}", self._folder / "groups.txt"
        with faults_logged("kernel profile", self._report.log):
            means = {group: fmean(rank[group] for rank in ranks) / self._recorded for group in ranks[0]}
            total = sum(means.values())
            rows = [("self time, seconds per step", "mean", "share")]
            for group in sorted(means, key=lambda group: -means[group]):
                rows.append((group.replace("_", " "), f"{means[group]:.4f}", f"{means[group] / (total or 1):.1%}"))
            table = "\n".join(aligned([*rows, ("total", f"{total:.4f}", "")], left={0}))

            def write_groups() -> list[Path]:
                replace_file(file, f"{steps}, all ranks\n\n{table}\n".encode())
                return sorted(self._folder.iterdir())

            if keep(self._report, "kernels", write_groups):
                self._report.log(f"kernels of {steps}: {file}")
            values = {f"kernels/{group}_seconds": mean for group, mean in {**means, "total": total}.items()}
            self._report.observed(values, self._last)

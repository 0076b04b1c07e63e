"""What a kernel profile is written down as: the metrics of a run, tables for people, and the ranks' traces.

PyTorch's profiler over some optimizer steps, on every rank: which operators and kernels the time went to.

    kernels/rank{r}.txt            a rank's groups, and PyTorch's own table of its operators
    kernels/groups.txt             the groups and the operators of all ranks together
    kernels/rank{r}.trace.json.gz  every event, for https://ui.perfetto.dev

Rank 0 writes them all; what the others have seen is gathered, since other nodes share no folder with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import os
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch.profiler import ProfilerActivity, profile, record_function
from torch.profiler import schedule as profiler_schedule

from ddpm_ds.device import wait_for_device
from ddpm_ds.observe.kernel_groups import GROUPS, INSTRUCTION, SPAN, WAIT, Shares, operations_of, shares
from ddpm_ds.observe.observer import Observer, Report
from ddpm_ds.pipeline.engine import UnetPipelineEngine

TABLE_ROWS = 100
WIDEST_NAME = 60


@dataclass(frozen=True)
class OperatorRow:
    """An operator or kernel in the table of a profile, summed over its calls."""

    calls: int
    self_cpu_seconds: float
    cpu_seconds: float
    self_device_seconds: float
    memory_bytes: int
    """Allocated, less what was freed, by itself; on the device where there is one."""


@dataclass(frozen=True)
class RankProfile:
    """What one rank hands over."""

    steps: int
    """That were recorded."""
    shares: Shares
    rows: dict[str, OperatorRow]
    table: str
    """PyTorch's own."""
    trace: bytes
    """Compressed."""
    kept: float
    """Share of the trace's events that are left in it."""


def metrics(ranks: Sequence[RankProfile]) -> dict[str, float]:
    """Seconds per step, mean over the ranks."""
    steps = ranks[0].steps * len(ranks)
    values = {f"kernels/{group}_seconds": sum(rank.shares.seconds[group] for rank in ranks) / steps for group in GROUPS}
    return {**values, "kernels/total_seconds": sum(rank.shares.total for rank in ranks) / steps}


def write(ranks: Sequence[RankProfile], folder: Path, last_step: int, *, on_device: bool) -> list[Path]:
    """Write every file; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = ranks[0].steps
    recorded = f"{steps} optimizer {'step' if steps == 1 else 'steps'} up to number {last_step}"
    groups = folder / "groups.txt"
    groups.write_text(
        f"{recorded}, all ranks\n\n{group_table(ranks)}\n\n{operator_table(ranks, on_device=on_device)}\n"
    )
    paths = [groups]
    for number, rank in enumerate(ranks):
        text, trace = folder / f"rank{number}.txt", folder / f"rank{number}.trace.json.gz"
        text.write_text(f"{recorded}, rank {number}\n\n{group_table([rank])}\n\n{rank.table}")
        trace.write_bytes(rank.trace)
        paths += [text, trace]
    return paths


def group_table(ranks: Sequence[RankProfile]) -> str:
    """Seconds per step of every group: mean over the ranks, least, most, and what most of it went to."""
    means = metrics(ranks)
    total = means["kernels/total_seconds"]
    lines = [f"{'self time, seconds per step':30}{'mean':>10}{'share':>8}{'least':>10}{'most':>10}  largest"]
    for group in sorted(GROUPS, key=lambda group: -means[f"kernels/{group}_seconds"]):
        own = [rank.shares.seconds[group] / rank.steps for rank in ranks]
        mean = means[f"kernels/{group}_seconds"]
        names: dict[str, float] = defaultdict(float)
        for rank in ranks:
            for name, seconds in rank.shares.names[group].items():
                names[name] += seconds
        largest = sorted(names.items(), key=lambda item: -item[1])[:3]
        lines.append(
            f"{group.replace('_', ' '):30}{mean:10.4f}{mean / total if total else 0.0:8.1%}{min(own):10.4f}"
            f"{max(own):10.4f}  {', '.join(f'{name[:WIDEST_NAME]}' for name, seconds in largest if seconds > 0)}"
        )
    totals = [rank.shares.total / rank.steps for rank in ranks]
    return "\n".join([*lines, f"{'total':30}{total:10.4f}{'':8}{min(totals):10.4f}{max(totals):10.4f}"])


def operator_table(ranks: Sequence[RankProfile], *, on_device: bool) -> str:
    """The operators of all ranks summed, per step, those with most self time first."""
    rows: dict[str, list[float]] = {}
    for rank in ranks:
        for name, row in rank.rows.items():
            summed = (row.calls, row.self_cpu_seconds, row.cpu_seconds, row.self_device_seconds, row.memory_bytes)
            rows[name] = [one + other for one, other in zip(rows.get(name, [0.0] * 5), summed, strict=True)]
    order = sorted(rows.items(), key=lambda item: -item[1][3 if on_device else 1])
    lines = [
        f"{'per step, all ranks summed':{WIDEST_NAME}}{'self CPU ms':>13}{'CPU ms':>11}{'self device ms':>16}"
        f"{'calls':>9}{'memory MB':>11}"
    ]
    for name, values in order[:TABLE_ROWS]:
        calls, self_cpu, cpu, device, memory = (value / ranks[0].steps for value in values)
        lines.append(
            f"{name[: WIDEST_NAME - 1]:{WIDEST_NAME}}{self_cpu * 1e3:13.3f}{cpu * 1e3:11.3f}{device * 1e3:16.3f}"
            f"{calls:9.1f}{memory / 1e6:11.2f}"
        )
    return "\n".join(lines)


SILENT = "6"
"""Level at which the profiler's library neither announces itself nor misses a GPU."""
MOST_TRACE_BYTES = 2**25
"""Of one rank's compressed trace."""
MOST_TRACES_BYTES = 2**29
"""Of all ranks' together."""


class KernelProfile(Observer):
    """Profiles the steps once, even if a rewound run takes them again.

    The step before them, if this process takes it, warms the profiler up: its first step is slower than others. A
    process that leaves amid the steps stops the profiler, which would crash it otherwise, and writes nothing.
    """

    def __init__(self, engine: UnetPipelineEngine, steps: range, folder: Path, report: Report) -> None:
        self._engine, self._steps, self._folder, self._report = engine, steps, folder, report
        self._profiler: profile | None = None
        self._recorded = self._most = 0
        self._last = 0
        self._labels = contextlib.ExitStack()

    def begin_step(self, step: int) -> None:
        if self._profiler is not None:
            if step in self._steps and self._recorded < self._most:
                self._profiler.step()
                self._count(step)
                return
            self._stop()
        if not self._recorded and (step in self._steps or step + 1 == self._steps.start):
            self._start(step)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        with record_function(SPAN + name) if self._profiler is not None else contextlib.nullcontext():
            yield

    def finish(self) -> None:
        if self._profiler is not None:
            self._stop()
        if self._steps and not self._recorded:
            self._report.say(
                f"--profile-kernels {self._steps[0]}-{self._steps[-1]}: none of these steps was taken since the run "
                "was started or resumed"
            )

    def _start(self, step: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        warmup = int(step not in self._steps)
        self._most = self._steps.stop - step - warmup
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no warm-up, where the steps begin with the process
            stages = profiler_schedule(wait=0, warmup=warmup, active=self._most, repeat=1)
        on_device = self._engine.device.type == "cuda"
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])],
            schedule=stages,
            profile_memory=True,
        )
        self._labels.enter_context(labelled_instructions(self._engine))
        self._labels.enter_context(labelled_waits())
        self._labels.enter_context(self._engine.watched())
        self._profiler.start()
        atexit.register(self._profiler.stop)
        if not warmup:
            self._count(step)

    def _count(self, step: int) -> None:
        self._recorded += 1
        self._last = step

    def _stop(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        wait_for_device(self._engine.device)
        profiler.stop()
        atexit.unregister(profiler.stop)
        self._labels.close()
        if self._recorded:
            self._hand_over(self._read(profiler))

    def _read(self, profiler: profile) -> RankProfile:
        on_device = self._engine.device.type == "cuda"
        events = profiler.events()
        assert events is not None
        averages = profiler.key_averages()
        trace, kept = bounded(
            _exported(profiler, self._last - self._recorded + 1),
            min(MOST_TRACE_BYTES, MOST_TRACES_BYTES // dist.get_world_size()),
        )
        return RankProfile(
            self._recorded,
            shares(operations_of(events, on_device=on_device)),
            _rows(averages, on_device),
            averages.table(
                sort_by="self_device_time_total" if on_device else "self_cpu_time_total",
                row_limit=TABLE_ROWS,
                max_name_column_width=WIDEST_NAME,
            ),
            trace,
            kept,
        )

    def _hand_over(self, own: RankProfile) -> None:
        """Gather the ranks' profiles on rank 0, and write and log them there."""
        rank = dist.get_rank()
        ranks: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(own, ranks, dst=0)
        if ranks is None:
            return
        for number, found in enumerate(ranks):
            if found.kept < 1.0:
                self._report.say(
                    f"the kernel trace of rank {number} was cut to the first {found.kept:.0%} of its events, "
                    f"{len(found.trace) / 2**20:.0f} MiB; profile fewer steps to see all of them"
                )
        try:
            for path in write(ranks, self._folder, self._last, on_device=self._engine.device.type == "cuda"):
                self._report.artifact(path, "kernels")
        except OSError as error:
            self._report.say(f"{self._folder} can't be written ({error.strerror}); training goes on")
        self._report.observed(metrics(ranks), self._last)


@contextlib.contextmanager
def labelled_instructions(engine: UnetPipelineEngine) -> Iterator[None]:
    """Within, every instruction of the schedule is a range of the profile."""

    def labelled(name: str, execute: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            with record_function(INSTRUCTION + name):
                execute(**arguments)

        return run

    wrapped: dict[type[schedule.PipeInstruction], tuple[Callable[..., None], Callable[..., None]]] = {
        kind: (execute, labelled(kind.__name__, execute)) for kind, execute in engine.execute.items()
    }
    engine.execute.update({kind: run for kind, (_, run) in wrapped.items()})
    try:
        yield
    finally:
        for kind, (before, run) in wrapped.items():
            if engine.execute[kind] is run:  # what somebody else has wrapped since then stays
                engine.execute[kind] = before


@contextlib.contextmanager
def labelled_waits() -> Iterator[None]:
    """Within, every wait for a message or a collective is a range of the profile, which has no event of its own."""
    wait = dist.Work.wait

    def labelled(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        with record_function(WAIT):
            return wait(work, *arguments, **options)

    dist.Work.wait = labelled  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def _rows(averages: Any, on_device: bool) -> dict[str, OperatorRow]:
    found: dict[str, OperatorRow] = {}
    for average in averages:
        before = found.get(average.key, OperatorRow(0, 0.0, 0.0, 0.0, 0))
        memory = average.self_device_memory_usage if on_device else average.self_cpu_memory_usage
        found[average.key] = OperatorRow(
            before.calls + average.count,
            before.self_cpu_seconds + average.self_cpu_time_total * 1e-6,
            before.cpu_seconds + average.cpu_time_total * 1e-6,
            before.self_device_seconds + average.self_device_time_total * 1e-6,
            before.memory_bytes + memory,
        )
    return found


def _exported(profiler: profile, first_step: int) -> bytes:
    """The trace as JSON, its steps numbered as those of the run; the profiler counts its own from 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes()
    numbers = [int(number) for number in re.findall(rb"ProfilerStep#(\d+)", text)]
    shift = first_step - min(numbers, default=0)
    return re.sub(rb"ProfilerStep#(\d+)", lambda found: b"ProfilerStep#%d" % (int(found[1]) + shift), text)


def bounded(trace: bytes, most_bytes: int) -> tuple[bytes, float]:
    """A Chrome trace compressed to at most so many bytes, and the share of its events kept: the earliest ones."""
    compressed = gzip.compress(trace, 6, mtime=0)
    if len(compressed) <= most_bytes:
        return compressed, 1.0
    whole = json.loads(trace)
    events = sorted(whole["traceEvents"], key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    kept = 1.0
    while len(compressed) > most_bytes and kept > 0.001:
        kept *= min(0.9, 0.95 * most_bytes / len(compressed))
        whole["traceEvents"] = events[: int(kept * len(events))]
        compressed = gzip.compress(json.dumps(whole).encode(), 6, mtime=0)
    return compressed, kept

"""Kernel profile: PyTorch's profiler over some optimizer steps, and the time of each operator and kernel.

    kernels/groups.txt             the groups of all ranks together
    kernels/rank{r}.txt            a rank's groups, and PyTorch's own table of its operators
    kernels/rank{r}.trace.json.gz  every event, for https://ui.perfetto.dev

Rank 0 gathers and writes them all, since other hosts may share no folder with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Base64Encoder, EncodedBytes
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from ddpm_ds.command_line import aligned
from ddpm_ds.device import wait_for_device
from ddpm_ds.errors import fault_said
from ddpm_ds.files import replace_file
from ddpm_ds.observe.kernel_groups import GROUPS, INSTRUCTION, SPAN, WAIT, Shares, operations_of, shares
from ddpm_ds.observe.observer import Observer, Report, instructions_wrapped, keep
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.exchange import gather_objects
from ddpm_ds.pipeline.schedule import Instruction

TABLE_ROWS = 100
WIDEST_NAME = 60
SILENT = "6"  # the profiler's library then neither announces itself nor warns that there is no GPU
MOST_TRACE_BYTES, MOST_TRACES_BYTES = 2**25, 2**29  # of one rank's compressed trace, and of all ranks' together


@dataclass(frozen=True)
class RankProfile:
    """Profile of one rank."""

    steps: int
    shares: Shares
    table: str
    """PyTorch's own table of operators."""
    trace: Annotated[bytes, EncodedBytes(Base64Encoder)]
    """Compressed Chrome trace."""
    kept: float
    """Share of the trace's events that were kept."""

    def seconds(self, group: str) -> float:
        """Return seconds per step of a group, or of all groups if ``group`` is ``total``."""
        names = [self.shares[one] for one in GROUPS if group in (one, "total")]
        return sum(sum(seconds.values()) for seconds in names) / self.steps


class KernelProfile(Observer):
    """Observer that profiles the steps once, even if a rollback repeats them.

    The step before them, if this process takes it, warms the profiler up: its first step is slower than others. A
    process that exits before the last of the steps stops the profiler, which would crash it otherwise, and writes
    nothing.
    """

    def __init__(self, engine: UnetPipelineEngine, steps: range, folder: Path, report: Report) -> None:
        self._engine, self._steps, self._folder, self._report = engine, steps, folder, report
        self._profiler: profile | None = None
        self._recorded = self._last = 0
        self._labels = contextlib.ExitStack()

    def begin_step(self, step: int) -> None:
        if self._profiler is not None:
            if step in self._steps and step == self._profiler.step_num + 1:
                self._profiler.step()
                self._count(step)
                return
            self._stop()
        if not self._recorded and (step in self._steps or step + 1 == self._steps.start):
            self._start(step)

    def span(self, name: str) -> AbstractContextManager[Any]:
        return record_function(SPAN + name) if self._profiler is not None else contextlib.nullcontext()

    def finish(self) -> None:
        if self._profiler is not None:
            self._stop()
        if self._steps and not self._recorded:
            self._report.log(
                f"--profile-kernels {self._steps[0]}-{self._steps[-1]}: none of these steps was taken since the run "
                "was started or resumed"
            )

    @property
    def _on_device(self) -> bool:
        return self._engine.device.type == "cuda"

    def _start(self, step: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])],
            schedule=self._action,
            profile_memory=True,
        )
        self._profiler.step_num = step  # by which steps are named in the trace
        self._profiler.current_action = self._action(step)  # type: ignore[assignment]
        self._labels.enter_context(instructions_wrapped(self._engine, _labelled))
        self._labels.enter_context(labelled_waits())
        self._labels.enter_context(self._engine.watched())
        self._profiler.start()
        atexit.register(self._profiler.stop)
        self._count(step)

    def _action(self, step: int) -> ProfilerAction:
        return ProfilerAction.RECORD if step in self._steps else ProfilerAction.WARMUP

    def _count(self, step: int) -> None:
        if step in self._steps:
            self._recorded, self._last = self._recorded + 1, step

    def _stop(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        wait_for_device(self._engine.device)
        profiler.stop()
        atexit.unregister(profiler.stop)
        self._labels.close()
        if not self._recorded:
            return
        ranks = gather_objects(self._read(profiler), RankProfile)
        if ranks is not None:
            with fault_said("kernel profile", self._report.log):
                self._report_ranks(ranks)

    def _report_ranks(self, ranks: Sequence[RankProfile]) -> None:
        for number, rank in enumerate(ranks):
            if rank.kept < 1.0:
                self._report.log(
                    f"the kernel trace of rank {number} was cut to the first {rank.kept:.0%} of its events, "
                    f"{len(rank.trace) / 2**20:.0f} MiB; profile fewer steps to see all of them"
                )
        if keep(self._report, "kernels", lambda: write(ranks, self._folder, self._last)):
            first = self._last - self._recorded + 1
            self._report.log(f"kernels of steps {first}-{self._last}: {self._folder / 'groups.txt'}")
        self._report.observed(metrics(ranks), self._last)

    def _read(self, profiler: profile) -> RankProfile:
        events = profiler.events()
        assert events is not None
        table = profiler.key_averages().table(
            sort_by="self_device_time_total" if self._on_device else "self_cpu_time_total",
            row_limit=TABLE_ROWS,
            max_name_column_width=WIDEST_NAME,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace, kept = bounded(path.read_bytes(), min(MOST_TRACE_BYTES, MOST_TRACES_BYTES // dist.get_world_size()))
        own = shares(operations_of(events, on_device=self._on_device))
        return RankProfile(self._recorded, own, table, trace, kept)


def _labelled(instruction: Instruction, execute: Callable[[], None]) -> None:
    with record_function(INSTRUCTION + instruction.name):
        execute()


@contextlib.contextmanager
def labelled_waits() -> Iterator[None]:
    """Make every wait for a message or a collective a range of the profile; PyTorch records no event of it."""
    wait = dist.Work.wait

    def labelled(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        with record_function(WAIT):
            return wait(work, *arguments, **options)

    dist.Work.wait = labelled  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def bounded(trace: bytes, most_bytes: int) -> tuple[bytes, float]:
    """Return a Chrome trace compressed to at most ``most_bytes``, and the share of events kept (the earliest)."""
    compressed, kept = gzip.compress(trace, 6, mtime=0), 1.0
    if len(compressed) <= most_bytes:
        return compressed, kept
    whole = json.loads(trace)
    events = sorted(whole["traceEvents"], key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    while len(compressed) > most_bytes and kept > 0.001:
        kept *= min(0.9, 0.95 * most_bytes / len(compressed))
        whole["traceEvents"] = events[: int(kept * len(events))]
        compressed = gzip.compress(json.dumps(whole).encode(), 6, mtime=0)
    return compressed, kept


def metrics(ranks: Sequence[RankProfile]) -> dict[str, float]:
    """Return seconds per step of each group and in total, mean over the ranks."""
    return {
        f"kernels/{group}_seconds": sum(rank.seconds(group) for rank in ranks) / len(ranks)
        for group in (*GROUPS, "total")
    }


def write(ranks: Sequence[RankProfile], folder: Path, last_step: int) -> list[Path]:
    """Write every file and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = ranks[0].steps
    recorded = f"{steps} optimizer {'step' if steps == 1 else 'steps'} up to number {last_step}"
    groups = folder / "groups.txt"
    replace_file(groups, f"{recorded}, all ranks\n\n{group_table(ranks)}\n".encode())
    paths = [groups]
    for number, rank in enumerate(ranks):
        text, trace = folder / f"rank{number}.txt", folder / f"rank{number}.trace.json.gz"
        replace_file(text, f"{recorded}, rank {number}\n\n{group_table([rank])}\n\n{rank.table}".encode())
        replace_file(trace, rank.trace)
        paths += [text, trace]
    return paths


def group_table(ranks: Sequence[RankProfile]) -> str:
    """Return a table of every group's seconds per step (mean, minimum, maximum over ranks) and largest operators."""
    means = metrics(ranks)
    rows = [("self time, seconds per step", "mean", "share", "least", "most", "largest")]
    for group in (*sorted(GROUPS, key=lambda group: -means[f"kernels/{group}_seconds"]), "total"):
        own, mean = [rank.seconds(group) for rank in ranks], means[f"kernels/{group}_seconds"]
        names: Counter[str] = Counter()
        for rank in ranks:
            names.update(dict(rank.shares).get(group, {}))  # type: ignore[arg-type]
        largest = ", ".join(name[:WIDEST_NAME] for name, seconds in names.most_common(3) if seconds > 0)
        share = "" if group == "total" else f"{mean / (means['kernels/total_seconds'] or 1):.1%}"
        rows.append((group.replace("_", " "), f"{mean:.4f}", share, f"{min(own):.4f}", f"{max(own):.4f}", largest))
    return "\n".join(aligned(rows, left={0, 5}))

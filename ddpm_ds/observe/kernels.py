"""Kernel profile: PyTorch's profiler over some optimizer steps, and the time of each operator and kernel.

    kernels/groups.txt             the groups of all ranks together
    kernels/rank{r}.txt            a rank's groups, and PyTorch's own table of its operators
    kernels/rank{r}.trace.json.gz  every event, for https://ui.perfetto.dev

Rank 0 gathers and writes them all, since other hosts may share no folder with it.

Ten groups of operators and kernels have times that sum to the profile's. Only self times count, an event's time less
that of its children, so that nothing counts twice. An event belongs to the first of these groups:

1. a group by its own name alone: launches, synchronisation;
2. the group of its nearest ancestor, itself included, that is a convolution, attention, a normalisation, a message, or
   a piece of the optimizer's step;
3. attention, if PyTorch's sequence numbers say that it is the backward of an attention operator;
4. copies, if it or an ancestor is one;
5. ``other``.

A node of autograd's graph has no group by its name, since a checkpoint may recompute other operators within it.
"""

import atexit
import contextlib
import gzip
import json
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch.distributed as dist
from pydantic import Base64Encoder, EncodedBytes
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from ddpm_ds.command_line import aligned
from ddpm_ds.device import wait_for_device
from ddpm_ds.errors import fault_said
from ddpm_ds.files import replace_file
from ddpm_ds.observe.observer import Observer, Report, instructions_wrapped, keep
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import gather_objects
from ddpm_ds.pipeline.schedule import Instruction

TABLE_ROWS = 100
WIDEST_NAME = 60
SILENT = "6"  # the profiler's library then neither announces itself nor warns that there is no GPU
MOST_TRACE_BYTES, MOST_TRACES_BYTES = 2**25, 2**29  # of one rank's compressed trace, and of all ranks' together

Group = Literal[
    "convolution_forward",
    "convolution_backward",
    "attention",
    "normalisation",
    "copies",
    "optimizer",
    "communication",
    "launch_overhead",
    "synchronisation",
    "other",
]
GROUPS: tuple[Group, ...] = get_args(Group)

INSTRUCTION, SPAN, WAIT = "instruction ", "between steps: ", "wait for other ranks"
"""Names of our own ranges in a profile: an instruction of the pipeline's schedule, work between two steps, and a wait
of the host for a message or a collective.
"""

LEFT_OUT = (SPAN + "sampling", SPAN + "checkpoint")
"""Ranges that are not training; neither they nor the operators within them belong to a group."""

RUNTIME_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")  # pattern of calls into the device's driver, on the host

_BY_NAME_ALONE: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("synchronisation", re.compile(rf"{WAIT}$|(cuda|cu|hip)\w*Synchronize")),
    ("launch_overhead", RUNTIME_CALL),
)

_WITH_DESCENDANTS: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("communication", re.compile(r"c10d::|gloo:|nccl|mpi:|record_param_comms|_c10d_functional::")),
    ("attention", re.compile(r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)")),
    ("convolution_backward", re.compile(r"(aten|ddpm_ds)::\w*conv\w*_backward")),
    ("convolution_forward", re.compile(r"aten::\w*conv(olution|\dd|_transpose|_depthwise)")),
    ("normalisation", re.compile(r"aten::\w*(group|layer|batch|instance|rms)_norm|ddpm_ds::norm_silu")),
    ("optimizer", re.compile(rf"{INSTRUCTION}OptimizerStep$|Optimizer\.(step|zero_grad)#")),
)

_COPIES = re.compile(
    r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_foreach_copy_?|_copy_from\w*|flatten_dense_tensors)$"
    r"|Memcpy |void at::native::\w*(Cat|copy)"
)
Shares = dict[Group, dict[str, float]]
"""Seconds of each name in each group; every group has an entry."""


@dataclass(frozen=True)
class ProfiledOperation:
    """Event of a profile with its self time."""

    name: str
    seconds: float
    """Self time in seconds."""
    parent: int | None = None
    """Position of the event that this one ran within, which comes earlier."""
    forward: int | None = None
    """Position of the forward operator, for a node of autograd's graph."""


@cache
def _found(table: tuple[tuple[Group, re.Pattern[str]], ...], name: str) -> Group | None:
    return next((group for group, pattern in table if pattern.match(name)), None)


def group_of_each(operations: Sequence[ProfiledOperation]) -> list[Group | None]:
    """Return the group of every operation; None for those left out."""
    inherited: list[tuple[bool, Group | None, bool, int | None]] = []  # by an operation's children as well
    for operation in operations:
        name, above = operation.name, operation.parent
        out, strong, copies, forward = (False, None, False, None) if above is None else inherited[above]
        inherited.append(
            (
                out or name in LEFT_OUT,
                _found(_WITH_DESCENDANTS, name) or strong,
                copies or bool(_COPIES.match(name)),
                forward if operation.forward is None else operation.forward,
            )
        )
    groups: list[Group | None] = []
    for operation, (out, strong, copies, forward) in zip(operations, inherited, strict=True):
        group = _found(_BY_NAME_ALONE, operation.name) or strong
        if group is None and forward is not None and inherited[forward][1] == "attention":
            group = "attention"
        groups.append(None if out else group or ("copies" if copies else "other"))
    return groups


def shares(operations: Sequence[ProfiledOperation]) -> Shares:
    """Return the self times of all operations by group and name."""
    names: Shares = {group: defaultdict(float) for group in GROUPS}
    for operation, group in zip(operations, group_of_each(operations), strict=True):
        if group is not None:
            names[group][operation.name] += operation.seconds
    return {group: dict(found) for group, found in names.items()}


def operations_of(events: Iterable[Any], *, on_device: bool) -> list[ProfiledOperation]:
    """Return the operations of ``torch.profiler.profile.events()``.

    Without a device an operation's time is the host's. With one, each kernel is an operation within the one that
    launched it. Then only calls into the driver and waits have a time of the host, which runs beside the device's.
    """
    host = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    host.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    positions = {id(event): position for position, event in enumerate(host)}
    # An operator that makes no node of the backward carries the sequence number of the next one that does: of all with
    # one number, the last has made the node. Only events of the backward know the thread of their forward.
    made = {(event.sequence_nr, event.thread): positions[id(event)] for event in host if not event.fwd_thread}
    operations = [
        ProfiledOperation(
            event.name,
            event.self_cpu_time_total * 1e-6 if not on_device or _found(_BY_NAME_ALONE, event.name) else 0.0,
            None if event.cpu_parent is None else positions[id(event.cpu_parent)],
            made.get((event.sequence_nr, event.fwd_thread)) if event.fwd_thread and event.sequence_nr >= 0 else None,
        )
        for event in host
    ]
    return operations + _kernels(events, host) if on_device else operations


def _kernels(events: Iterable[Any], host: Sequence[Any]) -> list[ProfiledOperation]:
    """Return the device's events, each under the host's operation that launched it; the rest under none."""
    left: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            left[event.name] += event.self_device_time_total * 1e-6
    linked = [
        ProfiledOperation(kernel.name, kernel.duration * 1e-6, position)
        for position, event in enumerate(host)
        for kernel in event.kernels
        if kernel.name in left  # others are ranges, which have kernels of their own
    ]
    for kernel in linked:
        left[kernel.name] -= kernel.seconds
    return linked + [ProfiledOperation(name, seconds) for name, seconds in left.items() if seconds > 1e-9]


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

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
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

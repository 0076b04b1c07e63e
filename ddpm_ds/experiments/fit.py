"""Search for the largest micro-batch that fits, which begins with the planner's guess.

A trial rehearses training with one micro-batch, in processes that may run out of memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.spec_file import JSON_PREFIX, load_spec, spec_overrides
from ddpm_ds.ground.errors import ERROR, EXIT_PEER_LOST, NEEDS_MORE, RAN_OUT, LayoutError, ProgramError, explanation
from ddpm_ds.ground.formats import read_json
from ddpm_ds.ground.units import MOST_BATCH, gib
from ddpm_ds.planning.inputs import Machine
from ddpm_ds.planning.run_plan import RunDraft, lay_out, read_run, workload
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.processes.signals import received_signals
from ddpm_ds.processes.supervisor import Place, Processes
from ddpm_ds.schema.layout import divisors
from ddpm_ds.tracking.run_folder import REHEARSAL

RANK = (sys.executable, "-m", "ddpm_ds.cli.rank")
POLL_SECONDS, GRACE_SECONDS = 0.05, 60.0  # in the latter the other ranks notice that one has failed, and end
LIBRARY_BYTES = 750 * 2**20  # interpreter and libraries of a process on a CPU, which the planner does not count


def largest(sizes: Sequence[int], fits: Callable[[int], bool], guess: int) -> int | None:
    """Return the largest of the ascending ``sizes`` that fits; None if the first does not.

    The search moves away from ``guess`` by a tenth of it, then by twice as much each time, until one size fits and a
    larger one does not, and then bisects. No size is tried twice, and none that is larger than one that did not fit.
    """
    fitting, failed = -1, len(sizes)  # places in sizes
    place, step = bisect_left(sizes, guess), max(guess // 10, 1)
    while failed - fitting > 1:
        fitting, failed = (place, failed) if fits(sizes[place]) else (fitting, place)
        if fitting < 0:
            place = max(bisect_right(sizes, sizes[failed] - step) - 1, 0)
        elif failed == len(sizes):
            place = min(bisect_left(sizes, sizes[fitting] + step), failed - 1)
        else:
            place = (fitting + failed) // 2
        step *= 2
    return sizes[fitting] if fitting >= 0 else None


@dataclass(frozen=True)
class Task:
    """Everything that a trial needs, except the micro-batch."""

    spec: Path
    given: tuple[str, ...]  # overrides of the spec and the JSON
    ds_config: Path
    stages: int
    replicas: int
    processes: int
    accumulation: int | None  # micro-batches per step, so that the batch grows; None keeps ``train.batch_images``
    machine: Machine  # devices of this host
    budget_bytes: int | None  # maximum bytes that a process may hold; on CUDA, None means the device's memory
    steps: int  # number of timed steps

    def overrides(self, size: int) -> tuple[str, ...]:
        """Return the overrides with which training has this layout, and micro-batches of ``size`` images."""
        keys = {
            "train.accumulation": "auto",
            f"{JSON_PREFIX}pipeline.stages": self.stages,
            f"{JSON_PREFIX}train_micro_batch_size_per_gpu": size,
            f"{JSON_PREFIX}gradient_accumulation_steps": self.accumulation or "auto",
        }
        if self.accumulation is not None:
            batch = self.replicas * self.accumulation * size
            keys |= {f"{JSON_PREFIX}train_batch_size": "auto", "train.batch_images": batch}
        return (*self.given, *(f"{key}={value}" for key, value in keys.items()))

    def draft(self, size: int) -> RunDraft:
        """Lay the run out with micro-batches of ``size`` images; raises a UserError if training would refuse it."""
        files = read_run(self.spec, self.overrides(size), self.ds_config)
        return lay_out(files, ("0",) * self.processes, self.processes, self.stages)

    def config(self, size: int) -> dict[str, Any]:
        """Return the DeepSpeed JSON with the layout and a micro-batch filled in; everything else stays as given."""
        config = read_ds_config(self.ds_config, self.overrides(size))
        return config | {"gradient_accumulation_steps": self.draft(size).ds.layout.micro_batches}

    def sizes(self) -> Sequence[int]:
        """Return all possible micro-batches, ascending; UserError with the reason if there is none."""
        if self.accumulation is not None:
            self.draft(1)
            return range(1, MOST_BATCH // (self.replicas * self.accumulation) + 1)
        possible, errors = list[int](), list[LayoutError]()
        for size in divisors(load_spec(self.spec, spec_overrides(self.given)).train.batch_images):
            try:
                self.draft(size)
                possible.append(size)
            except LayoutError as error:
                errors.append(error)
        if not possible:
            raise errors[0]
        return possible


@dataclass(frozen=True)
class TriedSize:
    """Trial of one micro-batch in all processes of a layout."""

    micro_batch_images: int
    micro_batches: int
    batch_images: int
    why: str = ""  # reason why the micro-batch does not fit; empty if it does
    step_seconds: Sequence[float] = ()
    """Seconds of each timed step in its slowest process; empty if it ran out of memory."""
    rank_peak_bytes: Sequence[int] = ()
    checkpoint_interval: int = 0

    @property
    def fits(self) -> bool:
        return not self.why

    @property
    def images_per_second(self) -> float:
        return self.batch_images / statistics.median(self.step_seconds)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest process; 0 if it is unknown."""
        return max(self.rank_peak_bytes, default=0)

    def line(self) -> str:
        """Return the line printed when the trial is done."""
        size = f"  {self.micro_batches:5} x {self.micro_batch_images:<5}"
        if not self.fits:
            return f"{size} does not fit: {self.why}"
        return f"{size} {self.images_per_second:10,.4g} images/s, {gib(self.peak_bytes)} in the fullest process"


def search(task: Task, attempt: Callable[[int], TriedSize]) -> list[TriedSize]:
    """Try micro-batches by ``attempt``, the planner's guess first; return the trials by size."""
    tried: list[TriedSize] = []

    def fits(size: int) -> bool:
        tried.append(attempt(size))
        print(tried[-1].line(), flush=True)
        return tried[-1].fits

    sizes = task.sizes()
    largest(sizes, fits, expected(task, sizes))
    return sorted(tried, key=lambda one: one.micro_batch_images)


def expected(task: Task, sizes: Sequence[int]) -> int:
    """Return the largest of some sizes that the planner expects to fit, else the smallest."""
    limit = (task.budget_bytes or task.machine.usable_bytes) - LIBRARY_BYTES * task.machine.is_cpu
    return largest(sizes, lambda size: predicted(task, size, limit) <= limit, sizes[0]) or sizes[0]


def predicted(task: Task, size: int, device_bytes: int) -> int:
    """Return the bytes that the planner predicts for the fullest rank with micro-batches of ``size`` images."""
    from ddpm_ds.planning.decisions import fitted
    from ddpm_ds.planning.memory import peak_bytes

    draft = task.draft(size)
    job = workload(draft.spec, draft.ds.config, task.machine.is_cpu, counted=True)
    return peak_bytes(job, fitted(job, draft.ds.layout, draft.bounds, device_bytes), draft.bounds)


def try_size(task: Task, folder: Path, size: int) -> TriedSize:
    """Rehearse training with micro-batches of ``size`` images in a new folder inside of ``folder``; ProgramError if it
    failed for a reason other than memory.
    """
    layout, run_dir, log = task.draft(size).ds.layout, folder / str(size), folder / f"{size}.log"
    device = "cpu" if task.machine.is_cpu else "cuda"
    words = ["--spec", task.spec, "--deepspeed_config", task.ds_config, "--device", device]
    words += ["--run-dir", run_dir, "--steps", task.steps]
    words += [] if task.budget_bytes is None else ["--memory-budget", f"{task.budget_bytes}B"]
    words += [word for change in task.overrides(size) for word in ("--set", change)]
    tried = TriedSize(size, layout.micro_batches, layout.batch_images)
    if why := out_of_memory(run_ranks(list(map(str, words)), task.processes, log), log.read_text(errors="replace")):
        return replace(tried, why=why)
    tried = replace(tried, **read_json(run_dir / REHEARSAL))
    if task.budget_bytes is not None and (peak := tried.peak_bytes) > task.budget_bytes:
        tried = replace(tried, why=f"rank {tried.rank_peak_bytes.index(peak)} took {gib(peak)}")
    return tried


def run_ranks(arguments: Sequence[str], processes: int, log: Path) -> list[int | None]:
    """Run the training program on ``processes`` ranks, with their output in ``log``, and leave none running.

    Return their exit codes: negative for a signal, None for a rank that was still running ``GRACE_SECONDS`` after
    another one had failed. Raises KeyboardInterrupt if a signal asks to end.
    """
    with received_signals() as received, log.open("wb") as output:
        environments = Place(processes, port=free_port()).environments(os.environ)
        ranks, until = Processes([*RANK, *arguments], environments, stdout=output, stderr=output), math.inf
        try:
            for pid in ranks.pids:
                with contextlib.suppress(OSError):  # makes the kernel kill this process first if memory is short
                    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
            while ranks.poll() is None and time.monotonic() < until:
                if received:
                    raise KeyboardInterrupt
                if until == math.inf and ranks.failed:
                    until = time.monotonic() + GRACE_SECONDS
                time.sleep(POLL_SECONDS)
            return ranks.codes
        finally:
            ranks.kill()


def out_of_memory(codes: Sequence[int | None], output: str) -> str:
    """Return how ranks that ended so ran out of memory, empty if they ended well; ProgramError for another reason."""
    for line in output.splitlines():  # of the rank that was the first to notice
        if line.startswith(ERROR) and (RAN_OUT in line or NEEDS_MORE in line):
            return line.removeprefix(ERROR).partition(";")[0]
    for rank, code in enumerate(codes):
        if code == -signal.SIGKILL:
            return f"rank {rank} was killed (SIGKILL)"
        if code == -signal.SIGABRT and "bad_alloc" in output:
            return f"rank {rank} {RAN_OUT}"
    if any(code != 0 for code in codes):
        first = next((code for code in codes if code not in (0, EXIT_PEER_LOST, None)), EXIT_PEER_LOST)
        assert first is not None
        raise ProgramError(explanation(output), first if first > 0 else 128 - first)
    return ""

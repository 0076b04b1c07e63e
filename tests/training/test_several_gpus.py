"""Rows of ``launch/check_gpu.py`` that need several GPUs: products beside a receive, a shared image, SDXL's saves,
memory and NCCL.

Each is rehearsed on a CPU with a small U-Net. As a script, with a file of cases and a folder, this is one of the two
ranks that compute beside a receive.
"""

import contextlib
import gzip
import json
import os
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import check_gpu
import psutil
import pytest
import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.folder import checkpoint_name, names
from ddpm_ds.ground.device import MESSAGE_ENVIRONMENT
from ddpm_ds.observe.observer import read_pauses
from ddpm_ds.pipeline.messages import edge_group
from ddpm_ds.planning.costs import BLOCK_BANDWIDTH
from ddpm_ds.planning.inputs import KINDS
from ddpm_ds.planning.run_plan import machine_here
from ddpm_ds.tracking.run_folder import METRICS, checkpoints_of
from ddpm_ds.unet.space import SpaceGroup
from tests.pipeline.batches import device as own_device
from tests.pipeline.ladder_worker import report_cases, run_cases

pytestmark = pytest.mark.launch

Kind = Literal["cpu", "cuda"]
BLOCKS = (1, 2, 4, 8)
"""Numbers of NCCL's thread blocks for a message."""
MESSAGE_BYTES = {"cpu": 2**12, "cuda": 2**26}
PRODUCTS, ROUNDS = ("matrix product", "convolution"), 7
STEPS, REPLAYED, PROFILED, TRACED = 24, range(4, 10), 11, range(20, 23)
"""Steps of a run, of which half come before the first save; those that are graphs for sure, before the profiler warms
up; the profiled one; those that every run traces."""
LOCKED = re.compile(r"^Vm(?:Lck|Pin):\s+(\d+) kB$", re.MULTILINE)
GIB = 2**30
DISK_BYTES = 90 * GIB
"""Disk space for two checkpoints of SDXL, of 16 bytes a parameter."""


def row(kind: Kind, name: str, measured: str) -> None:
    """Give a row to the report of ``check_gpu.py``, if that runs this test."""
    skipped = {"measured": f"not on a CPU; rehearsed: {measured}", "result": "skipped"}
    values = {"name": name, "measured": measured, **(skipped if kind == "cpu" else {})}
    print(json.dumps(values))
    if file := os.environ.get(check_gpu.ROWS):
        with open(file, "a") as rows:
            rows.write(json.dumps(values) + "\n")


# ------------------------------------------------------------ products beside a receive


def now() -> float:
    """Return the time when the current stream is done; waiting for the device would wait for a receive."""
    if own_device().type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], object]) -> float:
    begin = now()
    work()
    return now() - begin


def products() -> list[Callable[[], object]]:
    """A matrix product and a convolution, which take an H100 one or two milliseconds each, and have run."""
    device = own_device()
    on_cuda = device.type == "cuda"
    size, channels, pixels = (8192, 640, 128) if on_cuda else (128, 8, 16)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    a, b, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
    images = torch.ones(4, channels, pixels, pixels, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    weights = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    found: list[Callable[[], object]] = [
        lambda: torch.mm(a, b, out=out),
        lambda: torch.nn.functional.conv2d(images, weights, padding=1),
    ]
    for product in found * 2:  # which choose kernels and take memory
        seconds(product)
    return found


def beside_receives(blocks: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of rank 0's products: alone, and by blocks while a receive waits; then of both and the message's way."""
    device, first = own_device(), dist.get_rank() == 0
    host: Any = dist.new_group(backend="gloo")
    message = torch.zeros(MESSAGE_BYTES[device.type] // 4, device=device)
    both = products()

    def medians() -> list[float]:
        return [statistics.median(seconds(product) for _ in range(ROUNDS)) for product in both]

    found = {"alone": medians()}
    for count in blocks:
        group = edge_group((0, 1), device, count)
        move: Any = dist.irecv if first else dist.isend
        for _ in range(2):  # the first connects the ranks; now() waits for it on the current stream
            move(message, 1 - dist.get_rank(), group=group).wait()
            now()
        dist.barrier(group=host)
        if first:
            receive = move(message, 1, group=group)
            time.sleep(0.05)  # its kernel has started
            found[str(count)] = medians()
            dist.barrier(group=host)  # rank 1 sends

            def products_and_message(receive: Any = receive) -> None:
                for product in both * ROUNDS:
                    product()
                receive.wait()

            found[str(count)].append(seconds(products_and_message))
        else:
            dist.barrier(group=host)
            move(message, 0, group=group).wait()
            now()
        dist.barrier(group=host)
    return found


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_several_gpus_compute_beside_a_receive(kind: Kind, tmp_path: Path) -> None:
    ranks = run_cases(2, Path(__file__), [BLOCKS], tmp_path, **MESSAGE_ENVIRONMENT, DS_ACCELERATOR=kind)
    (found,) = ranks[0]
    alone, most = found.pop("alone"), KINDS[machine_here("bf16", 2).kind].multiprocessors
    assert [*found] == [*map(str, BLOCKS)]
    for count, (*waiting, last) in found.items():
        slower = ", ".join(f"{what} {own / of:.3f}" for what, own, of in zip(PRODUCTS, waiting, alone, strict=True))
        passes = f"{most / (most - int(count)):.3f}" if most else "not on a CPU"
        wire = MESSAGE_BYTES[kind] / (int(count) * BLOCK_BANDWIDTH)
        what = f"times as long as alone: {slower} (planner: {passes}); {2 * ROUNDS} products and a message of"
        what += f" {MESSAGE_BYTES[kind] / 2**20:g} MiB (planner: {1e3 * wire:.3g} ms) {1e3 * last:.4g} ms"
        row(kind, f"a receive with {count} thread blocks", what)
    total = {count: ROUNDS * sum(waiting) + last for count, (*waiting, last) in found.items()}
    best = min(total, key=total.__getitem__)
    row(kind, "thread blocks of a message", f"take {best}: products while it waits and on its way are done soonest")


# ------------------------------------------------------------ one image on two GPUs


def swaps() -> list[float]:
    """Seconds of swaps with the other rank: a row of 64 channels to and fro, and the statistics of 8 groups."""
    rows = torch.ones(1, 256, 1, 64, device=own_device()).permute(0, 3, 2, 1)
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    space = SpaceGroup(dist.get_rank(), 2, group)
    statistics = torch.ones(2, 1, 8, device=rows.device)
    return [seconds(lambda: space.trade(rows, rows, statistics)()) for _ in range(4 * ROUNDS)]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_several_gpus_share_one_image(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", kind)  # for the planner
    found = run_cases(2, Path(__file__), [None], tmp_path, **MESSAGE_ENVIRONMENT, DS_ACCELERATOR=kind)
    waited, expected = 1e6 * statistics.median(found[0][0][ROUNDS:]), 1e6 * machine_here("bf16", 2).sum_seconds
    row(kind, "a swap of rows", f"{waited:.4g} us (planner: {expected:.4g} us)")
    machine, config = check_gpu.Machine(tmp_path, kind), check_gpu.CONFIGS / "zero2_bf16.json"
    side, channels = (256, 64) if kind == "cuda" else (32, 8)
    file, spec = tmp_path / "large_field.npz", check_gpu.SPECS / "large_field.yaml"
    script = check_gpu.REPOSITORY / "launch/examples/make_fields.py"
    machine.run("fields", script, "--size", str(side), "--count", "9", "--out", file, seconds=100)
    given = {"data__path": file, "data__image_size": side, "unet__channels": channels, "unet__multipliers": "[1,2,2]"}
    given |= {"train__images": STEPS, "train__batch_images": 1, "logging__log_every_images": 1}
    given |= {"samples__every_images": "null", "evaluation__every_images": "null", "optimizer__warmup_images": 0}
    step = dict[int, float]()
    for space in (1, 2):
        words = check_gpu.settings(**given, ds__pipeline__space=json.dumps({"size": space}))
        name, folder = f"one image of {side}x{side} on {space}", tmp_path / f"run{space}"
        row(kind, name, check_gpu.predicted(name, spec.name, config, words, space)[0].measured)
        command = ["-m", "ddpm_ds.cli.main", "train", "--processes", space, "-p", "1", "--run-dir", folder, *words]
        command += ["--deepspeed_config", config, "--spec", spec]
        machine.run(f"train{space}", *map(str, command), seconds=100 if kind == "cuda" else 3600)
        points = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        step[space] = statistics.median(point["usage/step_seconds"] for point in points if point["step"] in REPLAYED)
        row(kind, f"{name}, step", f"{1e3 * step[space]:.4g} ms, {step[space] / step[1]:.3f} of one GPU's")


# ------------------------------------------------------------ runs of SDXL


class Sample(NamedTuple):
    """State of a run at one time."""

    seconds: float
    step: int
    device_bytes: int
    """Memory in use on the first GPU; on a CPU that of the processes."""
    locked_bytes: int
    """Memory that the kernel counts as locked or pinned, of all processes."""
    saved: tuple[str, ...]


def sample(folder: Path, kind: Kind) -> Sample:
    """Look at a run from outside."""
    resident = locked = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, psutil.Error):
            locked += 1024 * sum(map(int, LOCKED.findall(Path(f"/proc/{process.pid}/status").read_text())))
            resident += process.memory_info().rss
    used = torch.cuda.device_memory_used(0) if kind == "cuda" else resident
    points = (folder / METRICS).read_text().count("\n") if (folder / METRICS).exists() else 0
    return Sample(time.monotonic(), points, used, locked, tuple(names(checkpoints_of(folder))))


@contextlib.contextmanager
def sampled(folder: Path, kind: Kind) -> Iterator[list[Sample]]:
    """Look at a run ten times a second, and once when it is over."""
    found, over = list[Sample](), threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            found.append(sample(folder, kind))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.append(sample(folder, kind))


def most(values: Iterable[int]) -> str:
    """The largest value in GiB, if there is any: steps of small U-Nets are shorter than the time between two looks."""
    found = max(values, default=None)
    return "not seen" if found is None else f"{found / GIB:.2f} GiB"


def saves(samples: Sequence[Sample], batch: int, held: float) -> str:
    """Describe the saves after half of the steps and after all: how long each took, and the memory that it locked."""
    begin, took, locked = 0.0, [], [most(one.locked_bytes for one in samples if one.step < STEPS // 2)]
    for step in (STEPS // 2, STEPS):
        name = checkpoint_name(step * batch)
        begin = max(begin, next(one.seconds for one in samples if one.step >= step))
        begin, started = next(one.seconds for one in samples if name in one.saved), begin
        took.append(f"{begin - started:.1f} s")
        locked.append(most(one.locked_bytes for one in samples if started <= one.seconds <= begin))
    return (
        f"first {took[0]}, of which training stood {held:.1f} s, second {took[1]}; "
        f"locked before {locked[0]}, in the first {locked[1]}, in the second {locked[2]}"
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def nccl_shares(trace: dict[str, Any]) -> tuple[float, float] | None:
    """Shares of a device's time, from its first kernel to its last, in which NCCL's kernels run, and run alone; None
    without kernels.
    """
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    spans = [(event["ts"], event["ts"] + event["dur"], event["name"].startswith("nccl")) for event in kernels]
    if not spans:
        return None
    whole = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    of_nccl, others = ([(begin, end) for begin, end, nccl in spans if nccl is wanted] for wanted in (True, False))
    return covered(of_nccl) / whole, (covered(of_nccl + others) - covered(others)) / whole


@pytest.mark.parametrize(
    ("kind", "zero", "count"),
    [
        ("cpu", 1, 2),
        pytest.param("cpu", 2, 2, marks=pytest.mark.long),
        pytest.param("cuda", 1, 1, marks=pytest.mark.gpu(2)),
        pytest.param("cuda", 1, None, marks=pytest.mark.gpu(2), id="cuda-1-all"),
        pytest.param("cuda", 2, None, marks=pytest.mark.gpu(2), id="cuda-2-all"),
    ],
)
def test_several_gpus_train_save_and_trace_sdxl(
    kind: Kind, zero: int, count: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", kind)  # for the planner
    processes, machine = count or torch.cuda.device_count(), check_gpu.Machine(tmp_path, kind)
    batch, name, folder = 2 * processes, f"SDXL on {processes}, ZeRO-{zero}", tmp_path / "run"
    length = {"train__images": STEPS * batch, "train__batch_images": batch, "train__accumulation": 1}
    half = STEPS // 2 * batch if zero == 1 else "null"
    saving = {"checkpoint__every_images": half, "checkpoint__every_minutes": "null"}
    rare = {"samples__every_images": "null", "evaluation__every_images": "null", "logging__log_every_images": batch}
    words = check_gpu.with_text(machine, check_gpu.SDXL, **length, **saving, **rare, optimizer__warmup_images=0)
    words += check_gpu.settings(ds__zero_optimization__stage=zero, ds__pipeline__activation_checkpoint_interval=0)
    config = check_gpu.CONFIGS / "zero2_bf16.json"
    prediction, fits = check_gpu.predicted(name, "tiny_text.yaml", config, words, processes)
    row(kind, prediction.name, prediction.measured)
    if not fits:
        pytest.skip(prediction.measured)
    command = ["-m", "ddpm_ds.cli.main", "train", "--processes", processes, "-p", "1", "--run-dir", folder]
    command += ["--deepspeed_config", config, "--spec", check_gpu.SPECS / "tiny_text.yaml", *words]
    if kind == "cuda" and (free := shutil.disk_usage(tmp_path).free) < DISK_BYTES:
        pytest.skip(f"{tmp_path} has {free / GIB:.0f} GiB, and SDXL's checkpoints take {DISK_BYTES / GIB:.0f}")
    with sampled(folder, kind) as samples:
        profile = ["--profile-kernels", f"{PROFILED}-{PROFILED}"]
        machine.run("train", *map(str, command), *profile, seconds=150 if kind == "cuda" else 3600)

    points = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert len(points) == STEPS
    step = statistics.median(point["usage/step_seconds"] for point in points if point["step"] in REPLAYED)
    reserved = points[-1].get("usage/peak_reserved_bytes", points[-1]["usage/peak_memory_bytes"])
    row(kind, f"{name}, step", f"{batch / step:,.4g} images/s, {1e3 * step:.4g} ms a step, {reserved / GIB:.2f} GiB")
    if zero == 1:
        row(kind, f"{name}, saves", saves(samples, batch, read_pauses(folder).checkpoint_seconds))
    shutil.rmtree(checkpoints_of(folder))
    before = most(one.device_bytes for one in samples if STEPS // 2 < one.step < TRACED[0])
    after = most(one.device_bytes for one in samples if one.step > TRACED[-1])
    row(kind, f"{name}, memory of rank 0 around the trace", f"before it {before}, after it {after}")
    shares = nccl_shares(json.loads(gzip.decompress((folder / "kernels/rank0.trace.json.gz").read_bytes())))
    assert (shares is None) == (kind == "cpu")
    if processes > 1:
        found = "no kernels" if shares is None else f"{shares[0]:.1%} of an eager step, {shares[1]:.1%} nothing else"
        row(kind, f"{name}, NCCL's kernels", found)


def test_the_share_of_kernels_that_run_alone_is_found() -> None:
    def kernel(name: str, begin: float, end: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    events = [
        kernel("gemm", 0, 4),
        kernel("ncclDevKernel_ReduceScatter", 3, 6),
        kernel("ncclDevKernel_AllGather", 5, 7),
    ]
    events += [kernel("adam", 6, 10), {"cat": "cpu_op", "name": "nccl:broadcast", "ts": 0, "dur": 100}]
    assert nccl_shares({"traceEvents": events}) == (0.4, 0.2)
    assert nccl_shares({"traceEvents": events[-1:]}) is None


def test_seconds_and_locked_memory_of_both_saves_are_found() -> None:
    first, second = checkpoint_name(STEPS), checkpoint_name(2 * STEPS)
    seen = [(0, 1, 1, ()), (1, 12, 3, ()), (4, 24, 5, ()), (6, 24, 2, (first,)), (9, 24, 7, (first, second))]
    samples = [Sample(float(at), step, 0, locked * GIB, saved) for at, step, locked, saved in seen]
    assert all(one.seconds < other.seconds for one, other in pairwise(samples))
    assert saves(samples, batch=2, held=0.5) == (
        "first 5.0 s, of which training stood 0.5 s, second 3.0 s; "
        "locked before 1.00 GiB, in the first 5.00 GiB, in the second 7.00 GiB"
    )


if __name__ == "__main__":
    report_cases(lambda blocks: beside_receives(blocks) if blocks else swaps())

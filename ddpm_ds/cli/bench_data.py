"""``ddpm-ds bench-data``: whether the loader keeps up with the U-Net, and with how many workers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpm_ds.command_line import (
    add_overwrite,
    add_spec_options,
    aligned,
    batch,
    check_outputs,
    counted,
    file_path,
    gib,
    limited_seconds,
    number,
    positive,
    whole,
    writing,
)
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec
from ddpm_ds.processes.ranks import set_environment

if TYPE_CHECKING:
    from ddpm_ds.config.spec import RunSpec
    from ddpm_ds.device import Dtype
    from ddpm_ds.experiments.data_rate import Loading, UnetPace

MOST_WAIT = 0.01
"""Maximum share of a step that may be spent waiting for data."""

DESCRIPTION = """\
Prepare the images of a spec, read them as training does with each number of loader processes, and say how many images
arrive per second. Then time forward and backward of the U-Net, and say how many images per second it needs, how many
times faster the loader is, and what share of a step would be spent waiting for data. Nothing is trained. With
--preparation, say instead how long the preparation of the images takes; nothing is written.

The loader is that of one process, which reads the micro-batches of one replica up to the device. The first and the last
stage of each replica have a loader each: on a host with several of them, add up what they need.
"""

EXAMPLES = """\
examples
  ddpm-ds bench-data
      the digits of the main job, on this machine's device
  ddpm-ds bench-data --spec launch/specs/folder.yaml --set data.path=photos --workers 0,4,8 --micro-batch 32
      your own images; the loader may use the cores that taskset or the job allows
  ddpm-ds bench-data --spec launch/specs/cifar10.yaml --needs 9000 --json cifar10.json
      for a U-Net that needs 9,000 images/s on a device of another machine; every number in a file
  ddpm-ds bench-data --spec launch/specs/folder.yaml --set data.path=photos --preparation
      how long decoding and scaling your images takes, extrapolated from a few seconds
  taskset -c 0 ddpm-ds bench-data --spec launch/specs/cifar10.yaml --no-model
      what the loader gives on one core

docs/data.md says what happens to an image between its file and the U-Net.
"""


def workers_list(text: str) -> list[int]:
    """Parse numbers of workers such as ``0,1,2``; return each once, ascending.

    Raises:
        argparse.ArgumentTypeError: one of them is not a number of workers.
    """
    return sorted({whole(part.strip(), 0, 1024, "a number of workers from 0 to 1,024") for part in text.split(",")})


def above_zero(text: str) -> float:
    """Parse a number of images per second, which must be above zero."""
    return number(text, 1e-6, 1e12, "a number above 0, such as 2 or 0.5")


def add_bench_data(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``bench-data``."""
    parser = verbs.add_parser(
        "bench-data",
        help="measure whether the loader keeps up with the U-Net, by number of workers",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add_spec_options(parser, DEFAULT_SPEC)
    parser.add_argument(
        "--workers", type=workers_list, default=[0, 1, 2, 4], metavar="N,...", help="loader processes (0,1,2,4)"
    )
    parser.add_argument(
        "--micro-batch", type=batch, metavar="N", help="images of a micro-batch (default: train.batch_images)"
    )
    parser.add_argument(
        "--seconds",
        type=limited_seconds,
        default=4.0,
        metavar="S",
        help="seconds of reading for each number of workers (default 4)",
    )
    parser.add_argument(
        "--preparation",
        action="store_true",
        help="measure for some seconds how long the preparation of the images takes, and nothing else",
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="rounds of measurement (default 5)")
    need = parser.add_mutually_exclusive_group()
    need.add_argument("--needs", type=above_zero, metavar="X", help="images/s of the U-Net, if known")
    need.add_argument("--no-model", action="store_true", help="time the loader alone")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16", "bf16"),
        help="precision of the U-Net (default: bf16 on CUDA, else fp32)",
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write every number here")
    add_overwrite(parser)
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    check_outputs(options, "json")
    spec = load_spec(options.spec, options.overrides)
    set_environment()
    numbers = _bench_preparation(options, spec) if options.preparation else _bench_loader(options, spec)
    if options.json is not None:
        asked = {"spec": str(options.spec), "overrides": options.overrides}
        with writing(options.json, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(asked | numbers, indent=2)}\n".encode())
        print(f"\n{options.json}: every number")


def _bench_loader(options: argparse.Namespace, spec: RunSpec) -> dict[str, Any]:
    """Measure the loader, print the results and return every number."""
    from ddpm_ds.data.prepare import prepare
    from ddpm_ds.data.residence import Residence
    from ddpm_ds.device import choose_device
    from ddpm_ds.experiments.data_rate import Feed, UnetPace, measure_loading, unet_need  # torch

    device = choose_device(options.device)
    store = prepare(spec.data, progress=True)
    size = options.micro_batch or spec.train.batch_images
    residence, window = Residence.of(store), spec.data.shuffle_images
    memory, cores = f"{gib(residence.memory_bytes)} of memory", counted(residence.cores, "core")
    where = f"in {memory}" if residence.in_memory else f"too large for {memory}"
    order = "full shuffle" if window is None else f"windows of {window:,} images"
    print(f"images   {store.path}: {len(store):,} of {'x'.join(map(str, store.meta.shape))}, {store.meta.dtype}")
    print(f"store    {residence.kind}, {gib(residence.stored_bytes)}, {where}, {order}")
    if (notice := residence.notice(window)) is not None:
        print(notice)
    print(f"loader   micro-batches of {size} for one replica on {device.type}, {cores}", flush=True)
    feed = Feed(store, size, device, window)
    need = None
    if options.needs is not None:
        need = UnetPace(options.needs, "as --needs says")
    elif not options.no_model:
        precision: Dtype = options.precision or ("bf16" if device.type == "cuda" else "fp32")
        need = unet_need(spec, feed, precision, options.seconds / 2)
    if need is not None:
        print(f"U-Net    {_number(need.images_per_second)} images/s: {need.words}", flush=True)
    needs = None if need is None else need.images_per_second
    loadings = measure_loading(feed, options.workers, seconds=options.seconds, rounds=options.rounds, needs=needs)
    remedy = residence.remedy(window)
    print("\n" + "\n".join(table(loadings, residence.decoded_bytes // residence.images, need)) + "\n")
    if need is not None:
        print(conclusion(loadings, need, remedy))
    print(paces(loadings, remedy))
    return {
        "store": str(store.path),
        "images": len(store),
        "shape": store.meta.shape,
        "device": device.type,
        "residence": asdict(residence),
        "shuffle_images": window,
        "micro_batch_images": size,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "needs": None if need is None else asdict(need),
        "workers": [asdict(loading) for loading in loadings],
    }


def _bench_preparation(options: argparse.Namespace, spec: RunSpec) -> dict[str, Any]:
    """Measure preparation, print the results and return every number."""
    from ddpm_ds.experiments.data_rate import measure_preparation

    plan, one_core, cores, all_cores = measure_preparation(spec.data, options.seconds)
    seconds = plan.images / all_cores
    size = f"{plan.images:,} images of {'x'.join(map(str, plan.shape))}"
    print(f"source       {spec.data.source}: {size}, {gib(plan.images * plan.image_bytes)} as {plan.kind}")
    print(f"1 core       {one_core:,.0f} images/s")
    if cores > 1:
        share = f"{all_cores / one_core / cores:.2f} x {cores} x one core"
        print(f"{f'{cores} cores':12} {all_cores:,.0f} images/s, {share}")
    print(f"preparation  {f'{seconds / 60:,.0f} min' if seconds >= 600 else f'{seconds:,.0f} s'}")
    return {
        "plan": asdict(plan),
        "cores": cores,
        "one_core_images_per_second": one_core,
        "all_cores_images_per_second": all_cores,
        "seconds": seconds,
    }


def table(loadings: Sequence[Loading], image_bytes: int, need: UnetPace | None) -> list[str]:
    """Return the lines of a table: a heading, then one for each number of workers."""
    rows = [["workers", "images/s", "(quartiles)", "MB/s"] + ["x needed", "data wait"] * (need is not None)]
    for loading in loadings:
        speed = loading.images_per_second
        row = [
            f"{loading.workers}",
            f"{speed.median:,.0f}",
            f"({speed.low:,.0f} - {speed.high:,.0f})",
            f"{speed.median * image_bytes / 1e6:,.0f}",
        ]
        if need is not None:
            row += [_number(speed.median / need.images_per_second), f"{loading.wait_share:.2%}"]
        rows.append(row)
    return aligned(rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def conclusion(loadings: Sequence[Loading], need: UnetPace, remedy: str) -> str:
    """Return a sentence that says how many workers suffice, or what would help, such as ``remedy``."""
    shares = {loading.workers: loading.wait_share or 0.0 for loading in loadings}
    for loading in loadings:
        if loading.images_per_second.median >= need.images_per_second and shares[loading.workers] < MOST_WAIT:
            waiting = f"less than {MOST_WAIT:.0%} of a step is spent waiting for data"
            return f"data.workers={loading.workers} suffices: {waiting}"
    best = min(shares, key=lambda workers: shares[workers])
    return (
        f"none suffices; with data.workers={best} {shares[best]:.1%} of a step is spent waiting for data: try more "
        f"workers, larger micro-batches, or {remedy}"
    )


def paces(loadings: Sequence[Loading], remedy: str) -> str:
    """Return a sentence with the fewest workers for U-Nets of other speeds, by the lower quartiles of the rates."""
    found: list[tuple[float, int]] = []
    for loading in loadings:
        if not found or loading.images_per_second.low > found[-1][0]:
            found.append((loading.images_per_second.low, loading.workers))
    steps = ", ".join(f"up to {_number(rate)} images/s data.workers={workers}" for rate, workers in found)
    return f"for a U-Net of another speed: {steps}; beyond, {remedy}"

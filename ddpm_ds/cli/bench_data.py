"""``ddpm-ds bench-data``: whether the loader keeps up with the U-Net, and with how many workers."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpm_ds.command_line import (
    add_spec_options,
    aligned,
    batch,
    check_writable,
    file_path,
    limited_seconds,
    number,
    positive,
    whole,
)
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec
from ddpm_ds.processes.ranks import set_environment

if TYPE_CHECKING:
    from ddpm_ds.config.spec import RunSpec
    from ddpm_ds.device import Dtype
    from ddpm_ds.experiments.data_rate import Feed, Loading, UnetPace

MOST_WAIT = 0.01
"""Share of a step that may be spent waiting for data."""

DESCRIPTION = """\
Prepare the images of a spec, read them as training does with each number of loader processes, and say how many images
a second arrive; then time forward and backward of the U-Net, and say how many it needs, how many times faster the
loader is, and which share of a step would be waited for data. Nothing is trained.

The loader is that of one process that reads data, with one replica's micro-batches, up to the device. The first and the
last stage of each replica read apart: on a host with several of them, count them together.
"""

EXAMPLES = """\
examples
  ddpm-ds bench-data
      the digits of the main job, on this machine's device
  ddpm-ds bench-data --spec launch/specs/folder.yaml --set data.path=photos --workers 0,4,8 --micro-batch 32
      your own images; all cores that the loader may use are those of taskset or the job
  ddpm-ds bench-data --spec launch/specs/cifar10.yaml --needs 9000 --json cifar10.json
      for a U-Net that takes 9,000 images/s on a device that is not here; every number in a file
  taskset -c 0 ddpm-ds bench-data --spec launch/specs/cifar10.yaml --no-model
      what the loader gives on one core

docs/data.md says what happens to an image between its file and the U-Net.
"""


def workers_list(text: str) -> list[int]:
    """Parse numbers of workers such as ``0,1,2``, each once, ascending.

    Raises:
        argparse.ArgumentTypeError: one of them is not a number of workers.
    """
    return sorted({whole(part.strip(), 0, 1024, "a number of workers from 0 to 1,024") for part in text.split(",")})


def above_zero(text: str) -> float:
    """Parse a number of images a second."""
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
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="rounds of measurement (default 5)")
    need = parser.add_mutually_exclusive_group()
    need.add_argument("--needs", type=above_zero, metavar="X", help="images/s of the U-Net, where it is known")
    need.add_argument("--no-model", action="store_true", help="time the loader alone")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16", "bf16"),
        help="precision of the U-Net (default: bf16 on CUDA, else fp32)",
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write every number here")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_writable("--json", options.json)
    spec = load_spec(options.spec, options.overrides)
    set_environment()
    from tqdm import tqdm

    from ddpm_ds.data.prepare import prepare
    from ddpm_ds.device import choose_device
    from ddpm_ds.experiments.data_rate import Feed, measure_loading  # torch, now that everything cheap is checked

    device = choose_device(options.device)
    store = prepare(spec.data, progress=True)
    size = options.micro_batch or spec.train.batch_images
    print(
        f"images   {store.path}: {len(store):,} of {'x'.join(map(str, store.meta.shape))}, {store.meta.dtype}\n"
        f"loader   micro-batches of {size} for one replica on {device.type}, {_cores()} cores",
        flush=True,
    )
    feed = Feed(store, size, device)
    with tqdm(desc="measuring", disable=None, leave=False, bar_format="{desc}: {postfix} {elapsed}") as bar:
        need = _need(options, spec, feed, bar.set_postfix_str)
        if need is not None:
            bar.write(f"U-Net    {_number(need.images_per_second)} images/s: {need.words}")
        loadings = measure_loading(
            feed,
            options.workers,
            seconds=options.seconds,
            rounds=options.rounds,
            needs=None if need is None else need.images_per_second,
            advance=bar.set_postfix_str,
        )
    print("\n" + "\n".join(table(loadings, store.images[0].nbytes, need)))
    if need is not None:
        print(f"\n{conclusion(loadings, need)}")
    if options.json is not None:
        numbers = {
            "spec": str(options.spec),
            "overrides": options.overrides,
            "store": str(store.path),
            "images": len(store),
            "shape": store.meta.shape,
            "device": device.type,
            "cores": _cores(),
            "micro_batch_images": size,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "needs": None if need is None else asdict(need),
            "workers": [asdict(loading) for loading in loadings],
        }
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
        print(f"\n{options.json}: every number")


def _need(options: argparse.Namespace, spec: RunSpec, feed: Feed, advance: Callable[[str], None]) -> UnetPace | None:
    from ddpm_ds.experiments.data_rate import UnetPace, unet_need

    if options.no_model:
        return None
    if options.needs is not None:
        return UnetPace(options.needs, "as --needs says")
    precision: Dtype = options.precision or ("bf16" if feed.device.type == "cuda" else "fp32")
    return unet_need(spec, feed, precision, options.seconds / 2, advance)


def table(loadings: Sequence[Loading], image_bytes: int, need: UnetPace | None) -> list[str]:
    """Return a line for each number of workers, below a heading."""
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


def conclusion(loadings: Sequence[Loading], need: UnetPace) -> str:
    """Return which number of workers suffices, or what else would help."""
    shares = {loading.workers: loading.wait_share or 0.0 for loading in loadings}
    for loading in loadings:
        if loading.images_per_second.median >= need.images_per_second and shares[loading.workers] < MOST_WAIT:
            return f"data.workers={loading.workers} suffices: less than {MOST_WAIT:.0%} of a step is waited for data"
    best = min(shares, key=lambda workers: shares[workers])
    return (
        f"none suffices; with data.workers={best} {shares[best]:.1%} of a step is waited for data: try more workers, "
        "larger micro-batches, or data.store_root on a faster disk"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

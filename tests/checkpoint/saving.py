"""Small checkpoints for tests: values that follow from (kind, name, images), cut into fragments anywhere."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore, Store, TCPStore

from ddpm_ds.checkpoint.folder import checkpoint_name, newest
from ddpm_ds.checkpoint.manifest import Description, State
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.writer import Fragment, Writer
from ddpm_ds.pipeline.messages import broadcast_object

KINDS = ("ema", "exp_avg", "exp_avg_sq", "master")
Shapes = Mapping[str, tuple[int, ...]]
SHAPES: Shapes = {"0.conv.weight": (4, 3, 3), "0.conv.bias": (4,), "1.scale": (), "2.weight": (8, 5)}


def describe(images: int, shapes: Shapes = SHAPES) -> Description:
    return Description(
        images=images,
        step=images // 10,
        spec={"name": "test", "train": {"images": 1000, "learning_rate": 1e-4}},
        ds_config={"fp16": {"enabled": True}},
        layout={"stages": 2, "replicas": 1},
        data_sha256={"images.npy": "0" * 64},
        parameters=dict(shapes),
    )


def scalars(images: int) -> dict[str, Any]:
    counters = dict.fromkeys(("skipped_images", "skipped_steps", "rollbacks"), 0)
    seen = {"images_seen": images, "steps": images // 10, "optimizer_steps": images // 10}
    return {**seen, **counters, "learning_rate": 1e-4, "lr_scheduler": None, "loss_scaler": {}}


def values_of(kind: str, name: str, images: int, elements: int) -> Tensor:
    """Values that a checkpoint must hold: every element of every tensor has another one at every moment."""
    generator = torch.Generator().manual_seed(hash((KINDS.index(kind), len(name), ord(name[0]), images)) % 2**31)
    return torch.randn(elements, generator=generator)


def fragments_of(images: int, start: int, stop: int, shapes: Shapes = SHAPES) -> list[Fragment]:
    """Fragments of the rank that owns elements ``start`` to ``stop`` of all parameters laid end to end, as in ZeRO."""
    found, at = [], 0
    for name, shape in shapes.items():
        elements = math.prod(shape)
        low, high = max(start - at, 0), min(stop - at, elements)
        if low < high:
            found += [
                Fragment(kind, name, low, values_of(kind, name, images, elements)[low:high].clone()) for kind in KINDS
            ]
        at += elements
    return found


def total(shapes: Shapes = SHAPES) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def ranks(folder: Path, count: int, log: Callable[[str], None], **options: Any) -> list[Writer]:
    store = HashStore()
    return [Writer(folder, rank, count, log=log, store=store, **options) for rank in range(count)]


def store_of(rank: int, world_size: int) -> Store:
    """A store that rank 0 serves; collective."""
    patience = timedelta(seconds=60)
    if world_size == 1:
        return HashStore()
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience) if rank == 0 else None
    port = broadcast_object(served and served.port, int)
    return served or TCPStore("127.0.0.1", port, timeout=patience)


def save(folder: Path, images: int, cuts: Sequence[int] = (50,), shapes: Shapes = SHAPES, **options: Any) -> list[str]:
    """Write a checkpoint by ``len(cuts) + 1`` ranks in this process; returns the logged lines."""
    said: list[str] = []
    bounds = (0, *sorted(cuts), total(shapes))
    writers = ranks(folder, len(bounds) - 1, said.append, **options)
    for rank, (writer, (start, stop)) in enumerate(zip(writers, itertools.pairwise(bounds), strict=True)):
        writer.begin(
            f"rank{rank}", fragments_of(images, start, stop, shapes), describe(images, shapes), scalars(images)
        )
    for writer in writers:
        writer.wait()
    return said


def check(path: Path, images: int, shapes: Shapes = SHAPES) -> None:
    """Every value of the checkpoint is what was written; raises CheckpointError where the reader does."""
    reader = Reader(path)
    assert reader.state == State.model_validate(scalars(images))
    assert (reader.manifest.images, reader.manifest.kinds) == (images, KINDS)
    assert path.name == checkpoint_name(images)
    for kind in KINDS:
        for name, shape in shapes.items():
            assert reader.read(kind, name).equal(values_of(kind, name, images, math.prod(shape)))


def newest_good(folder: Path, log: Callable[[str], None]) -> Path | None:
    found = newest(folder, log)
    return found.path if found else None

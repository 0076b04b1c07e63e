"""How long a checkpoint holds training up and takes to be written: ``python -m tests.checkpoint.measure FOLDER``."""

import sys
import tempfile
import time
from pathlib import Path

import torch

from ddpm_ds.checkpoint.manifest import read_manifest, verify
from ddpm_ds.checkpoint.writer import Fragment, Writer
from tests.checkpoint.saving import KINDS, describe, scalars

TENSORS, ELEMENTS = 328, 95_274
"""As many tensors as DDPM's U-Net for CIFAR-10 has; of four kinds 500 MB."""


def main(folder: Path) -> None:
    shapes = {f"{tensor}.weight": (ELEMENTS,) for tensor in range(TENSORS)}
    fragments = [Fragment(kind, name, 0, torch.randn(ELEMENTS)) for kind in KINDS for name in shapes]
    print(f"{len(fragments)} fragments, {torch.get_num_threads()} threads")
    writer = Writer(folder, log=print, keep_last=2)
    for images in range(1, 7):
        started = time.monotonic()
        blocked = writer.begin("stage0-replica0", fragments, describe(images, shapes), scalars(images))
        assert writer.wait()
        print(f"blocked {blocked:.3f} s, on the disk after {time.monotonic() - started:.2f} s")
    started, newest = time.monotonic(), folder / "images-000000006"
    verify(newest, read_manifest(newest), progress=False)
    print(f"verified in {time.monotonic() - started:.2f} s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        main(Path(folder))

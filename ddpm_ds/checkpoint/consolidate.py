"""One file of whole tensors from a checkpoint's fragments, a tensor at a time."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from ddpm_ds.checkpoint.folder import sync
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.safetensors_header import header
from ddpm_ds.errors import CheckpointError, OutputError

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: dict[Dtype, tuple[str, torch.dtype]] = {
    "fp32": ("F32", torch.float32),
    "fp16": ("F16", torch.float16),
    "bf16": ("BF16", torch.bfloat16),
}


def consolidate(path: Path, out: Path, kind: str = "ema", dtype: Dtype = "fp32", *, progress: bool = False) -> None:
    """Write ``kind`` of every parameter of the checkpoint at ``path`` into the safetensors file ``out``.

    Tensors have their global names and whole shapes, in the order of the layers. Host memory is one tensor; ``out``
    appears when it is complete. ``progress`` shows bars on stderr.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks ``kind``, or holds values beyond ``dtype``.
        OutputError: ``out`` exists or can't be written.
    """
    reader = Reader(path)
    parameters = reader.manifest.parameters
    if out.exists():
        raise OutputError(f"{out} exists; name a new file, or remove it first")
    if kind not in reader.kinds:
        raise CheckpointError(f"checkpoint {path} has no {kind} weights, only {', '.join(reader.kinds)}; choose others")
    reader.verify(progress)
    code, torch_dtype = DTYPES[dtype]
    metadata = {"format": "pt", "kind": kind, "images": str(reader.manifest.images)}
    tensors = [(name, code, shape, math.prod(shape)) for name, shape in parameters.items()]
    temporary = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        with temporary.open("wb") as file, tqdm(parameters, desc=f"writing {out.name}", disable=not progress) as bar:
            file.write(header(tensors, metadata))
            for name in bar:
                values = reader.read(kind, name)
                converted = values.to(torch_dtype)
                if not converted.isfinite().equal(values.isfinite()):
                    raise CheckpointError(f"{kind} of {name} has values beyond {dtype}; use --dtype bf16 or fp32")
                file.write(converted.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
        sync(out.absolute().parent)
    except OSError as error:
        raise OutputError(f"{out} can't be written ({error.strerror}); name a file that can") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

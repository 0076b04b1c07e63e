"""One file of whole weights: what the fragments hold, in every dtype, in little memory, or not at all."""

import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddpm_ds.checkpoint.reader import Reader, consolidate
from ddpm_ds.checkpoint.writer import Fragment, Writer
from ddpm_ds.ground.device import DTYPES
from ddpm_ds.ground.errors import CheckpointError, OutputError
from ddpm_ds.ground.units import Precision
from tests.checkpoint.saving import SHAPES, describe, save, scalars, values_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "checkpoints", 1, cuts=(10, 38, 60))
    return tmp_path / "checkpoints" / "images-000000001"


@pytest.mark.parametrize(("kind", "dtype"), [("ema", "fp32"), ("master", "fp16"), ("ema", "bf16")])
def test_file_holds_the_whole_tensors(checkpoint: Path, tmp_path: Path, kind: str, dtype: Precision) -> None:
    consolidate(checkpoint, tmp_path / "weights.safetensors", kind, dtype)
    found = load_file(tmp_path / "weights.safetensors")
    assert set(found) == set(SHAPES)
    for name, shape in SHAPES.items():
        expected = values_of(kind, name, 1, math.prod(shape)).view(shape).to(DTYPES[dtype][1])
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
        assert found[name].equal(expected)


def test_one_tensor_is_in_memory_at_a_time(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, made = Reader.read, list[weakref.ref[np.ndarray]]()

    def watched(self: Reader, kind: str, name: str) -> torch.Tensor:
        assert sum(one() is not None for one in made) <= 1, "the one before is still being written"
        made.append(weakref.ref(values := read(self, kind, name).numpy().copy()))
        return torch.from_numpy(values)

    monkeypatch.setattr(Reader, "read", watched)
    consolidate(checkpoint, tmp_path / "weights.safetensors")
    assert len(made) == len(SHAPES)


def test_damaged_checkpoint_leaves_no_file(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "rank2.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank2\.safetensors has another checksum"):
        consolidate(checkpoint, tmp_path / "weights.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_values_beyond_fp16_are_refused_by_name(tmp_path: Path) -> None:
    writer = Writer(tmp_path, log=print)
    writer.begin(
        "all", [Fragment("ema", "3.weight", 0, torch.tensor([1.0, 1e5]))], describe(1, {"3.weight": (2,)}), scalars(1)
    )
    writer.wait()
    with pytest.raises(CheckpointError, match=r"ema of 3\.weight has values beyond fp16; use --dtype bf16 or fp32"):
        consolidate(tmp_path / "images-000000001", tmp_path / "weights.safetensors", dtype="fp16")
    assert not list(tmp_path.glob("*weights*"))
    consolidate(tmp_path / "images-000000001", tmp_path / "weights.safetensors", dtype="bf16")


def test_impossible_output_is_refused_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("keep me")
    for out in (tmp_path / "missing" / "weights", tmp_path / "there" / "weights"):
        with pytest.raises(OutputError, match="can't be written"):
            consolidate(checkpoint, out)
    assert (tmp_path / "there").read_text() == "keep me"

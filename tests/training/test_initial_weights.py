"""A run that begins with given weights: on any layout the weights and their average are those of the file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddpm_ds.checkpoint.reader import consolidate
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.training.resume import InitialWeights
from tests.training.ranks import BATCH, Ranks, checkpoints, end_of

FAULTY = Path(__file__).with_name("faulty_train.py")


@pytest.mark.launch
def test_a_run_on_two_stages_begins_with_the_weights_of_a_run_on_one(tmp_path: Path) -> None:
    with Ranks(tmp_path / "first", f"train.images={20 * BATCH}", config="zero0_fp32.json", count=1) as ranks:
        assert ranks.codes() == [0], ranks.said[-4000:]
    first = end_of(tmp_path / "first")
    weights = tmp_path / "weights.safetensors"
    consolidate(tmp_path / "first" / "checkpoints" / checkpoints(tmp_path / "first")[-1], weights)
    changes = (f"train.initial_weights={weights}", f"train.images={BATCH}", "optimizer.learning_rate=1e-30")
    run: dict[str, Any] = {"config": "zero2_fp16.json", "options": ["-p", "2"], "script": FAULTY, "FAULT": "drawing"}
    with Ranks(tmp_path / "second", *changes, count=2, **run) as ranks:  # nothing is drawn for weights that are given
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    second = end_of(tmp_path / "second")
    assert second.manifest.images == BATCH
    for name in first.manifest.parameters:
        expected = first.read("ema", name)
        for kind in ("master", "ema"):
            assert torch.equal(second.read(kind, name), expected), (kind, name)
    with Ranks(tmp_path / "second", *changes, f"train.images={2 * BATCH}", count=2, **run) as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    assert end_of(tmp_path / "second").manifest.images == 2 * BATCH


def test_weights_of_another_u_net_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"no")
    with pytest.raises(SpecError, match=r"train\.initial_weights = .* can't be read \(it is no safetensors file\)"):
        InitialWeights(path, {"0.weight": (2,)})
    save_file({"0.weight": torch.zeros(3)}, path)
    with pytest.raises(SpecError, match=r"another U-Net than the section unet: 0\.weight is \(3,\), not \(2,\)"):
        InitialWeights(path, {"0.weight": (2,)})
    with pytest.raises(SpecError, match=r"it also has 0\.weight"):
        InitialWeights(path, {})


def test_processes_of_a_host_check_each_value_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight that read 10 GB each would be 80 GB for a host, from a network perhaps."""
    path, values = tmp_path / "weights.safetensors", {f"{layer}.weight": torch.ones(3) for layer in range(8)}
    values["5.weight"][1] = float("inf")
    save_file(values, path)
    shapes, read, seen = dict.fromkeys(values, (3,)), InitialWeights.read, list[str]()

    def counted(self: InitialWeights, name: str, first: int = 0, length: int | None = None) -> torch.Tensor:
        seen.append(name)
        return read(self, name, first, length)

    monkeypatch.setattr(InitialWeights, "read", counted)
    for rank in range(2):
        InitialWeights(path, shapes, part=slice(rank, None, 3))
    with pytest.raises(SpecError, match=r"5\.weight has values that are not finite in float32"):
        InitialWeights(path, shapes, part=slice(2, None, 3))
    assert sorted(seen) == sorted(values)

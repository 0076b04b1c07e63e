"""A run that learns crops: the same crop wherever an image is drawn, and the centre wherever it is only looked at."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import DatasetCache, Subset
from ddpm_ds.data.held_out import split
from ddpm_ds.data.loader import Share, micro_batches
from ddpm_ds.data.prepare import Recipes, prepare
from ddpm_ds.training.held_out_loss import HeldOutLoss
from ddpm_ds.training.objective import Denoising
from tests.launching import tiny_spec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A tiny run that learns 8x8 crops of digits made 11x11."""
    data = {"crop_from": 11, "horizontal_flips": False, "store_root": str(tmp_path_factory.mktemp("stores"))}
    return tiny_spec(data=data)


@pytest.fixture(scope="module")
def store(spec: RunSpec) -> DatasetCache:
    return prepare(spec.data)


def noised(spec: RunSpec, store: DatasetCache, replicas: int, micro: int) -> list[Tensor]:
    """x_t, t, labels, x0, eps of the first 48 images as all replicas prepare them, in the order of training."""
    parts = []
    for replica in range(replicas):
        batches = micro_batches(Subset.of(store), Share(micro, replicas, replica), seed=3)
        stage = Denoising(spec, CPU)
        for batch in islice(batches, 48 // micro // replicas):
            prepared = stage.prepare(batch)
            parts.append((batch.index, *stage.inputs(prepared), prepared.x0, prepared.eps))
    index, *found = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return [tensor[index.argsort()] for tensor in found]


def test_every_stage_and_every_layout_cuts_an_image_alike(spec: RunSpec, store: DatasetCache) -> None:
    """First and last stage prepare a micro-batch each; so does every replica, whatever the size of micro-batches."""
    assert Recipes(spec.data).of().path.name == "digits-11px-1ch" and store.images.shape == (1797, 1, 11, 11)
    whole = noised(spec, store, replicas=1, micro=48)
    assert whole[3].shape == (48, 1, 8, 8)
    for replicas, micro in ((1, 48), (1, 4), (2, 8), (3, 16), (4, 3)):
        assert all(map(torch.equal, noised(spec, store, replicas, micro), whole))


def test_held_out_loss_is_of_centres(spec: RunSpec, store: DatasetCache) -> None:
    _, positions = split(len(store), 20)
    held_out = HeldOutLoss(spec, CPU, store, positions, images=16)
    x_t, *_ = held_out.inputs(0)
    prepared, _ = held_out._noised[0]
    x0, eps = prepared.x0, prepared.eps
    expected = torch.from_numpy(store.images[positions[:16]][:, :, 1:9, 1:9]) / 127.5 - 1.0
    assert torch.equal(x0, expected)
    for tensor in (x_t, x0, eps):
        assert tensor.is_contiguous(memory_format=torch.channels_last)

"""Images and noise of training: by the images' numbers alone, whatever the micro-batches, replicas and rows."""

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data import cache
from ddpm_ds.data.cache import Subset
from ddpm_ds.data.loader import MicroBatch, Share
from ddpm_ds.data.prepare import prepare
from ddpm_ds.training.objective import Denoising, fields_read, replica_batches, rows_read
from ddpm_ds.unet.shards import rows_by_rank
from ddpm_ds.unet.space import Band, SpaceGroup
from tests.evaluate.conditioned import CONDITION, arrays, field_spec
from tests.launching import tiny_spec

CPU = torch.device("cpu")


def read(spec: RunSpec, share: Share, count: int, fields: frozenset[str] = frozenset({"images"})) -> list[MicroBatch]:
    """The first micro-batches of a replica."""
    images = Subset.of(prepare(spec.data))
    return [*itertools.islice(replica_batches(spec, images, share, CPU, fields=fields), count)]


def test_images_exchange_the_same_noises_in_every_layout() -> None:
    spec = tiny_spec(diffusion={"noise_pairs": 4, "noise_offset": 0.1})
    (whole,) = read(spec, Share(16), 1)
    assert (
        whole.pairs is not None
        and whole.index.tolist() == [*range(16)]
        and sorted(whole.pairs.tolist()) == [*range(16)]
    )
    parts = [batch for replica in (0, 1) for batch in read(spec, Share(4, 2, replica), 2)]
    found: dict[int, int] = {}
    for batch in parts:
        assert batch.pairs is not None
        found.update(zip(batch.index.tolist(), batch.index[batch.pairs].tolist(), strict=True))
    assert found == dict(enumerate(whole.pairs.tolist())) != {number: number for number in range(16)}

    objective = Denoising(spec, CPU)
    one, other = objective.prepare(whole), objective.prepare(whole._replace(pairs=None))
    assert torch.equal(one.eps, other.eps[whole.pairs]) and torch.equal(one.x0, other.x0)
    assert torch.equal(one.t, other.t) and one.labels is not None and other.labels is not None
    assert torch.equal(one.labels, other.labels)
    alike = [F.cosine_similarity(each.x0.flatten(1), each.eps.flatten(1)).mean() for each in (one, other)]
    assert alike[0] > alike[1]
    assert read(spec, Share(4), 1, frozenset())[0].pairs is None, "a rank that reads only text"
    assert read(tiny_spec(), Share(4), 1)[0].pairs is None


class Counting:
    """Memory-mapped array that lists the size of each part that is taken of an image, by its address."""

    def __init__(self, array: Any, taken: dict[int, int]) -> None:
        self._array, self._taken = array, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def __getitem__(self, which: Any) -> Any:
        part = self._array[which]
        if not isinstance(which, tuple):
            return Counting(part, self._taken)
        self._taken[part.ctypes.data] = part.nbytes
        return part


@pytest.mark.parametrize(("coarse", "multires"), [((4, 6), 0.5), ((8, 12), 0.0)])
def test_ranks_that_share_images_read_their_rows_and_train_on_the_same_bits(
    coarse: tuple[int, int], multires: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields with gaps, mirrored, two of whose channels change their sign, offset noise, constants and a grid."""
    given = arrays()
    given["t2m"][:, 2:5, ::5] = np.nan
    given["coarse"] = np.random.default_rng(4).normal(1e4, 300.0, (len(given["coarse"]), *coarse)).astype(np.float32)
    np.savez(tmp_path / "fields.npz", **given)
    data = {"mask": "nan", "horizontal_flips": True, "flips_negate": ["u"]}
    spec = field_spec(tmp_path, CONDITION, data=data, diffusion={"noise_offset": 0.1, "multires_noise": multires})
    store, share = prepare(spec.data), Share(4)
    fields = fields_read(spec, first=True, last=True, text=False)

    def prepared(images: Subset, band: Band | None) -> tuple[Denoising, Any]:
        objective = Denoising(spec, CPU, store.meta.statistics, store.constants)
        objective.band = band
        return objective, objective.prepare(next(replica_batches(spec, images, share, CPU, fields=fields)))

    whole, expected = prepared(Subset.of(store), None)
    x_t, *others = whole.inputs(expected)
    for rank in range(3):
        band = Band(SpaceGroup(rank, 3), rows_by_rank(8, 3))
        assert rows_read(spec, store, band) is band
        objective, found = prepared(Subset.of(store.rows(band.first, band.stop)), band)
        assert found.x0.shape == found.eps.shape == (4, 2, band.stop - band.first, 12)
        own, *same = objective.inputs(found)
        # noise drawn by rows: a magnitude up to 6.8 times an angle up to 2 pi, each rounded by a unit of the last place
        close = partial(
            torch.testing.assert_close, rtol=0.0, atol=0.0 if multires else 2 * 6.8 * 2 * math.pi * 2.0**-23
        )
        close(own, band.cut(x_t))
        assert all(map(torch.equal, same, others))
        prediction = torch.randn(4, 2, *own.shape[2:])
        found_loss, wanted_loss = objective.loss(prediction, found, band), whole.loss(prediction, expected, band)
        torch.testing.assert_close(found_loss, wanted_loss, rtol=0.0 if multires else 1e-5, atol=0.0)

    rows = {name: stored.shape[2] for name, stored in store.rows(2, 5).fields.items() if name != "vector"}
    assert rows == {"images": 3, "mask": 8, "condition": 3 if coarse[0] == 8 else 4}
    taken, map_array = dict[int, int](), cache.map_array
    monkeypatch.setattr(cache, "map_array", lambda path: Counting(map_array(path), taken))
    reads = cache.StoredImages(store.path, store.meta).rows(2, 5)
    assert np.array_equal(reads.read(np.array([3, 1])), store.images[:][[3, 1], :, 2:5])
    assert sum(taken.values()) == 2 * 2 * 3 * 12 * 4 == 2 * reads.image_bytes  # images, channels, rows, pixels, bytes


def test_whole_images_are_read_where_other_rows_are_needed(tmp_path: Path) -> None:
    band = Band(SpaceGroup(0, 2), (4, 4))
    store = prepare(tiny_spec().data)
    assert rows_read(tiny_spec(), store, None) is None and rows_read(tiny_spec(), store, band) is band
    small: dict[str, Any] = {"data": {"image_size": 4, "crop_from": 8}, "unet": {"attention_resolutions": []}}
    reduced = {"data": {"condition": {"kind": "reduced", "factor": 2}}}
    noises = ({"diffusion": {key: value}} for key, value in (("input_perturbation", 0.1), ("noise_pairs", 4)))
    for sections in (small, reduced, *noises):
        assert rows_read(tiny_spec(**sections), store, band) is None
    np.savez(tmp_path / "fields.npz", **{**arrays(), "coarse": arrays()["t2m"][:, ::2]})  # as large as a band of 4 rows
    fields, store = field_spec(tmp_path), prepare(field_spec(tmp_path).data)
    assert rows_read(fields, store, band) is None is not rows_read(fields, store, Band(band.group, (2, 6)))

"""Noises that images exchange: by the images' numbers alone, whatever the micro-batches and replicas."""

import itertools

import torch
import torch.nn.functional as F

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import Subset
from ddpm_ds.data.loader import MicroBatch, Share
from ddpm_ds.data.prepare import prepare
from ddpm_ds.training.objective import Denoising, replica_batches
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

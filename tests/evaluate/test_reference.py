"""What drawn images are compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpm_ds.data.prepare import prepare
from ddpm_ds.errors import DataError
from ddpm_ds.evaluate.scores import open_reference
from tests.evaluate.planted import plant, trained_of
from tests.launching import tiny_spec


def test_of_a_run_that_learned_crops_the_centres_are_the_reference(tmp_path: Path) -> None:
    section = {"crop_from": 11, "store_root": str(tmp_path / "stores")}
    spec = tiny_spec(data=section)
    store = prepare(spec.data)
    checkpoint = plant(tmp_path / "run", data_sha256=store.meta.sha256, data=section)
    trained = replace(trained_of(spec), origin=str(checkpoint))
    for given in (None, store.path):
        reference = open_reference(trained, given, progress=False)
        assert reference.meta.shape == (1, 8, 8) and (reference.images == store.images[:, :, 1:9, 1:9]).all()
        assert reference.key != store.key  # statistics of whole images are not taken for those of crops
    with pytest.raises(DataError, match=r"has images of 1x11x11, .* draws 1x8x8"):
        open_reference(replace(trained, spec=None), store.path, progress=False)

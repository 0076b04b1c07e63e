"""Residuals are fields minus what a regression predicts of them, in a cache of their own beside that of the fields."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.fields import fields_of
from ddpm_ds.data.prepare import How, Recipes, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError

COUNT = 11
SpecOf = Callable[..., DataSpec]
CONDITION: dict[str, Any] = {"kind": "stored", "channels": 2, "normalise": "statistics", "vector": ["hour"]}
CONDITION |= {"vector_size": 1, "constants": ["height"], "constant_channels": 1}


@dataclass
class Halving:
    """A regression that predicts half of the first channel of the condition, enlarged, and so many more kelvin."""

    digest: str = "a"
    more: float = 100.0
    seen: list[int] = field(default_factory=list)

    def predict(self, fields: DatasetCache, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        self.seen += positions.tolist()
        coarse = fields.fields["condition"].read(positions)[:, :1]
        return coarse.repeat(2, axis=2).repeat(2, axis=3).astype(np.float32) / 2.0 + np.float32(self.more)


@pytest.fixture
def spec_of(tmp_path: Path) -> SpecOf:
    """Specs of residuals of eleven fields of 4x6 pixels, with a condition of 2x3, a constant and a vector."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "images": 280.0 + generator.standard_normal((COUNT, 1, 4, 6)),
        "condition": generator.standard_normal((COUNT, 2, 2, 3)),
        "height": generator.random((4, 6)),
        "hour": np.arange(float(COUNT)),
    }
    np.savez(tmp_path / "fields.npz", **arrays)

    def make(**changes: Any) -> DataSpec:
        given = {"source": "arrays", "path": tmp_path / "fields.npz", "image_size": (4, 6), "channels": 1}
        given |= {"values": "float32", "normalise": "statistics", "condition": CONDITION}
        return DataSpec.model_validate(
            given | {"residual_of": tmp_path / "run", "store_root": tmp_path / "data"} | changes
        )

    return make


def test_the_cache_has_fields_minus_predictions_with_their_statistics_and_all_else_as_it_was(
    spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpm_ds.data.fields.PREDICTED_BYTES", 4 * 24 * 4)  # four fields
    monkeypatch.setattr("ddpm_ds.data.writing.SHARD_BYTES", 7 * (24 + 12 + 1) * 4)
    spec, regression = spec_of(), Halving()
    store, fields = prepare(spec, How(regression=regression)), prepare(fields_of(spec))
    every = np.arange(COUNT)
    expected = fields.images.read(every) - Halving().predict(fields, every)
    found = store.images.read(every)
    assert found.dtype == np.float32 and np.array_equal(found, expected) and abs(found.mean() - 180.0) < 1.0
    assert store.meta.shards == (7, 4) and regression.seen == [*range(COUNT)]
    statistics = store.meta.statistics["images"]
    assert statistics.mean[0] == pytest.approx(expected.mean(dtype=np.float64), rel=1e-9)
    assert statistics.std[0] == pytest.approx(expected.std(dtype=np.float64), rel=1e-9)
    for numbers in zip(*(vars(each.meta.statistics["condition"]).values() for each in (store, fields)), strict=True):
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-9)
    for name in ("condition", "vector"):
        assert np.array_equal(store.fields[name].read(every), fields.fields[name].read(every))
    assert store.constants is not None and fields.constants is not None
    assert np.array_equal(store.constants, fields.constants)
    assert store.path.name.startswith(f"{fields.path.name}-residual-")
    assert prepare(spec, How(verify=True)).meta == store.meta, (
        "it is opened without the regression, and its checksums hold"
    )


def test_masked_values_stay_out_of_the_statistics(spec_of: SpecOf, tmp_path: Path) -> None:
    path = tmp_path / "fields.npz"
    arrays = dict(np.load(path))
    arrays["images"][:, :, 0] = np.nan
    np.savez(path, **arrays)
    spec = spec_of(mask="nan")
    store, fields = prepare(spec, How(regression=Halving())), prepare(fields_of(spec))
    every = np.arange(COUNT)
    kept = (arrays["images"].astype(np.float32) - Halving().predict(fields, every))[:, :, 1:]
    assert store.meta.statistics["images"].std[0] == pytest.approx(kept.std(dtype=np.float64), rel=1e-9)
    assert np.array_equal(store.fields["mask"].read(every), fields.fields["mask"].read(every))
    assert np.isfinite(store.images.read(every)).all()


def test_residuals_of_other_weights_or_fields_are_not_taken_for_these(spec_of: SpecOf, tmp_path: Path) -> None:
    spec = spec_of()
    with pytest.raises(DataError, match=r"make them once with: ddpm-ds prepare --residual \S+run$"):
        prepare(spec)
    prepare(spec, How(regression=Halving()))
    with pytest.raises(DataError, match="has residuals of other weights than there are now; delete it"):
        prepare(spec, How(regression=Halving("b")))
    shutil.rmtree(prepare(fields_of(spec)).path)
    arrays = dict(np.load(tmp_path / "fields.npz"))
    np.savez(tmp_path / "fields.npz", **{**arrays, "images": arrays["images"] + 1.0})
    with pytest.raises(DataError, match=r"data.path = \S+ has other images than \S+-residual-"):
        prepare(spec, How(regression=Halving()))
    prepare(fields_of(spec))
    (tmp_path / "fields.npz").unlink()
    with pytest.raises(DataError, match="has residuals of other fields than there are now"):
        prepare(spec, How(regression=Halving()))


@pytest.mark.parametrize(
    "more, values, message",
    [(np.nan, "float32", "predicts nan in image 0, channel 0"), (1e5, "float16", "exceeds float16; train the")],
)
def test_residuals_that_are_no_numbers_are_refused_and_leave_nothing(
    spec_of: SpecOf, more: float, values: str, message: str
) -> None:
    spec = spec_of(values=values)
    with pytest.raises(DataError, match=message):
        prepare(spec, How(regression=Halving(more=more)))
    assert not Recipes(spec).of().path.exists() and not list(spec.store_root.glob(".*residual*.preparing"))

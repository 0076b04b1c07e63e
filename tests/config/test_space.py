"""Space groups in the DeepSpeed JSON: what they are resolved to, what is refused, and advice that works when typed."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.cli.plan import describe_plan
from ddpm_ds.config.ds_config import ResolvedDsConfig, leaves_stages_open, read_ds_config
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec
from ddpm_ds.ground.errors import UserError
from ddpm_ds.planning.run_plan import RunDraft
from ddpm_ds.schema.layout import SpaceSplit
from ddpm_ds.unet.shards import busiest_share, layers_of_rank, rows_by_rank, whole_layers
from tests.ds_json import config_of, laid_out
from tests.launching import drafted, write_json


def json_of(space: Any, pipeline: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A JSON in fp32 with a value of ``pipeline.space``."""
    config = read_ds_config("zero1_fp32.json") | changes
    return config | {"pipeline": {**config.get("pipeline", {}), **pipeline, "space": space}}


def with_space(space: Any, world_size: int = 4, stages: int | None = 1) -> ResolvedDsConfig:
    return laid_out(json_of(space, {}), load_spec(DEFAULT_SPEC), world_size=world_size, stages=stages, path="x.json")


@pytest.mark.parametrize(
    ("space", "split"),
    [
        ({"size": 2}, SpaceSplit(2)),
        ({"size": 2, "levels": [0]}, SpaceSplit(2, (0,))),
        ({"size": 4}, SpaceSplit(4)),
        ({"size": 1}, SpaceSplit()),
        ({}, SpaceSplit()),
    ],
)
def test_a_space_group_is_replicas_that_share_images(space: Any, split: SpaceSplit) -> None:
    found = with_space(space)
    layout = found.layout
    assert (layout.space, layout.replicas, layout.data_ranks) == (split, 4 // split.size, 4)
    assert layout.batch_images == layout.replicas * layout.micro_batches * layout.micro_batch_images
    assert f"1 stage x {split.size} space ranks x" in layout.words() or split.size == 1
    assert layout.sizes["space_size"] == split.size
    theirs = found.for_deepspeed()
    assert theirs["train_batch_size"] == split.size * layout.batch_images and "space" not in theirs["pipeline"]
    again = laid_out(found.as_json(), load_spec(DEFAULT_SPEC), world_size=4, stages=None)
    assert again.layout == layout and ("space" in found.as_json()["pipeline"]) is (split.size > 1)


def test_stages_of_one_space_group_need_no_answer() -> None:
    assert with_space({"size": 4}, 4, None).layout.stages == 1
    assert not leaves_stages_open(config_of(pipeline={"space": {"size": 4}}), 4)
    assert leaves_stages_open(config_of(pipeline={"space": {"size": 2}}), 4)


def test_rows_are_shared_as_evenly_as_possible() -> None:
    assert rows_by_rank(6, 4) == (1, 2, 1, 2) and rows_by_rank(8, 2) == (4, 4)
    for height in range(1, 40):
        for ranks in range(1, 9):
            rows = rows_by_rank(height, ranks)
            assert sum(rows) == height and max(rows) - min(rows) <= 1
            if min(rows):
                assert busiest_share(height, ranks) == pytest.approx(max(rows) * ranks / height)
            else:
                assert busiest_share(height, ranks) == float("inf")


BUCKETS = ["data.source=folder", "data.path=pictures", "data.channels=3", "data.buckets.step=8", "unet.classes=null"]


def planned(file: Path, overrides: list[str], stages: int | None) -> RunDraft:
    overrides = ["unet.attention_resolutions=[]", *overrides]
    return drafted(DEFAULT_SPEC, overrides, file, world_size=4, stages=stages)


def test_a_plan_says_which_rows_are_shared_and_what_that_costs(tmp_path: Path) -> None:
    draft = planned(write_json(tmp_path / "ds.json", json_of({"size": 4}, {})), ["data.image_size=[24,8]"], 1)
    (said,) = [line for line in describe_plan(draft, tmp_path).splitlines() if line.startswith("space ")]
    assert said.startswith("space        1 group of 4 ranks share images, 6+6+6+6 rows on levels 0-1")
    assert {layer.in_size[0] for layer in draft.layers} == {6, 3}
    assert {layer.in_size[0] for layer in layers_of_rank(draft.layers, 3)} == {6, 3}
    assert {layer.in_size[0] for layer in whole_layers(draft.layers)} == {24, 12}
    assert draft.exchange.swaps[0] > 0 and not any(draft.exchange.sums)


@pytest.mark.parametrize(
    ("space", "overrides", "changes", "said"),
    [
        ({"size": 3}, [], {}, "pipeline.space.size = 3 does not divide 4 processes"),
        ({"size": 2, "levels": [0, 7]}, [], {}, "pipeline.space.levels"),
        ({"size": 2, "levels": [1]}, [], {}, "should be 0, 1, ... without a gap"),
        ({"size": 2, "levels": [0, 1, 2]}, [], {}, "names level 2, but the U-Net has levels 0 to 1"),
        ({"size": 4, "levels": [0, 1]}, ["data.image_size=[6,8]"], {}, "has 3 rows; sizes that work are 1, 2;"),
        ({"size": 4}, ["data.image_size=[2,8]"], {}, "has 2 rows; sizes that work are 1, 2"),
        ({"size": 4, "levels": [0, 1]}, ["data.image_size=[10,8]"], {}, "gives one rank 1.60 shares of 5 rows"),
        ({"size": 9}, [], {}, "pipeline.space.size = 9 should be a whole number from 1 to 8"),
        ({"size": "auto", "levels": [0]}, [], {}, "pipeline.space.size"),
        ({"size": 2}, BUCKETS, {}, "pipeline.space.size = 2 needs images of one height"),
        ("auto", [], {"pipeline": {"tensor": {"size": 2}}}, 'space.size = "auto" does not go with pipeline.tensor.si'),
        ({"size": 2}, [], {"pipeline": {"tensor": {"size": 2}}}, "does not go with pipeline.tensor.size = 2"),
        ({"size": 2}, [], {"pipeline": {"tensor": "auto"}}, 'does not go with pipeline.tensor.size = "auto"'),
    ],
)
def test_advice_about_space_groups_is_right_when_it_is_typed(
    space: Any, overrides: list[str], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    pipeline = changes.pop("pipeline", {})
    file = write_json(tmp_path / "ds.json", json_of(space, pipeline, **changes))
    with pytest.raises(UserError) as found:
        planned(file, overrides, 1)
    (line,) = str(found.value).splitlines()
    assert said in line
    for item in re.findall(r"--set ('[^']+'|[^\s,;]+)", line):
        planned(file, [*overrides, *shlex.split(item)], 1)

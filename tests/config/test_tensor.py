"""Tensor groups in the DeepSpeed JSON: what they are resolved to, what is refused, and advice that works when typed."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.config.ds_config import ResolvedDsConfig, leaves_layout_open, leaves_stages_open, read_ds_config
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec
from ddpm_ds.ground.errors import UserError
from ddpm_ds.planning.run_plan import RunDraft
from ddpm_ds.schema.layout import TensorSplit
from tests.ds_json import config_of, laid_out
from tests.launching import drafted, write_json


def json_of(tensor: Any, **changes: Any) -> dict[str, Any]:
    """A JSON in fp32 with a value of ``pipeline.tensor``."""
    config = read_ds_config("zero1_fp32.json") | changes
    return config | {"pipeline": {**config.get("pipeline", {}), "tensor": tensor}}


def with_tensor(tensor: Any, world_size: int = 4, stages: int | None = 1, **changes: Any) -> ResolvedDsConfig:
    spec = load_spec(DEFAULT_SPEC)
    return laid_out(json_of(tensor, **changes), spec, world_size=world_size, stages=stages, path="x.json")


@pytest.mark.parametrize(
    ("tensor", "split"),
    [
        ({"size": 2}, TensorSplit(2)),
        ({"size": 2, "levels": "auto"}, TensorSplit(2)),
        ({"size": 2, "levels": [1]}, TensorSplit(2, (1,))),
        ({"size": 4, "layers": ["up.0.*", "middle.block.0"]}, TensorSplit(4, layers=("up.0.*", "middle.block.0"))),
        ({"size": 1, "levels": [0]}, TensorSplit()),
        ("auto", TensorSplit()),
        ({}, TensorSplit()),
    ],
)
def test_tensor_groups_are_part_of_the_layout_and_hidden_from_deepspeed(tensor: Any, split: TensorSplit) -> None:
    found = with_tensor(tensor)
    assert found.layout.tensor == split
    assert found.layout.world_size == 4 and found.layout.replicas == 4 // split.size
    assert f"1 stage x {split.size} tensor ranks x" in found.layout.words() or split.size == 1
    assert found.layout.sizes["tensor_size"] == split.size
    assert "tensor" not in found.for_deepspeed().get("pipeline", {})
    again = laid_out(found.as_json(), load_spec(DEFAULT_SPEC), world_size=4, stages=None)
    assert again.layout == found.layout and ("tensor" in found.as_json()["pipeline"]) is (split.size > 1)


def test_stages_of_one_tensor_group_need_no_answer() -> None:
    assert with_tensor({"size": 4}, 4, None).layout.stages == 1
    assert not leaves_stages_open(config_of(pipeline={"tensor": {"size": 4}}), 4)
    assert leaves_stages_open(config_of(pipeline={"tensor": {"size": 2}}), 4)


@pytest.mark.parametrize(
    ("tensor", "is_open"),
    [({}, False), ({"size": 2}, False), ({"size": "auto"}, True), ({"size": 2, "levels": "auto"}, True)],
)
def test_the_planner_is_asked_for_groups_only_where_they_are_auto(tensor: dict[str, Any], is_open: bool) -> None:
    assert leaves_layout_open(config_of(pipeline={"tensor": tensor}), 4, 2) is is_open
    assert not leaves_layout_open(config_of(pipeline={"tensor": tensor}), 1, None)


def planned(file: Path, overrides: list[str], stages: int | None) -> RunDraft:
    return drafted(DEFAULT_SPEC, overrides, file, world_size=4, stages=stages)


@pytest.mark.parametrize(
    ("tensor", "changes", "stages", "said"),
    [
        ({"size": 3}, {}, None, "pipeline.tensor.size = 3 does not divide 4 processes"),
        ({"size": 8}, {}, None, "pipeline.tensor.size = 8 does not divide 4 processes"),
        (
            {"size": 2, "levels": [0, 7]},
            {},
            1,
            "pipeline.tensor.levels = [0, 7] names level 7, but the U-Net has",
        ),
        (
            {"size": 2, "levels": [7]},
            {},
            1,
            "pipeline.tensor.levels = [7] names level 7, but the U-Net has",
        ),
        ({"size": 2, "layers": ["up.0.blok.1"]}, {}, 1, "no layer of the U-Net is named up.0.blok.1"),
        ({"size": 2, "layers": ["up.0.*", "up.9.*"]}, {}, 1, "no layer of the U-Net is named up.9.*"),
        ({"size": 2, "layers": ["*attention*"]}, {}, 1, "splits no layer: 1 head can't be shared by 2 ranks"),
        ({"size": 2, "layers": ["out"]}, {}, 1, "splits no layer: it names no residual block and no attention"),
        ({"size": 2, "levels": []}, {}, 1, "splits no layer: it names no residual block and no attention"),
    ],
)
def test_advice_about_tensor_groups_is_right_when_it_is_typed(
    tensor: Any, changes: dict[str, Any], stages: int | None, said: str, tmp_path: Path
) -> None:
    file = write_json(tmp_path / "ds.json", json_of(tensor, **changes))
    with pytest.raises(UserError) as found:
        planned(file, [], stages)
    (line,) = str(found.value).splitlines()
    assert said in line and "pipeline.tensor." in line
    typed = re.findall(r"--set ('[^']+'|[^\s,]+)", line)
    assert typed
    for item in typed:
        planned(file, shlex.split(item), stages or 1)

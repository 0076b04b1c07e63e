"""Values travel between ranks as JSON that is checked, never as a pickle."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import ValidationError

from ddpm_ds.observe.flops import StageProfile
from ddpm_ds.observe.observer import Barrier, RankTrace, TracedStep
from ddpm_ds.pipeline import messages
from ddpm_ds.pipeline.messages import all_gather_objects, broadcast_object, gather_objects
from ddpm_ds.pipeline.schedule import Event, Program, program
from tests.launching import REPOSITORY

TRACE = RankTrace(
    *(1, 0, 0, (0,), ((4, 8),), (Barrier(0.5, 1.5),)),
    (TracedStep(20, 0.0, math.inf, (Event("ForwardPass", 0, 1, 0.0, 1.0),)),),
)
VALUES: dict[str, tuple[Any, Any]] = {
    "number": (0.1, float),
    "nothing": (None, list[float] | None),
    "programs": (tuple(program("1f1b", 4, 2, rank) for rank in range(2)), tuple[Program, ...]),
    "timeline": (TRACE, RankTrace),
    "no flops": ([], list[StageProfile]),
    "anything": ({"a": [1, None, {"b": "\u00e9"}]}, Any),
}


COLLECTIVES = {name for name in dir(dist) if name.endswith(("_object", "_object_list", "_objects"))}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", VALUES)
def test_a_value_arrives_as_it_was_sent_and_one_of_another_type_is_refused(what: str) -> None:
    value, kind = VALUES[what]
    assert all_gather_objects(value, kind) == gather_objects(value, kind) == [value]
    assert broadcast_object(value, kind) == value
    with pytest.raises(ValidationError):
        messages._unpacked(messages._packed("import os", str), int)


def test_no_rank_makes_objects_of_what_another_has_pickled() -> None:
    for path in [*(REPOSITORY / "ddpm_ds").rglob("*.py"), *(REPOSITORY / "launch").rglob("*.py")]:
        assert not pickling_in(path) - {"UnpicklingError"}, path


def pickling_in(path: Path) -> set[str]:
    """The collectives on objects and the names of the module pickle that a file uses."""
    used = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    of_pickle = {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "pickle"}
    return of_pickle | {node.attr for node in used if node.attr in COLLECTIVES}

"""Values travel between ranks as JSON that is checked, never as a pickle, and never in a communicator of all ranks."""

import ast
import json
import math
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
from tests.launching import REPOSITORY, run_ranks
from tests.pipeline.values_worker import FOUND, POLLS, SAVED, SIGNALLED
from tests.strict import LOCKED

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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", VALUES)
def test_a_value_arrives_as_it_was_sent_and_one_of_another_type_is_refused(what: str) -> None:
    value, kind = VALUES[what]
    assert all_gather_objects(value, kind) == gather_objects(value, kind) == [value]
    assert broadcast_object(value, kind) == value
    with pytest.raises(ValidationError):
        messages._unpacked(messages._packed("import os", str), int)


STRICT, WORKER = REPOSITORY / "tests" / "strict.py", REPOSITORY / "tests" / "pipeline" / "values_worker.py"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("most_connected", "groups"),
    [
        pytest.param(6, [[*range(6)]], id="each rank connected to all"),
        pytest.param(5, [[3, 4, 5], [1, 4]], id="a grid of two rows and three columns"),
    ],
)
def test_values_and_requests_reach_all_ranks(most_connected: int, groups: list[list[int]], tmp_path: Path) -> None:
    """Six ranks, whose transport ends a rank that uses the default process group as only NCCL's communicator allows."""
    ran = run_ranks(6, STRICT, str(WORKER), str(most_connected), str(tmp_path))
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(6)]
    assert found[4]["groups"] == groups
    texts = ["ab\n " * rank for rank in range(6)]
    assert [one["gathered"] for one in found] == [texts, *[None] * 5]
    for one in found:
        assert one["all"] == [[rank, math.inf] for rank in range(6)] and one["first"] == 0
        assert one["asked"] == found[0]["asked"]
    asked, steps = found[0]["asked"], len(groups)  # a step for the rows, and one for the columns
    assert [poll for poll, (_, stop, _) in enumerate(asked) if stop] == [*range(SIGNALLED + steps, POLLS)]
    assert [poll for poll, (save, _, _) in enumerate(asked) if save] == [*range(FOUND + steps, SAVED + 1)]


@pytest.mark.launch
def test_a_barrier_of_the_default_group_ends_a_strict_rank(tmp_path: Path) -> None:
    ran = run_ranks(2, STRICT, str(WORKER), "2", str(tmp_path), STRICT_MUTANT="a barrier of the world")
    assert ran.returncode == LOCKED and "barrier of rank 0 in the default process group" in ran.stderr + ran.stdout


def test_no_rank_makes_objects_of_what_another_has_pickled() -> None:
    for path in [*(REPOSITORY / "ddpm_ds").rglob("*.py"), *(REPOSITORY / "launch").rglob("*.py")]:
        assert not pickling_in(path) - {"UnpicklingError"}, path


def pickling_in(path: Path) -> set[str]:
    """The collectives on objects and the names of the module pickle that a file uses."""
    used = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    of_pickle = {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "pickle"}
    return of_pickle | {node.attr for node in used if node.attr in COLLECTIVES}

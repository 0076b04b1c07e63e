"""Triton's kernels in its interpreter, on any machine: the fused GroupNorm + SiLU against float64, dropout's masks
bit for bit, and the draws of a micro-batch."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from ddpm_ds.planning.costs import DRAWS
from ddpm_ds.schema.layout import SpaceSplit
from ddpm_ds.unet import fused_norm
from tests.alone import run_alone
from tests.forking import PYTHON_PATH
from tests.ground import test_keyed_draws
from tests.unet import test_keyed_mask
from tests.unet.test_fused_norm import CASES, report, same_as_eager, tolerance
from tests.unet.test_space import errors
from tests.unet.variants import layers_of, rounding


def interpret(out: str, *names: str) -> None:
    """Write to a file what the interpreter made of some cases of the normalisation, and what else is named."""
    others = {
        "masks": lambda: test_keyed_mask.differing("cpu"),
        "launches": lambda: [test_keyed_mask.launches(interval) for interval in (0, 4)],
        "same": same_as_eager,
        "drawn": lambda: test_keyed_mask.drawn_alike("cpu"),
        "draws": test_keyed_draws.interpreted,
        "shared": shared_rows,
    }
    found: dict[str, Any] = {name: others[name]() if name in others else report(CASES[name]) for name in names}
    Path(out).write_text(json.dumps(found))


def shared_rows() -> dict[str, float]:
    """Errors of three ranks that share images; they are threads, and the interpreter runs one kernel at a time."""
    lock = threading.Lock()

    def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*arguments: Any) -> Any:
            with lock:
                return function(*arguments)

        return locked

    for name in ("moments", "normalise", "gradient_sums", "input_gradient"):
        setattr(fused_norm, name, one_at_a_time(getattr(fused_norm, name)))
    return dict(errors("bare", SpaceSplit(3), (12, 4), "fused"))


def interpreted(folder: Path, *names: str) -> Any:
    triton = pytest.importorskip("triton").__version__
    if Version(triton) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip(f"the interpreter of Triton {triton} makes no number of an array of NumPy {np.__version__}")
    call, environment = f"interpret({str(folder / 'report.json')!r}, *{names})", {"PYTHONPATH": PYTHON_PATH}
    run_alone("unet.test_interpreted", call, **environment, TRITON_INTERPRET="1")
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return interpreted(tmp_path_factory.mktemp("interpreted"), *CASES, "masks", "drawn", "launches", "draws", "shared")


@pytest.mark.parametrize("name", CASES)
def test_output_and_every_gradient_equal_float64_and_have_the_dtypes_and_memory_format_of_x(
    found: Any, name: str
) -> None:
    report, allowed = found[name], tolerance(CASES[name])
    assert {of: error for of, error in report["errors"].items() if not error < allowed} == {}
    assert report["repeats"] and all(report["dtypes"]) and all(report["channels_last"])


def test_ranks_that_share_the_rows_are_one(found: Any) -> None:
    allowed = 2 * rounding(layers_of("bare"))
    assert {of: error for of, error in found["shared"].items() if not error < allowed} == {}


def test_every_mask_is_the_reference_bit_for_bit(found: Any) -> None:
    assert found["masks"] == [] and found["drawn"] == {"bits": True, "channels-last": True}


def test_the_masks_of_all_layers_that_run_together_are_one_launch(found: Any) -> None:
    """Those of a stage without recomputation; else those of a group of layers, again when they are recomputed."""
    assert found["launches"] == [[8], [2, 3, 3, 3, 3, 2]]


def test_every_draw_is_that_of_pytorch_in_a_dozen_launches_a_micro_batch(found: Any) -> None:
    differing, launches = found["draws"]
    assert differing == [] and launches == DRAWS <= 12


@pytest.mark.long
def test_compiled_and_recomputed_they_give_the_same_bits(tmp_path: Path) -> None:
    """The import of the compiler takes as long as all kernels."""
    assert interpreted(tmp_path, "same")["same"] == {"compiled": True, "recomputed": True}

"""Images are channels-last from the first convolution to the loss and back, in every stage and between them.

As a script, with a file of cases and a folder, this is one rank, which counts tensors in other formats.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.launching import tiny_spec
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, report_cases, run_cases

CASES = [
    Case(2, 1, 2, "fp16", 1, micro_batches=2),
    Case(2, 1, 1, "fp32", 2, micro_batches=2, reentrant=True),
    Case(2, 1, 0, "fp32", 0, schedule="folded"),
]
ON_A_GPU = [
    Case(1, 1, 0, "fp32", 0, kernels="fused"),
    Case(1, 1, 2, "fp16", 1, kernels="fused"),
    Case(1, 1, 2, "bf16", 0, kernels="fused"),
]
"""PyTorch's own normalisation of groups has contiguous images on CUDA."""
COPIES = ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::contiguous")
WIDTH = 24
"""Channels of the U-Net, and in multiples: no image has as many pixels in a row."""


class Formats(TorchDispatchMode):
    """While it is entered, finds operators that read or write activations, or weights of convolutions, in another
    format than channels-last, and copies that change the order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        """Activations and weights that were looked at."""
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name
        given, made = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (args, outputs))
        for what, tensors in (("reads", given), ("writes", made)):
            for tensor in filter(is_watched, tensors):
                self.seen += 1
                if tensor.stride(1) > 1:
                    self.others[f"{name} {what} {tuple(tensor.shape)} with strides {tensor.stride()}"] += 1
        if name in COPIES and given[-1].ndim > 2 and order(given[-1]) != order(made[0]):
            self.others[f"{name} turns {tuple(given[-1].shape)} from {order(given[-1])} to {order(made[0])}"] += 1
        return outputs


def is_watched(tensor: Tensor) -> bool:
    """Whether it is an activation, a gradient of one, or a convolution's weights, all (., C, H, H)."""
    if tensor.ndim != 4 or tensor.shape[2] != tensor.shape[3] or not tensor.is_floating_point():
        return False
    return tensor.shape[1] % WIDTH == 0 and tensor.shape[2] <= 8 and tensor.shape[2] > 1


def order(tensor: Tensor) -> list[int]:
    """Dimensions of more than one element from the outermost in memory to the innermost."""
    dimensions = [number for number in range(tensor.ndim) if tensor.shape[number] > 1]
    return sorted(dimensions, key=tensor.stride, reverse=True)


def run_case(case: Case) -> tuple[int, Counter[str]]:
    """Tensors seen, and those in other formats, in the case's second step."""
    spec = tiny_spec(unet={"channels": WIDTH, "dropout": 0.1})
    engine = case.engine(spec)
    formats = Formats()
    engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
    with formats:
        engine.train_batch(micro_batches(engine, global_batch(spec, 1)))
    engine.destroy()
    return formats.seen, formats.others


@pytest.mark.parametrize(
    ("processes", "cases", "environment"),
    [(2, CASES, {}), pytest.param(1, ON_A_GPU, {"DS_ACCELERATOR": "cuda"}, marks=pytest.mark.gpu)],
    ids=["CPUs", "GPU"],
)
def test_no_layout_is_converted_in_a_stage_or_on_its_way_to_the_next(
    processes: int, cases: list[Case], environment: dict[str, str], tmp_path: Path
) -> None:
    """Every rank of every case sees activations, and none in another format."""
    for reports in run_cases(processes, Path(__file__), [asdict(case) for case in cases], tmp_path, **environment):
        for case, (seen, others) in zip(cases, reports, strict=True):
            assert seen > 100 and others == {}, case


if __name__ == "__main__":
    report_cases(lambda case: run_case(Case(**case)))

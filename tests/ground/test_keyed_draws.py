"""Draws by one kernel are those of PyTorch's operations; ``unet/test_interpreted.py`` compares them without a GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rivals.measure import CountedOperators, HostCost
from torch.utils._python_dispatch import _disable_current_modes

from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.ground import keyed
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.training.objective import Denoising
from tests.alone import REPOSITORY
from tests.pipeline.batches import global_batch

IMAGES = (0, 5, 5, 2**31, 2**32 - 1, 2**40 + 7, 2**63 - 1)
CASES: dict[str, tuple[int, dict[int, int], dict[int, int]]] = {
    "of a micro-batch": (3, {Stream.TIMESTEP: 1, Stream.FLIP: 1, Stream.LABEL_DROP: 1}, {Stream.NOISE: 3072}),
    "of continuous levels": (0, {Stream.CROP: 1}, {Stream.NOISE: 75, Stream.TIMESTEP: 1}),
    "words alone": (2**31, {7: 9, 2**32 - 1: 6, 8: 4}, {}),
    "normals alone": (2**32 - 1, {}, {2**32 - 1: 1}),
    "more than a program": (7, {2**31: 1030}, {5: 1030}),
}
ROUNDING = 2 * 6.8 * 2 * math.pi * 2.0**-23
"""A magnitude up to 6.8 times an angle up to 2 pi, each rounded by a unit of the last place in either way."""


def differing(device: str, rounding: float) -> list[str]:
    """Cases in which the kernel's words or normal draws are not those of PyTorch's operations."""
    from ddpm_ds.ground.keyed_draws import write

    images, found = torch.tensor(IMAGES, device=device), []
    for name, (seed, words, normals) in CASES.items():
        fused, plain = drawn(write, seed, images, words, normals), drawn(None, seed, images, words, normals)
        same = all(torch.equal(fused.bits(stream), plain.bits(stream)) for stream in words)
        apart = [float((fused.normal(stream) - plain.normal(stream)).abs().max()) for stream in normals]
        if not same or not all(of_stream <= rounding for of_stream in apart):
            found.append(f"{name}: {same}, {apart}")
    return found


def drawn(write: Callable[..., None] | None, *arguments: Any) -> Draws:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed, "_fused", lambda device: write)
        return Draws(*arguments)


def launches_of_prepare() -> int:
    """Operators that are neither views nor allocations, and launches of Triton, that prepare CIFAR-10's images."""
    from ddpm_ds.ground.keyed_draws import write

    launched = HostCost()

    def counted(*tensors: Any) -> None:
        launched.launches += 1
        with _disable_current_modes():  # of which the interpreter is no part
            write(*tensors)

    small = ["data.image_size=8", "unet.attention_resolutions=[4]", "train.batch_images=2"]
    spec = load_spec(REPOSITORY / "launch" / "specs" / "cifar10.yaml", small)
    assert spec.data.horizontal_flips and spec.unet.classes is None
    objective, batch = Denoising(spec, torch.device("cpu")), global_batch(spec, 0)
    keyed._fused = lambda device: counted  # type: ignore[assignment]
    objective.prepare(batch)  # makes what it keeps
    launched.launches = 0
    with CountedOperators(launched):
        objective.prepare(batch)
    return launched.launches


def interpreted() -> tuple[list[str], int]:
    """The cases that differ and the launches, in Triton's interpreter, which has no libdevice."""
    import triton.language as tl
    from triton.language.extra import libdevice

    for name in ("log", "sin", "cos"):
        setattr(libdevice, name, lambda x, name=name: getattr(tl, name)(x))
    return differing("cpu", ROUNDING), launches_of_prepare()


def test_a_kernel_that_can_not_be_built_is_replaced_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler")

    keyed._fused.cache_clear()
    monkeypatch.setattr(keyed, "runs_triton", lambda device: True)
    monkeypatch.setattr("ddpm_ds.ground.keyed_draws.write", fails)
    with pytest.warns(UserWarning, match="since Triton's kernel fails: no compiler"):
        noise = keyed.normal(0, Stream.NOISE, torch.arange(3), 8)
    keyed._fused.cache_clear()
    monkeypatch.undo()
    assert torch.equal(noise, keyed.normal(0, Stream.NOISE, torch.arange(3), 8))


@pytest.mark.gpu
def test_on_a_gpu_every_draw_is_that_of_pytorch(record_property: Callable[[str, object], None]) -> None:
    """Words are the same bits; normal draws differ by a few units of the last place of the largest, if at all."""
    assert keyed._fused(torch.device("cuda")) is not None
    assert differing("cuda", 4 * 8 * 2.0**-24) == []
    from ddpm_ds.ground.keyed_draws import write

    images, normals = torch.arange(128, device="cuda"), {Stream.NOISE: 3072}
    fused, plain = (drawn(way, 0, images, {}, normals).normal(Stream.NOISE) for way in (write, None))
    share = float((fused == plain).double().mean())
    record_property("share of normal draws with PyTorch's bits", share)

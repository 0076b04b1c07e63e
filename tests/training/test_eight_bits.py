"""Checkpoints of moments in 8 bits: codes and scales by name, on the same layout and another; runs with weights of 16
bits, or that train parts of the U-Net.

``test_tensor_groups.py`` has more runs with moments in 8 bits.
"""

import math
import re
from pathlib import Path

import pytest
import torch

from ddpm_ds.checkpoint.folder import checkpoint_name
from ddpm_ds.checkpoint.manifest import BLOCK, MOMENTS
from ddpm_ds.checkpoint.reader import Reader, code_of
from ddpm_ds.checkpoint.writer import Fragment, Writer
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.ground.formats import open_tensors
from ddpm_ds.pipeline.adam8bit import Adam8bit
from ddpm_ds.pipeline.deepspeed_insides import OwnedPiece
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.names import tensor_names
from tests.checkpoint.saving import describe, scalars
from tests.training.courses import Courses, Layout
from tests.training.ranks import the_same

SHAPES = {"1.weight": (30, 40), "1.bias": (30,), "2.weight": (4, 100), "2.norm": (50,), "3.weight": (500, 2)}
ELEMENTS = sum(map(math.prod, SHAPES.values()))


class Rank:
    """Partition of the flat weights that begins and ends at these elements, and its optimizer."""

    def __init__(self, first: int, stop: int) -> None:
        self.flat = torch.zeros(stop - first)
        self.pieces, at = [], 0
        for name, shape in SHAPES.items():
            end = at + math.prod(shape)
            low, high = max(at, first), min(end, stop)
            if low < high:
                place = low - at, high - low, self.flat, low - first, len(shape)
                self.pieces.append(OwnedPiece(name, *place, None))
            at = end
        self.optimizer = Adam8bit([self.flat], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        self.optimizer.own(self.pieces, SHAPES, seed=0)

    def fragments(self) -> list[Fragment]:
        return [fragment for piece in self.pieces for fragment in self.optimizer.fragments(piece)]

    def load(self, reader: Reader) -> None:
        for piece in self.pieces:
            for kind in MOMENTS:
                values = reader.read_part(kind, piece.name, piece.shard, piece.first, piece.length)
                self.optimizer.load(piece, kind, values)


def ranks(*ends: int) -> list[Rank]:
    return [Rank(first, stop) for first, stop in zip((0, *ends), (*ends, ELEMENTS), strict=True)]


def stepped(*ends: int) -> list[Rank]:
    """Ranks after a few steps on gradients that differ by a factor of ten thousand."""
    found = ranks(*ends)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradient = torch.randn(ELEMENTS, generator=generator) * 10 ** (-4 * torch.rand(ELEMENTS, generator=generator))
        for rank, part in zip(found, gradient.split([len(rank.flat) for rank in found]), strict=True):
            rank.optimizer.found_inf = torch.zeros(())
            rank.optimizer.take([part], None)
    return found


def saved(folder: Path, all_ranks: list[Rank]) -> Path:
    """A checkpoint of the moments of all ranks, in one file."""
    writer = Writer(folder, log=print)
    fragments = [one for rank in all_ranks for one in rank.fragments()]
    writer.begin("stage0-replica0", fragments, describe(64, SHAPES), scalars(64))
    assert writer.wait(), writer.why_not
    return folder / checkpoint_name(64)


def test_a_checkpoint_has_codes_and_scales_by_name_and_vectors_in_fp32(tmp_path: Path) -> None:
    path = saved(tmp_path, stepped(700))
    file = open_tensors(path / "stage0-replica0.safetensors")
    found = {key: (file.get_tensor(key).dtype, len(file.get_tensor(key))) for key in file.keys()}  # noqa: SIM118
    assert found["exp_avg/1.weight@0"] == (torch.uint8, 700)
    assert found["exp_avg.scales/1.weight@0"] == (torch.float32, 3)
    assert found["exp_avg_sq/1.weight@700"] == (torch.uint8, 500)
    assert found["exp_avg_sq.scales/1.weight@700"] == (torch.float32, 3)  # blocks 2, 3 and 4, of which it has a part
    assert found["exp_avg/1.bias@0"] == (torch.float32, 30) and "exp_avg.scales/1.bias@0" not in found
    reader = Reader(path)
    assert reader.manifest.kinds == ("exp_avg", "exp_avg_sq")
    part = reader.read("exp_avg", "1.weight", 650, 100)  # over the cut, and from the middle of blocks
    assert torch.equal(part, reader.read("exp_avg", "1.weight")[650:750])


@pytest.mark.parametrize(("ends", "others"), [((700,), ()), ((), (700,)), ((700, 1500), (650, 720, 2000))])
def test_another_layout_rounds_only_blocks_that_were_cut_within_the_codes_error(
    ends: tuple[int, ...], others: tuple[int, ...], tmp_path: Path
) -> None:
    before = Reader(saved(tmp_path / "before", stepped(*ends)))
    after = ranks(*others)
    for rank in after:
        rank.load(before)
    found = Reader(saved(tmp_path / "after", after))
    changed = 0
    for kind in MOMENTS:
        at = 0
        for name in SHAPES:
            wanted = before.read(kind, name)
            errors = (found.read(kind, name) - wanted).abs()
            for block, error in enumerate(errors.split(BLOCK)):
                low, high = at + block * BLOCK, at + block * BLOCK + len(error)
                largest = wanted[block * BLOCK : (block + 1) * BLOCK].abs().max()
                assert error.max() <= code_of(kind).error * largest
                if not any(low < end < high for end in (*ends, *others)):
                    assert not error.any(), f"{kind} of {name}, block {block}"
                changed += int(error.count_nonzero())
            at += len(wanted)
    assert changed > 0 or not ends


def test_codes_without_their_scales_are_refused(tmp_path: Path) -> None:
    (rank,) = stepped()
    damaged = [one._replace(scales=one.scales[:-1]) if one.scales is not None else one for one in rank.fragments()]
    rank.fragments = lambda: damaged  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="holds 8-bit codes without their scales, or other scales"):
        Reader(saved(tmp_path, [rank])).read("exp_avg", "1.weight")


# ---------------------------------------------------------------- whole runs


PARTS = ("optimizer.train=[resnets.0, conv_out]", "optimizer.rates={conv2: 0.5}")
LAYOUTS = {
    "rounded": (Layout(1, 2, zero=2, accumulation=2, optimizer="AdamW8bit", rounded=True), "bf16"),
    "rounded on host": (
        Layout(1, 1, zero=1, accumulation=1, optimizer="AdamW8bit", rounded=True, on_host=True, changes=PARTS),
        "bf16",
    ),
    "parts": (Layout(1, 2, zero=1, accumulation=2, changes=PARTS), "bf16"),
    "parts of two stages": (Layout(2, 1, zero=0, accumulation=4, schedule="folded", changes=PARTS), "fp32"),
}


@pytest.fixture(scope="module")
def courses(tmp_path_factory: pytest.TempPathFactory) -> Courses:
    found = Courses(tmp_path_factory.mktemp("courses"))
    found.train([found.course(name, *kind) for name, kind in LAYOUTS.items()])
    sources = {name: [name] for name in LAYOUTS} | {"parts": ["parts", "parts of two stages"]}
    found.train([found.course(f"resumed-{name}", *LAYOUTS[name], sources[name]) for name in LAYOUTS])
    return found


@pytest.mark.launch
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_and_resumed_is_never_stopped_bit_for_bit(layout: str, courses: Courses) -> None:
    assert the_same(courses.end(f"resumed-{layout}", layout), courses.end(layout))
    assert courses.end(layout).manifest.ds_config["optimizer"]["type"] == LAYOUTS[layout][0].optimizer


@pytest.mark.launch
@pytest.mark.parametrize("layout", ["rounded on host", "parts", "parts of two stages"])
def test_what_is_not_trained_stays_and_has_no_moments(layout: str, courses: Courses) -> None:
    half, end = courses.half(layout), courses.end(layout)
    spec = RunSpec.model_validate(end.manifest.spec)
    layers = unet_layers(spec.unet, spec.data.interface)
    kinds = set[bool]()
    for ours, theirs in tensor_names(layers):
        trained = any(re.search(r"resnets\.0|conv_out", name) for name in theirs)
        kinds.add(trained)
        if not LAYOUTS[layout][0].rounded:  # by which a short vector may stay as it is
            assert torch.equal(half.read("master", ours), end.read("master", ours)) is not trained, ours
        if not trained:
            assert torch.equal(half.read("master", ours), end.read("ema", ours)), ours
            with pytest.raises(CheckpointError, match=f"exp_avg of {ours} are in none of its files"):
                end.read("exp_avg", ours)
    assert kinds == {False, True}


@pytest.mark.launch
def test_layers_of_bf16_keep_the_fp32_values_of_what_is_not_trained(courses: Courses) -> None:
    wide, resumed = courses.half("parts of two stages"), courses.end("resumed-parts", "parts of two stages")
    same = [torch.equal(wide.read("ema", name), resumed.read("ema", name)) for name in wide.manifest.parameters]
    assert same.count(False) == sum(bool(resumed._spans_of("exp_avg", name)) for name in wide.manifest.parameters)
    values = [resumed.read("master", name) for name in wide.manifest.parameters]
    narrow = sum(not one.bfloat16().float().equal(one) for one in values)
    assert narrow > same.count(False), "bf16 has not their bits"


@pytest.mark.launch
def test_weights_of_16_bits_are_stored_as_such(courses: Courses) -> None:
    (file,) = courses.run_dir("rounded on host").glob("checkpoints/images-000000048/*.safetensors")
    assert open_tensors(file).get_tensor("master/1.conv.bias@0").dtype is torch.bfloat16

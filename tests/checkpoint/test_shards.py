"""Parameters whose parts lie with the ranks of tensor groups: whole by name, and read by any other sharing of them."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from ddpm_ds.checkpoint.manifest import MANIFEST, Span, check_coverage
from ddpm_ds.checkpoint.reader import Reader, consolidate
from ddpm_ds.checkpoint.writer import Fragment, Writer
from ddpm_ds.ground.formats import open_tensors
from ddpm_ds.unet.shards import Shard
from ddpm_ds.unet.tensor_group import part_of
from tests.checkpoint.saving import KINDS, SHAPES, check, describe, newest_good, save, scalars, values_of
from tests.checkpoint.test_forged import forge_header

ELEMENTS = {name: math.prod(shape) for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Sharing:
    """Ranks of a tensor group, the runs of the parameters that they split, and cuts of what each rank has end to end,
    as by ZeRO."""

    ranks: int = 1
    runs: Mapping[str, int] = field(default_factory=dict)
    cuts: Sequence[int] = ()

    def pieces(self) -> list[tuple[int, int, str, Shard | None, int, int]]:
        """Pieces: a rank's place in the group and number, a name, the part, the first element and the count."""
        found: list[tuple[int, int, str, Shard | None, int, int]] = []
        for rank in range(self.ranks):
            shards = {name: Shard(rank, self.ranks, run) for name, run in self.runs.items()}
            ends, at = list(itertools.pairwise((0, *sorted(self.cuts), 10**6))), 0
            for name, elements in ELEMENTS.items():
                own = elements // self.ranks if name in shards else elements
                for number, (start, stop) in enumerate(ends):
                    low, high = max(start - at, 0), min(stop - at, own)
                    if low < high:
                        found.append((rank, number, name, shards.get(name), low, high - low))
                at += own
        return found

    def fragments(self, images: int) -> dict[str, list[Fragment]]:
        files = {
            f"replica{n}-tensor{r}": list[Fragment]() for r in range(self.ranks) for n in range(len(self.cuts) + 1)
        }
        for rank, number, name, shard, start, length in self.pieces():
            if shard is not None or rank == 0:
                files[f"replica{number}-tensor{rank}"] += [
                    Fragment(kind, name, start, part(kind, name, images, shard)[start : start + length], shard=shard)
                    for kind in KINDS
                ]
        return files


def part(kind: str, name: str, images: int, shard: Shard | None) -> torch.Tensor:
    whole = values_of(kind, name, images, ELEMENTS[name])
    return whole if shard is None else part_of(whole, shard)


@st.composite
def sharings(draw: st.DrawFn) -> Sharing:
    ranks = draw(st.integers(1, 4))
    runs = {}
    for name, elements in ELEMENTS.items():
        fitting = [run for run in range(1, elements + 1) if elements % (ranks * run) == 0]
        if ranks > 1 and fitting and draw(st.booleans()):
            runs[name] = draw(st.sampled_from(fitting))
    return Sharing(ranks, runs, draw(st.lists(st.integers(0, 81), max_size=3)))


def written(folder: Path, sharing: Sharing, images: int = 1) -> Path:
    files, store, said = sharing.fragments(images), HashStore(), list[str]()
    writers = [Writer(folder, rank, len(files), log=said.append, store=store) for rank in range(len(files))]
    for writer, (name, fragments) in zip(writers, files.items(), strict=True):
        writer.begin(name, fragments, describe(images), scalars(images))
    assert all([writer.wait() for writer in writers]) and said == []
    return folder / f"images-{images:09}"


@settings(max_examples=40, deadline=None)
@given(one=sharings(), other=sharings(), data=st.data())
def test_any_sharing_reads_what_any_other_wrote(
    one: Sharing, other: Sharing, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("sharing"), one)
    check(path, 1)
    assert newest_good(path.parent, print) == path
    owners = {f"{name}.safetensors" for name, fragments in one.fragments(1).items() if fragments}
    assert {file.name for file in path.glob("*.safetensors")} == owners
    reader = Reader(path)
    for rank, _, name, shard, start, length in (*other.pieces(), *one.pieces()):
        kind = KINDS[(rank + start) % len(KINDS)]
        assert reader.read_part(kind, name, shard, start, length).equal(part(kind, name, 1, shard)[start:][:length])
    name = data.draw(st.sampled_from(list(ELEMENTS)))
    start = data.draw(st.integers(0, ELEMENTS[name]))
    length = data.draw(st.integers(0, ELEMENTS[name] - start))
    assert reader.read("ema", name, start, length).equal(values_of("ema", name, 1, ELEMENTS[name])[start:][:length])


SPLIT = Sharing(2, {"0.conv.weight": 3, "2.weight": 20}, (30,))


def test_each_rank_writes_its_own_part(tmp_path: Path) -> None:
    path = written(tmp_path, SPLIT)
    keys = {name: open_tensors(path / f"replica0-tensor{name}.safetensors").keys() for name in (0, 1)}
    assert set(keys[0]) >= {"ema/0.conv.weight~0.2.3@0", "ema/0.conv.bias@0", "ema/2.weight~0.2.20@0"}
    assert {key for key in keys[1] if key.startswith("ema/")} == {"ema/0.conv.weight~1.2.3@0", "ema/2.weight~1.2.20@0"}
    consolidate(path, tmp_path / "weights.safetensors")
    found = open_tensors(tmp_path / "weights.safetensors")
    for name, shape in SHAPES.items():
        assert found.get_tensor(name).equal(values_of("ema", name, 1, ELEMENTS[name]).view(shape))


def test_a_checkpoint_has_the_bytes_that_it_always_had(tmp_path: Path) -> None:
    codes = torch.arange(600).to(torch.uint8)
    fragments = [
        Fragment("ema", "1.weight", 0, torch.arange(600.0)),
        Fragment("exp_avg", "1.weight", 0, codes[:300], torch.ones(2)),
        Fragment("exp_avg", "1.weight", 300, codes[300:], torch.ones(2)),
    ]
    writer = Writer(tmp_path, log=print)
    writer.begin("stage0-replica0", fragments, describe(3, {"1.weight": (2, 300)}), scalars(3))
    assert writer.wait()
    path = tmp_path / "images-000000003"
    manifest = json.loads((path / MANIFEST).read_text())
    for changing in ("sha256", "version", "created"):
        del manifest[changing]
    texts = (path / "stage0-replica0.safetensors").read_bytes(), json.dumps(manifest).encode()
    assert [hashlib.sha256(text).hexdigest() for text in texts] == [
        "db0687157062ba3e5ce4a8197a5f82675fa263a38eab79793f3be8e390f7a9d4",
        "4ec1d3323f41ec4ac4e4b1181864c7868cdfb3f941228cac724bf37bd50cd1ed",
    ]


SPANS = st.builds(
    Span,
    st.sampled_from(("ema", "exp_avg")),
    st.sampled_from(("1.weight", "a@1", "b~2", "c/d")),
    st.integers(0, 10**14),
    st.just(7),
    st.none() | st.builds(Shard, *[st.integers(0, 10**14)] * 3),
)


@given(SPANS)
def test_a_key_says_which_values_they_are(span: Span) -> None:
    assert Span.of(span.key, 7) == span
    assert Span.of(span.scales_key, 7) == span._replace(kind=f"{span.kind}.scales")


@pytest.mark.parametrize(
    "key", ["ema/w@00", "ema/w@\u0661", "ema/w~0.2.03@0", "ema/w~0.2@0", "ema/w~-1.2.3@0", "ema/w@0\n", "/w@0"]
)
def test_a_key_that_is_not_written_is_none(key: str) -> None:
    span = Span.of(key, 7)
    assert span is None or span.name != "w"


def without(*shards: Shard | None) -> list[Span]:
    """All values but some of a parameter with 12 elements in three parts."""
    parts = [Shard(rank, 3, 2) for rank in range(3)]
    return [Span("ema", "w", start, 2, one) for one in parts if one not in shards for start in (0, 2)]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (without(Shard(1, 3, 2)), "part 2 of 3 of ema of w was not written, from element 0 on"),
        (without()[:-1], "part 3 of 3 of ema of w was not written, from element 2 on"),
        ([*without(), Span("ema", "w", 2, 2, Shard(0, 3, 2))], "part 1 of 3 of ema of w was written twice"),
        ([*without(), Span("ema", "w", 0, 12)], "ema of w was written in several ways"),
        ([Span("ema", "w", 0, 12), *without()], "ema of w was written in several ways"),
        ([*without(Shard(2, 3, 2)), Span("ema", "w", 0, 4, Shard(2, 3, 1))], "ema of w was written in several ways"),
        ([*without(), Span("ema", "w", 0, 4, Shard(3, 3, 2))], "in parts that it does not have"),
        ([Span("ema", "w", 0, 12, Shard(0, 1, 12))], "in parts that it does not have"),
        ([Span("ema", "w", 0, 2, Shard(rank, 5, 2)) for rank in range(5)], "in parts that it does not have"),
        ([Span("ema", "w", 0, 0, Shard(0, 12, 1))], "part 1 of 12 of ema of w was not written"),
    ],
)
def test_parts_that_miss_or_repeat_elements_are_no_checkpoint(spans: list[Span], words: str) -> None:
    assert check_coverage({"w": (12,)}, without()) == ("ema",)
    with pytest.raises(ValueError, match=words):
        check_coverage({"w": (12,)}, spans)


KEY = "master/2.weight~{}@{}"
MANY = "9" * 15


def renamed(shard: str, start: int = 0) -> Callable[[dict[str, Any]], object]:
    """Give a part, or all values of a parameter, other numbers."""
    return lambda header: header.update({KEY.format(shard, start): header.pop(KEY.format("0.2.20", 0))})


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "the other rank": renamed("1.2.20"),
    "an endless start": renamed("0.2.20", int(MANY)),
    "a start beyond": renamed("0.2.20", 18),
    **{
        shard: renamed(shard)
        for shard in (
            *("2.2.20", "0.1.20", "0.0.20", "0.2.0", "0.2.7", "0.2.10", "0.4.10", "0.2.x", "0.2.020"),
            *(f"0.{MANY}.{MANY}", f"0.2.{MANY}"),
        )
    },
    "whole": lambda header: header.update({"master/2.weight@0": header.pop(KEY.format("0.2.20", 0))}),
    "a mixture": lambda header: header.update({"master/2.weight@0": header.pop("master/0.conv.bias@0")}),
    "a part of a whole parameter": lambda header: header.update(
        {"master/0.conv.bias~0.2.2@0": header.pop("master/0.conv.bias@0")}
    ),
    "a part less": lambda header: header.pop("master/0.conv.weight~0.2.3@0"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, 1)
    written(tmp_path, Sharing(2, SPLIT.runs), images=2)
    return tmp_path


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_with_a_right_checksum_is_refused(folder: Path, name: str) -> None:
    check(folder / "images-000000002", 2)
    forge_header(folder, HEADERS[name], part="replica0-tensor0.safetensors")


def test_values_that_a_parameter_does_not_have_are_refused(folder: Path) -> None:
    reader = Reader(folder / "images-000000002")
    for shard, start, length in (
        (Shard(0, 3, 1), 0, 1),
        (Shard(2, 2, 20), 0, 1),
        (Shard(0, 2, 20), 15, 6),
        (Shard(0, 2, 20), -1, 1),
        (Shard(0, 2, 10), 15, 6),
        (Shard(0, 2, 10), -1, 1),
        (None, 30, 11),
    ):
        with pytest.raises(ValueError, match=r"of 2\.weight, which has 40"):
            reader.read_part("ema", "2.weight", shard, start, length)

"""A flipped, cut, lengthened or missing file is refused or passed over: no value is ever read wrong."""

import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpm_ds.checkpoint import manifest as manifest_module
from ddpm_ds.checkpoint.manifest import FORMAT, Manifest, read_manifest, verify
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.ground.files import sha256_of
from tests.checkpoint.saving import KINDS, SHAPES, check, newest_good, values_of
from tests.launching import PATIENCE_SECONDS

FILES = ("manifest.json", "state.json", "rank0.safetensors", "rank1.safetensors")


@pytest.fixture(scope="module")
def folder(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for the examples of a property, each of which mends what it damages."""
    return Path(shutil.copytree(pristine, tmp_path_factory.mktemp("damaged") / "checkpoints"))


damages = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
    st.tuples(st.just("lengthen"), st.just(0.0), st.integers(1, 9)),
    st.tuples(st.just("remove"), st.just(0.0), st.just(0)),
)


def damage(path: Path, how: str, where: float, amount: int) -> None:
    content = bytearray(path.read_bytes())
    at = int(where * len(content))
    if how == "remove":
        path.unlink()
        return
    if how == "flip":
        content[at] ^= 1 << amount
    elif how == "cut":
        del content[at:]
    else:
        content += b" " * amount
    path.write_bytes(content)


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(FILES), how=damages, kind=st.sampled_from(KINDS), parameter=st.sampled_from(list(SHAPES)))
def test_damage_is_refused_or_the_older_checkpoint_is_taken(
    folder: Path, name: str, how: tuple[str, float, int], kind: str, parameter: str
) -> None:
    file = folder / "images-000000002" / name
    before = file.read_bytes()
    damage(file, *how)
    try:
        with pytest.raises(CheckpointError) as caught:
            check(file.parent, 2)
        assert name in str(caught.value) and "\n" not in str(caught.value)
        said: list[str] = []
        assert newest_good(folder, said.append) == folder / "images-000000001" and len(said) == 1
        try:  # a rank that reads but one piece may not meet the damage; it must not read it wrong
            values = Reader(file.parent).read(kind, parameter)
        except CheckpointError:
            pass
        else:
            assert values.equal(values_of(kind, parameter, 2, values.numel()))
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_no_byte_of_any_file_is_beyond_the_checksums(folder: Path, name: str) -> None:
    file = folder / "images-000000002" / name
    before = file.read_bytes()
    for at in range(len(before)):
        file.write_bytes(before[:at] + bytes([before[at] ^ 1 << at % 8]) + before[at + 1 :])
        with pytest.raises(CheckpointError):
            Reader(file.parent).verify()
    file.write_bytes(before)
    Reader(file.parent).verify()


def test_what_the_checkpoint_does_not_have_and_a_foreign_format_are_named(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "images-000000002", tmp_path / "images-000000002"))
    reader = Reader(copy)
    with pytest.raises(CheckpointError, match="it has no momentum, only ema, exp_avg, exp_avg_sq, master"):
        reader.read("momentum", "0.conv.weight")
    with pytest.raises(CheckpointError, match=r"it has no parameter 9\.weight"):
        reader.read("ema", "9.weight")
    with pytest.raises(ValueError, match=r"values 30 to 41 of 2\.weight, which has 40"):
        reader.read("ema", "2.weight", 30, 11)
    changed: Manifest = read_manifest(copy).model_copy(update={"format": FORMAT + 1})
    (copy / "manifest.json").write_bytes(changed.dump())
    words = f"its format is {FORMAT + 1}, this version reads format {FORMAT}; use the ddpm_ds"
    with pytest.raises(CheckpointError, match=words):
        Reader(copy)


def test_several_files_are_verified_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(len(FILES) - 1)
    monkeypatch.setattr(manifest_module, "processors", lambda: 64)

    def sha256(path: Path, bar: object) -> str:
        together.wait(PATIENCE_SECONDS)
        return sha256_of(path)

    monkeypatch.setattr(manifest_module, "sha256_of", sha256)
    verify(folder / "images-000000002", read_manifest(folder / "images-000000002"), progress=False)


def test_a_big_checkpoint_shows_a_bar_while_it_is_verified(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = Reader(folder / "images-000000002")
    reader.verify(progress=True)
    monkeypatch.setattr(manifest_module, "BAR_BYTES", 10)
    reader.verify()
    assert capsys.readouterr().err == ""
    reader.verify(progress=True)
    assert "checking images-000000002: 100%" in capsys.readouterr().err

"""Checkpoints that someone has changed and given right checksums: one line, and the older checkpoint is taken."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpm_ds.checkpoint.manifest import MANIFEST, STATE
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.ground.errors import CheckpointError
from tests.checkpoint.saving import SHAPES, check, newest_good, scalars

PART = "rank0.safetensors"
BLANK = "0" * 64


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def sign(checkpoint: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Change the manifest, and make it say the checksums of the files as they are."""
    path = checkpoint / MANIFEST
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(manifest)
    blank = json.dumps({**manifest, "sha256": BLANK}, indent=2).encode()
    path.write_bytes(blank.replace(BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1))


def refused(folder: Path) -> None:
    said: list[str] = []
    assert newest_good(folder, said.append) == folder / "images-000000001", said
    assert said and all(line.isprintable() and "images-000000002" in line for line in said)


def forge_header(
    folder: Path, change: Callable[[dict[str, Any]], object], length: int | None = None, part: str = PART
) -> None:
    """Change a header of the newest checkpoint, with right checksums; it is refused."""
    newest = folder / "images-000000002"
    path = newest / part
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    del header["__metadata__"]
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + raw[end:])
    sign(newest)
    refused(folder)
    with pytest.raises(CheckpointError):
        check(newest, 2)


VALUES: list[Any] = [None, True, "1", [], {}, -1, 0.5, 10**30, float("nan"), float("inf"), 2**63]


@pytest.mark.parametrize("key", list(scalars(1)))
def test_a_state_with_odd_types_missing_or_impossible_values(folder: Path, key: str) -> None:
    newest = folder / "images-000000002"
    allowed: dict[str, Any] = {"learning_rate": (0.5,), "lr_scheduler": (None,), "loss_scaler": ({},)}
    path = newest / STATE
    before = json.loads(path.read_text())
    for value in VALUES:
        if value in allowed.get(key, ()):
            continue
        path.write_text(json.dumps({**before, key: value}))
        sign(newest)
        refused(folder)
    for content in ("", "[]", "null", "{}", '{"a":' * 10**4, json.dumps({**before, "more": 1})):
        path.write_text(content)
        sign(newest)
        refused(folder)


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no files": lambda manifest: manifest.update(files={}),
    "no state": lambda manifest: manifest["files"].pop(STATE),
    "no part": lambda manifest: manifest["files"].pop(PART),
    "no kinds": lambda manifest: manifest.update(kinds=[]),
    "a kind more": lambda manifest: manifest["kinds"].append("more"),
    "a file outside": lambda manifest: manifest["files"].update({"../../x": manifest["files"][PART]}),
    "an absolute path": lambda manifest: manifest["files"].update({"/dev/zero": manifest["files"][PART]}),
    "a hidden file": lambda manifest: manifest["files"].update({".x": manifest["files"][PART]}),
    "negative size": lambda manifest: manifest["files"][PART].update(bytes=-1),
    "negative images": lambda manifest: manifest.update(images=-1),
    "other images": lambda manifest: manifest.update(images=7),
    "text for images": lambda manifest: manifest.update(images="2"),
    "endless shape": lambda manifest: manifest["parameters"].update({"2.weight": [2**40, 2**40]}),
    "negative shape": lambda manifest: manifest["parameters"].update({"2.weight": [-1, -40]}),
    "other shape": lambda manifest: manifest["parameters"].update({"2.weight": [8, 6]}),
    "a parameter more": lambda manifest: manifest["parameters"].update({"3.weight": [8, 5]}),
    "a parameter less": lambda manifest: manifest["parameters"].pop("2.weight"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_with_a_right_checksum(folder: Path, name: str) -> None:
    sign(folder / "images-000000002", MANIFESTS[name])
    refused(folder)


def fragment(header: dict[str, Any]) -> dict[str, Any]:
    return dict(header["master/0.conv.weight@0"])


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another type": lambda header: header["master/0.conv.weight@0"].update(dtype="I32"),
    "half as many of twice the size": lambda header: header["master/0.conv.weight@0"].update(dtype="F64", shape=[18]),
    "negative offsets": lambda header: header["master/0.conv.weight@0"].update(data_offsets=[-4, 0]),
    "overlapping offsets": lambda header: header.update({"master/2.weight@0": fragment(header)}),
    "another form": lambda header: header["master/0.conv.weight@0"].update(shape=[4, 9]),
    "no start": lambda header: header.update({"master/0.conv.weight": header.pop("master/0.conv.weight@0")}),
    "another start": lambda header: header.update({"master/0.conv.weight@9": header.pop("master/0.conv.weight@0")}),
    "another kind": lambda header: header.update({"x/0.conv.weight@0": header.pop("master/0.conv.weight@0")}),
    "another name": lambda header: header.update({"master/x@0": header.pop("master/0.conv.weight@0")}),
    "nothing": lambda header: header.clear(),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_with_a_right_checksum_is_refused(folder: Path, name: str) -> None:
    forge_header(folder, HEADERS[name])


@pytest.mark.parametrize("length", [0, 7, 2**24, 2**31, 2**63, 2**64 - 1])
def test_a_header_of_another_length_is_refused(folder: Path, length: int) -> None:
    forge_header(folder, lambda header: None, length)


characters = st.characters(exclude_categories=["Cs"])  # UTF-8 by its name is a second to find out
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(characters, max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters, max_size=5), inner, max_size=3),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from([MANIFEST, STATE]), path=st.lists(st.integers(0, 5), min_size=1, max_size=4), value=json_values
)
def test_any_value_in_the_place_of_another(folder: Path, file: str, path: list[int], value: object) -> None:
    newest = folder / "images-000000002"
    before = {name: (newest / name).read_bytes() for name in (MANIFEST, STATE)}

    def put(values: Any) -> None:
        for step in path[:-1]:
            keys = list(values) if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
            if len(keys) > step and isinstance(values[keys[step]], dict | list) and values[keys[step]]:
                values = values[keys[step]]
        key = list(values)[path[-1] % len(values)] if isinstance(values, dict) else path[-1] % len(values)
        values[key] = value

    if file == STATE:
        state = json.loads((newest / STATE).read_text())
        put(state)
        (newest / STATE).write_text(json.dumps(state))
    sign(newest, put if file == MANIFEST else lambda manifest: None)
    try:
        reader = Reader(newest)
        for kind in reader.manifest.kinds:
            for name, shape in reader.manifest.parameters.items():
                assert len(reader.read(kind, name)) == math.prod(shape) <= math.prod(SHAPES["0.conv.weight"]) + 10
    except CheckpointError as error:
        assert str(error).isprintable()
    finally:
        for name, content in before.items():
            (newest / name).write_bytes(content)

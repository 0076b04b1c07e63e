"""Exports on the Hugging Face hub: what is uploaded, in one commit, by whom, and what of it is drawn from again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.cli.main import main
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.ground.errors import CheckpointError
from tests.evaluate.conftest import FakeTracker
from tests.evaluate.planted import UNLABELLED, plant, plant_alone, same_weights
from tests.hub_server import HubServer, Repository

Export = Callable[..., str]
FEW: dict[str, Any] = {"diffusion": {"timesteps": 4}, "sampler": {"steps": 2}}
MODEL = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"source": "folder", "path": "/home/someone/private/photos"}
    return plant_alone(tmp_path_factory.mktemp("few"), **FEW, **UNLABELLED, data=data)


@pytest.fixture
def export(planted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Export]:
    """Runs the verb in this process and gives what it printed; no token is ever in that, or in a file."""

    def run(*words: str, out: str = "out", code: int = 0) -> str:
        capfd.readouterr()
        assert main(["export", str(planted), str(tmp_path / out), "--samples", "2", *words]) == code
        output = "".join(capfd.readouterr())
        assert "hf_" not in output
        if code == 2:
            (line,) = [line for line in output.splitlines() if line.startswith("ddpm-ds: error: ")]
            return line
        return output

    yield run
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(b"hf_mine" in path.read_bytes() for path in written)


def test_an_export_is_one_commit_to_a_private_repository_that_is_drawn_from(
    hub: HubServer, planted: Path, tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = export("--push-to-hub", "me/digits")
    found, out = hub.repositories["me/digits"], tmp_path / "out"
    assert (
        found.private and found.commits == ["ema weights of checkpoint in fp32"] and "me/digits: private, " in printed
    )
    written = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {name: data for name, data in found.files.items() if name != ".gitattributes"} == written
    assert {"README.md", "samples.png", MODEL} <= written.keys()
    assert 'DDPMPipeline.from_pretrained("me/digits")' in written["README.md"].decode()

    monkeypatch.chdir(tmp_path)
    trained = load_trained("me/digits")
    assert trained.origin == "me/digits" and same_weights(trained.unet, load_trained(planted).unet)
    for name in ("me/digits", str(out)):
        grid = f"{len(name)}.npz"
        assert main(["sample", name, "--count", "2", "--steps", "2", "--device", "cpu", "--out", grid]) == 0
    names = [Path(f"{len(name)}.npz").read_bytes() for name in ("me/digits", str(out))]
    assert names[0] == names[1]
    with pytest.raises(CheckpointError, match=r"^me/digits is no folder here, and on .* leave out --weights raw$"):
        load_trained("me/digits", weights="raw")


def test_a_repository_is_replaced_only_if_asked_and_by_one_commit(
    hub: HubServer, tmp_path: Path, export: Export
) -> None:
    found = hub.repositories["me/digits"] = Repository(private=True)
    found.files |= {"vqvae/config.json": b"of before", "README.md": b"of before"}
    before = dict(found.files)
    assert "me/digits exists; name another, or" in export("--push-to-hub", "me/digits", code=2)
    assert "exists and is private; leave out --public" in export(
        "--push-to-hub", "me/digits", "--overwrite", "--public", code=2
    )
    found.private = False
    assert "exists and is public; say --public" in export("--push-to-hub", "me/digits", "--overwrite", code=2)
    words = ("--push-to-hub", "me/digits", "--overwrite", "--public")
    assert found.files == before and not found.commits and not (tmp_path / "out").exists()
    assert {method for method, _, _ in hub.asked} == {"GET"}
    export(*words)
    assert len(found.commits) == 1 and "vqvae/config.json" not in found.files and ".gitattributes" in found.files
    assert found.files[MODEL] == (tmp_path / "out" / MODEL).read_bytes()


@pytest.mark.parametrize(
    ("token", "name", "option", "message"),
    [
        ("", "me/digits", (), "can't be looked up: "),
        ("hf_wrong", "me/digits", (), "can't be looked up: 401: Invalid user token."),
        ("hf_mine", "me/a--b", (), "can't be looked up: Cannot have -- or .. in repo_id"),
        ("hf_mine", "me/a/b", (), "'me/a/b' should be OWNER/NAME"),
        ("hf_mine", "", ("--public",), "--public is of --push-to-hub, which is missing"),
        ("hf_mine", "", ("--overwrite",), "--overwrite is of --push-to-hub, which is missing"),
    ],
)
def test_what_the_hub_would_refuse_is_one_line_before_anything_is_done(
    hub: HubServer, tmp_path: Path, export: Export, token: str, name: str, option: tuple[str, ...], message: str
) -> None:
    (tmp_path / "token").write_text(token)
    assert message in export(*(("--push-to-hub", name) if name else ()), *option, code=2)
    assert not hub.repositories and not (tmp_path / "out").exists()
    assert {method for method, _, _ in hub.asked} <= {"GET"}


@pytest.mark.parametrize(("owner", "fails_at"), [("me", "/lfs/"), ("me", "/commit/"), ("somebody", "")])
def test_an_upload_that_fails_names_the_folder_and_shows_no_token(
    hub: HubServer, tmp_path: Path, export: Export, owner: str, fails_at: str
) -> None:
    hub.fails_at = fails_at
    line = export("--push-to-hub", f"{owner}/digits", code=2)
    assert f"{tmp_path / 'out'} is whole; hf upload {owner}/digits {tmp_path / 'out'} ." in line
    assert ("from Bearer ***" in line) == bool(fails_at) and (tmp_path / "out" / MODEL).is_file()


def test_a_run_with_text_shows_its_last_picture(
    tmp_path: Path, trackers: list[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    text = {"context_channels": 8, "tokens": 4, "blocks": [1, 1], "heads": [2, 4]}
    data = {"source": "folder", "path": "p", "text": {"encoders": str(tmp_path / "missing"), "layer": "last"}}
    unet = {**UNLABELLED["unet"], "attention_resolutions": [], "text": text}
    plant(run, data=data, unet=unet, train=UNLABELLED["train"])
    (run / "samples").mkdir()
    for images in ("images-000000160", "images-000000320"):
        (run / "samples" / f"{images}.png").write_text(images)
    assert main(["export", str(run), str(out)]) == 0
    assert (out / "samples.png").read_text() == "images-000000320" and "samples.png" in (out / "README.md").read_text()
    for number, words in enumerate((["--samples", "0"], ["--weights", "raw"])):
        assert main(["export", str(run), str(tmp_path / str(number)), *words]) == 0
        assert not (tmp_path / str(number) / "samples.png").exists()

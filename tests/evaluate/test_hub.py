"""Exports on the Hugging Face hub: what is uploaded, in one commit, by whom, and what of it is drawn from again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpm_ds.cli.main import main
from ddpm_ds.errors import CheckpointError
from ddpm_ds.evaluate.trained import load_trained
from tests.evaluate.conftest import FakeTracker
from tests.evaluate.planted import UNLABELLED, plant, same_weights
from tests.forking import REPOSITORY
from tests.hub_server import HubServer, Repository

Export = Callable[..., str]
FEW: dict[str, Any] = {"diffusion": {"timesteps": 4}, "sampler": {"steps": 2}}
MODEL = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint outside of a run's folder, so that nothing is recorded in MLflow."""
    folder = tmp_path_factory.mktemp("few")
    data = {"source": "folder", "path": "/home/someone/private/photos"}
    plant(folder / "run", **FEW, **UNLABELLED, data=data).replace(folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture
def export(planted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Export]:
    """Runs the verb in this process and gives what it printed; no token is ever in that, or in a file."""

    def run(*words: str, out: str = "out", code: int = 0) -> str:
        capfd.readouterr()
        assert main(["export", str(planted), str(tmp_path / out), "--samples", "2", *words]) == code
        said = "".join(capfd.readouterr())
        assert "hf_" not in said
        if code == 2:
            (line,) = [line for line in said.splitlines() if line.startswith("ddpm-ds: error: ")]
            return line
        return said

    yield run
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(b"hf_mine" in path.read_bytes() for path in written)


def test_an_export_is_one_commit_to_a_private_repository_that_is_drawn_from(
    hub: HubServer, planted: Path, tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = export("--push-to-hub", "me/digits")
    found, out = hub.repositories["me/digits"], tmp_path / "out"
    assert (
        found.private
        and found.commits == ["ema weights of checkpoint in fp32"]
        and f"{hub.address}/me/digits: private, " in said
    )
    written = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {name: data for name, data in found.files.items() if name != ".gitattributes"} == written
    assert {"README.md", "samples.png", "spec.yaml", MODEL} <= written.keys()
    assert len(hub.objects) == 2, "the picture and the weights"
    of_models = [each for each in hub.asked if each[1] != "/api/agent-harnesses"]  # which the client asks for itself
    unsigned = [(method, path) for method, path, given in of_models if given != "Bearer hf_mine"]
    assert sorted(unsigned) == sorted(("PUT", f"/lfs/{oid}") for oid in hub.objects), "which the hub has signed"
    spec = yaml.safe_load(written["spec.yaml"])
    assert spec["data"]["path"] == "photos" and spec["train"]["seed"] is not None
    card = written["README.md"].decode()
    assert 'DDPMPipeline.from_pretrained("me/digits")' in card and "[`spec.yaml`](spec.yaml)" in card

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


def test_a_repository_is_replaced_only_where_that_is_said_and_by_one_commit(
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
    found.writers = ("other",)
    words = ("--push-to-hub", "me/digits", "--overwrite", "--public")
    assert "exists, and is not yours to overwrite (403: no rights)" in export(*words, code=2)
    assert found.files == before and not found.commits and not (tmp_path / "out").exists()
    assert {method for method, _, _ in hub.asked} == {"GET"}
    found.writers = ("me",)
    export(*words)
    assert len(found.commits) == 1 and "vqvae/config.json" not in found.files and ".gitattributes" in found.files
    assert found.files[MODEL] == (tmp_path / "out" / MODEL).read_bytes()


@pytest.mark.parametrize(
    ("token", "name", "said"),
    [
        ("", "me/digits", "needs a token, and there is none; log in"),
        ("hf_wrong", "me/digits", "can't be looked up (401: Invalid user token."),
        ("hf_reader", "me/digits", "the token may only read; log in"),
        ("hf_mine", "me/a--b", "is a name that the hub does not take"),
        ("hf_mine", "me/a/b", "'me/a/b' should be OWNER/NAME"),
    ],
)
def test_what_the_hub_would_refuse_is_one_line_before_anything_is_done(
    hub: HubServer, tmp_path: Path, export: Export, token: str, name: str, said: str
) -> None:
    (tmp_path / "token").write_text(token)
    assert said in export("--push-to-hub", name, code=2)
    assert not hub.repositories and not (tmp_path / "out").exists()
    assert {method for method, _, _ in hub.asked} <= {"GET"}


def test_without_a_network_nothing_is_done(
    hub: HubServer, tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert "me/digits can't be looked up ([Errno 111] Connection refused)" in export(
        "--push-to-hub", "me/digits", code=2
    )
    for option in ("--public", "--overwrite"):
        assert f"{option} is of --push-to-hub, which is missing" in export(option, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("owner", ["me", "somebody"])
def test_what_is_left_of_an_upload_that_fails_is_named(
    hub: HubServer, tmp_path: Path, export: Export, owner: str
) -> None:
    hub.fails_at = "/lfs/"
    line = export("--push-to-hub", f"{owner}/digits", code=2)
    assert f"{tmp_path / 'out'} is whole" in line and (tmp_path / "out" / MODEL).is_file()
    if owner == "me":
        assert f"{hub.address}/me/digits is made, and empty" in line and not hub.repositories["me/digits"].commits
        assert f"to upload it: hf upload me/digits {tmp_path / 'out'} ." in line
    else:
        assert "somebody/digits can't be made, so nothing is uploaded" in line and "403: You don't have" in line
        assert not hub.repositories


def test_a_server_that_quotes_the_token_is_not_repeated(hub: HubServer, export: Export) -> None:
    hub.fails_at = "/commit/"
    assert "this server takes nothing from Bearer ***" in export("--push-to-hub", "me/digits", code=2)


def test_the_card_of_a_run_has_the_scores_of_these_weights_and_the_last_picture(
    hub: HubServer, tmp_path: Path, trackers: list[FakeTracker]
) -> None:
    run = tmp_path / "run"
    plant(run, **FEW, **UNLABELLED)
    sampler = {"kind": "ddim", "steps": 50, "guidance": 1.0}
    for name, digest in (("mine", load_trained(run).digest), ("other", "0" * 64)):
        (run / "evaluations" / name).mkdir(parents=True)
        scores = [{"title": f"FID {name}", "value": 3.17159, "samples": 50_000}]
        facts = {"digest": digest, "sampler": sampler, "precision": "fp16", "scores": scores}
        (run / "evaluations" / name / "scores.json").write_text(json.dumps(facts))
    assert main(["export", str(run), str(tmp_path / "out"), "--samples", "0"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| FID mine | 3.172 | 50,000 | ddim in 50 steps | 1 | fp16 |\n" in card and "FID other" not in card
    assert not (tmp_path / "out" / "spec.yaml").exists(), "which goes to the hub alone"


PUSH = """
from pathlib import Path
from ddpm_ds.data.hub import Upload
Upload("me/digits", public=True, overwrite=False).push(Path("out"), "weights")
"""


@pytest.mark.launch
@pytest.mark.parametrize("command", [False, pytest.param(True, marks=pytest.mark.long)], ids=["upload", "command"])
def test_hub_and_token_are_found_in_the_environment(
    command: bool, hub: HubServer, planted: Path, tmp_path: Path
) -> None:
    """By the upload alone, and by the whole command, which imports all of diffusers."""
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_mine"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(REPOSITORY), "MLFLOW_TRACKING_URI": ""}
    words = ["-c", PUSH]
    if command:
        words = ["-m", "ddpm_ds.cli.main", "export", str(planted), "out", "--samples", "0"]
        words += ["--push-to-hub", "me/digits", "--public"]
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "README.md").touch()
    program = [sys.executable, *words]
    ran = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not hub.repositories["me/digits"].private and "hf_mine" not in ran.stdout + ran.stderr
    assert "README.md" in hub.repositories["me/digits"].files


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

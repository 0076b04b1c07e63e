"""Downloads from the Hugging Face hub: only the files that a model needs, once; each fault is one line."""

from pathlib import Path

import pytest

from ddpm_ds.data.hub import from_hub
from ddpm_ds.ground.errors import DataError
from tests.model_hub import ModelHub

WEIGHTS = ("a.safetensors", "a.fp16.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHub:
    made = ModelHub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
    for name, files in {"full": WEIGHTS, "half": WEIGHTS[1:], "none": ()}.items():
        made.repositories[f"owner/{name}"] = tmp_path / name
        (tmp_path / name).mkdir()
        for file in (*files, "a.bin", "a.non_ema.safetensors", "other.json"):
            (tmp_path / name / file).touch()
    return made


def opened(name: str, newest: bool = False) -> str:
    """The weights that are found of a repository."""

    def weights(folder: Path) -> str:
        for file in WEIGHTS:
            if (folder / file).exists():
                return file
        raise DataError("no weights")

    return from_hub(name, ["a*"], weights, key=f"key = {name}", expected="name another", newest=newest)


def test_weights_in_fp16_are_downloaded_only_where_there_are_no_others(hub: ModelHub) -> None:
    assert opened("owner/full") == "a.safetensors" and hub.downloaded("owner/full") == {"a.safetensors"}
    assert opened("owner/half") == "a.fp16.safetensors" and hub.downloaded("owner/half") == {"a.fp16.safetensors"}
    with pytest.raises(DataError, match=r"^no weights$"):
        opened("owner/none")


def test_the_hubs_cache_will_do_unless_the_newest_is_asked_for(hub: ModelHub) -> None:
    opened("owner/full")
    assert hub.calls == 1
    opened("owner/full")
    assert hub.calls == 1
    opened("owner/full", newest=True)
    assert hub.calls == 2
    (hub.cache / "owner" / "full" / "a.safetensors").unlink()
    opened("owner/full")
    assert hub.calls == 3, "a download that was cut off is completed"
    hub.has_network = False
    assert opened("owner/full", newest=True) == "a.safetensors"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/full", r"is no folder, and the Hugging Face hub does not give it \(Name or service not known\)"),
        ("./full", "does not exist"),
        ("full", "does not exist"),
        ("a/b/c", "does not exist"),
        ("runs/full", "does not exist"),
    ],
)
def test_what_can_not_be_had_is_one_line(hub: ModelHub, name: str, words: str) -> None:
    hub.has_network = False
    with pytest.raises(DataError, match=rf"^key = {name} {words}; name another$"):
        opened(name)

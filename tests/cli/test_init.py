"""``ddpm-ds init``: it writes presets, and prints commands that can be typed."""

import errno
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddpm_ds.cli import init
from ddpm_ds.cli.init import KINDS, SMALL
from ddpm_ds.cli.main import main, make_parser
from ddpm_ds.config.ds_config import DS_CONFIGS, read_ds_config
from ddpm_ds.config.spec_file import SPECS, load_spec
from ddpm_ds.ground.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED
from ddpm_ds.planning.inputs import machine
from ddpm_ds.unet.layers import unet_layers
from tests.forking import REPOSITORY
from tests.terminal import Terminal


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("name", KINDS)
def test_a_folder_has_a_commented_spec_a_json_and_the_three_commands_that_are_printed(
    name: str, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "gpus", lambda: gpus)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    kind, folder = KINDS[name], tmp_path / "deep" / "my job"
    if gpus == 0:
        kind = SMALL.get(name, kind)
    assert main(["init", *([] if name == "digits" else [f"--{name}"]), str(folder)]) == 0
    said = capsys.readouterr().out
    assert ("no GPU" in said) == (gpus == 0 and name in SMALL)
    spec = (folder / "spec.yaml").read_text()
    assert spec.count("\n# ") >= 1 and spec.startswith("# yaml-language-server: $schema=run.schema.json\n")
    assert (folder / "run.schema.json").read_bytes() == (SPECS / "run.schema.json").read_bytes()
    preset = SPECS / f"{kind.spec}.yaml"
    own_path = ["data.path=pictures"] if "FOLDER" in preset.read_text() else []
    assert load_spec(folder / "spec.yaml") == load_spec(preset, own_path)
    if kind.pictures:
        assert load_spec(folder / "spec.yaml").data.path == Path(kind.pictures) and f"`{kind.pictures}`" in said
        assert list((folder / kind.pictures).iterdir()) == []
    assert read_ds_config(folder / "ds_config.json") == read_ds_config(DS_CONFIGS / f"{kind.ds_config}.json")
    readme = (folder / "README.md").read_text()
    first, *commands = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    assert shlex.split(first) == ["cd", str(folder)] and len(commands) == 3
    assert [line.strip() for line in readme.splitlines() if line.startswith("    ")] == commands
    assert max(map(len, readme.splitlines())) <= 120
    for command in commands:
        program, *words = shlex.split(command)
        if program == "python":
            assert (folder / words[0]).is_file()
        else:
            assert program == "ddpm-ds" and make_parser().parse_args(words)


@pytest.mark.parametrize(
    ("count", "batch", "held_out"),
    [(3, 8, 0), (80, 8, 8), (160, 16, 16), (300, 16, 16), (320, 32, 32), (5000, 32, 256)],
)
def test_without_a_gpu_batch_and_held_out_share_fit_the_pictures_that_lie_there(
    count: int, batch: int, held_out: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A held-out share is whole batches, and a tenth of the pictures at most."""
    (tmp_path / "mine" / "pictures" / "cats").mkdir(parents=True)
    for number in range(count):
        (tmp_path / "mine" / "pictures" / "cats" / f"{number}.png").touch()
    assert main(["init", "--images", str(tmp_path / "mine")]) == 0
    spec = load_spec(tmp_path / "mine" / "spec.yaml")
    assert (spec.train.batch_images, spec.data.held_out_images) == (batch, held_out)
    changes = [f"train.batch_images={batch}", f"data.held_out_images={held_out}", "data.path=pictures"]
    assert spec == load_spec(SPECS / "folder32.yaml", changes)
    assert capsys.readouterr().out.count(f"Of {count:,} pictures {held_out} are held out; batches have {batch}.\n") == 1


def test_a_folder_that_is_used_or_can_not_be_written_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used, empty, file = tmp_path / "used", tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("mine")
    assert main(["init", str(used)]) == main(["init", str(empty)]) == 0
    before = {path.name: path.read_bytes() for path in used.iterdir()}
    capsys.readouterr()
    for folder, why in ((used, "is not empty"), (file, "can't be written"), (file / "in it", "can't be written")):
        assert main(["init", "--images", str(folder)]) == EXIT_BAD_INPUT
        error = capsys.readouterr().err
        assert f"{folder} {why}" in error and error.count("\n") == 1
    assert main(["init", "--fields", "--text", str(tmp_path / "two")]) == EXIT_BAD_INPUT
    assert {path.name: path.read_bytes() for path in used.iterdir()} == before
    assert file.read_text() == "mine" and not (tmp_path / "two").exists()


SHORT = "--set train.images=64 --set optimizer.warmup_images=32 --set samples.count=6"
SHORTER = {
    "digits": (f"{SHORT} --trace-steps 1-1", "--count 2", ""),
    "text": ("--count 200", "", SHORT),
    "upscaling": ("", SHORT, "--steps 2"),
    "fields": ("--count 300", SHORT, "--steps 2"),
}
"""Options appended to the commands of kinds that need no network, so that they do less."""


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize("name", SHORTER)
def test_the_three_commands_work_as_they_are_printed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    assert main(["init", f"--{name}", str(folder)]) == 0
    if name == "upscaling":
        for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (128, 64, 64, 3), dtype=np.uint8)):
            Image.fromarray(pixels).save(folder / KINDS[name].pictures / f"{number:03}.png")
    for command, shorter in zip(KINDS[name].commands, SHORTER[name], strict=True):
        terminal = Terminal(["bash", "-ec", f"{command} {shorter}"], folder)
        assert terminal.ended() == 0, terminal.text
    assert (folder / "runs" / "first" / "checkpoints" / "latest").is_file()


def write_pictures(folder: Path) -> None:
    """Write 300 pictures, each a disc or square of one colour on a gradient between two others."""
    across, down = (np.mgrid[:48, :48] + 0.5) / 48
    draws = np.random.default_rng(0)
    for number in range(300):
        side, *colours = draws.uniform(0.0, 2 * np.pi), *draws.uniform(0.0, 255.0, (3, 3))
        blend = 0.5 + ((across - 0.5) * np.cos(side) + (down - 0.5) * np.sin(side)) / np.sqrt(2)
        away = np.abs(np.stack([across, down]) - draws.uniform(0.25, 0.75, (2, 1, 1)))
        within = (np.hypot(*away) if number % 2 else away.max(0)) < draws.uniform(0.12, 0.3)
        picture = colours[0] + blend[..., None] * (colours[1] - colours[0])
        picture[within] = colours[2]
        Image.fromarray(picture.astype(np.uint8)).save(folder / f"{number:03}.png")


def roughness(file: Path) -> float:
    """Return the difference of neighbours, relative to the deviation within each image of a file from ``sample``."""
    found = np.load(file)
    images = found["arr_0"].transpose(0, 3, 1, 2) if file.suffix == ".npz" else found  # (..., C, H, W)
    images = images.astype(np.float64)
    return float((np.abs(np.diff(images)).mean((-2, -1)) / images.std((-2, -1))).mean())


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize(("name", "minutes"), [("images", 30), ("fields", 10)])
def test_a_door_typed_on_a_cpu_shows_more_than_noise_early_and_saves_at_ctrl_c(
    name: str, minutes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the defaults. Time is counted in flops, of which the planner expects 40 GFLOP/s of a core."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    folder, (ready, train, sample) = tmp_path / name, KINDS[name].commands
    assert main(["init", f"--{name}", str(folder)]) == 0
    if name == "images":
        write_pictures(folder / "pictures")
    assert Terminal(["bash", "-ec", ready], folder).ended() == 0
    spec = load_spec(folder / "spec.yaml")
    assert spec.samples.every_images is not None
    macs = sum(layer.macs for layer in unet_layers(spec.unet, spec.data.interface))
    seconds_per_image = 3 * 2 * macs / (2 * machine("cpu", half=False, devices=1, nodes=1).flops)
    assert spec.train.images * seconds_per_image < minutes * 60
    assert spec.samples.every_images * seconds_per_image < min(minutes, 10) * 60 / 2

    first = folder / "runs" / "first" / "samples" / f"images-{spec.samples.every_images:09}.png"
    screen = Terminal(["bash", "-ec", f"exec {train}"], folder, columns=100)
    screen.read(lambda text: first.exists())
    screen.process.send_signal(signal.SIGINT)
    assert screen.ended() == EXIT_PREEMPTED, screen.lines[-9:]
    assert re.search(r"saved after [\d,]+ images in runs/first; go on with: ", screen.text)
    screen.assert_clean()
    drawn = folder / ("drawn.npz" if name == "images" else "drawn.npy")
    assert Terminal(["bash", "-ec", f"{sample} --out {drawn.name}"], folder).ended() == 0
    assert roughness(drawn) < 0.6, "white noise has 2 / sqrt(pi) = 1.13"
    plan = screen.text.replace("\r\n", "\n").partition("\nstarting ")[0].splitlines()
    assert len(plan) <= 25 and max(map(len, plan)) <= 100, plan


def test_the_readme_has_the_commands_of_its_three_doors() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    for name, folder in {"images": "mine", "sdxl": "xl", "fields": "weather"}.items():
        commands = (f"ddpm-ds init --{name} {folder} && cd {folder}", *KINDS[name].commands)
        assert "".join(f"    {command}\n" for command in commands) in readme


@pytest.mark.launch
@pytest.mark.long
def test_the_commands_for_sdxl_work_with_a_tiny_pipeline_in_its_place(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.evaluate.test_text_pipelines import write_pipeline_of

    pipeline, folder = write_pipeline_of(tmp_path / "pipeline", "sdxl"), tmp_path / "xl"
    assert main(["init", "--sdxl", str(folder)]) == 0
    tiny = {
        "madebyollin/sdxl-vae-fp16-fix": f"{pipeline}/vae",
        "stabilityai/stable-diffusion-xl-base-1.0": str(pipeline),
        "image_size: 128 ": "image_size: 8 ",
    }

    def replaced(text: str) -> str:
        for large, small in tiny.items():
            text = text.replace(large, small)
        return text

    spec = folder / "spec.yaml"
    spec.write_text(replaced(spec.read_text()))
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / "pictures" / f"{number:02}.png")
        (folder / "pictures" / f"{number:02}.txt").write_text("a red circle")
    shorter = ("", "", "--set train.images=16 --set train.batch_images=8 --set optimizer.warmup_images=0 --device cpu")
    for command, more in zip(KINDS["sdxl"].commands, shorter, strict=True):
        terminal = Terminal(["bash", "-ec", f"{replaced(command)} {more}"], folder)
        assert terminal.ended() == 0, terminal.text
    assert (folder / "runs" / "first" / "checkpoints" / "latest").is_file()


@pytest.mark.parametrize("name", ["digits", "images"])
def test_a_disk_that_is_full_leaves_nothing_and_takes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk may be full after any number of files."""
    (tmp_path / "empty").mkdir()
    write = init.write_file
    for most in range(4):
        room = iter(range(most))

        def full(path: Path, content: bytes, room: Iterator[int] = room) -> None:
            if next(room, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, content)

        monkeypatch.setattr(init, "write_file", full)
        for folder in ("empty", "new/deep"):
            assert main(["init", f"--{name}", str(tmp_path / folder)]) == EXIT_BAD_INPUT
            assert "No space left on device" in capsys.readouterr().err
        assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]

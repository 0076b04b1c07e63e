"""Images from trained weights: one batch, the sampler's options, what ddpm-ds sample writes, and going on."""

import argparse
import copy
import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ddpm_ds.cli.options import add_options, read
from ddpm_ds.cli.sample import SamplerOptions, samplers_from
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.evaluate import outputs
from ddpm_ds.evaluate.sampling import Setup, SpaceRanks, check_guide, draw
from ddpm_ds.evaluate.sampling import sample as draw_from_python
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.ground.errors import EXIT_PEER_LOST, EvaluationError, SpecError
from ddpm_ds.tracking.pictures import grid
from tests.evaluate.planted import (
    FAST,
    FAST_SAMPLER,
    UNLABELLED,
    Sample,
    difference,
    plant,
    sample_verb,
    trained_of,
)
from tests.launching import tiny_spec

INDEX = torch.arange(6)
GUIDED = FAST_SAMPLER.model_copy(update={"guidance": 2.0})
Watch = Callable[..., list[int]]


@pytest.fixture(scope="module")
def trained() -> Trained:
    return trained_of(tiny_spec())


@pytest.fixture
def sample(planted: Path, capsys: pytest.CaptureFixture[str]) -> Sample:
    """Runs the verb in this process and gives what it printed."""
    return sample_verb(planted, capsys)


def images(trained: Trained, index: Tensor = INDEX, *, seed: int = 0, **sampler: Any) -> Tensor:
    setup = Setup(trained, FAST_SAMPLER.model_copy(update=sampler))
    return draw(setup, index, labels=index % 10, seed=seed)


def test_an_image_that_is_not_finite_is_refused(trained: Trained) -> None:
    broken = replace(trained, unet=copy.deepcopy(trained.unet))
    next(broken.unet.parameters()).fill_(torch.inf)
    with pytest.raises(EvaluationError, match=r"image 0 of .* is drawn with NaN or infinity by ddim; .* --steps or"):
        images(broken)


def test_an_image_depends_on_its_seed_and_number_and_not_on_its_batch(trained: Trained) -> None:
    together = images(trained)
    assert (together.shape, together.dtype) == ((6, 1, 8, 8), torch.uint8)
    alone = torch.cat([images(trained, INDEX[i : i + 1]) for i in INDEX])
    assert difference(together, alone) <= 1  # rounding may move a value over the edge between two bytes
    assert difference(together.flip(0), images(trained, INDEX.flip(0))) <= 1
    assert difference(together[0], together[1]) > 50
    assert difference(together, images(trained, seed=1)) > 50


def test_labels_and_guidance_reach_the_u_net(trained: Trained) -> None:
    setup = Setup(trained, FAST_SAMPLER)
    one, two = (draw(setup, INDEX, labels=torch.full_like(INDEX, label)) for label in (1, 2))
    assert not one.equal(two)
    assert not images(trained).equal(images(trained, guidance=3.0))
    no_label = draw(setup, INDEX, labels=None)
    assert images(trained, guidance=0.0).equal(no_label) and not images(trained).equal(no_label)


def test_images_of_another_size_are_those_of_a_u_net_that_learned_it(trained: Trained) -> None:
    """Attention stays at the level where the U-Net learned it, whatever the side there is."""
    data, unet = {"image_size": [12, 8]}, {"attention_resolutions": [], "attention_levels": [1]}
    other = trained_of(tiny_spec(data=data, unet=unet))
    resized = trained.resized((12, 8))
    assert images(resized).shape == (6, 1, 12, 8) and images(resized).equal(images(other))
    assert resized.layers == other.layers and trained.resized((8, 8)).layers == trained.layers


def made_of(run: SamplerSpec, *arguments: str) -> SamplerSpec:
    parser = argparse.ArgumentParser()
    add_options(parser, SamplerOptions)
    (sampler,) = samplers_from(read(SamplerOptions, parser.parse_args(arguments)), run, DiffusionSpec(), classes=10)
    return sampler


def test_options_change_the_runs_own_sampler() -> None:
    run = SamplerSpec(kind="ddim", steps=7, eta=0.5, spacing="leading", clip="dynamic", guidance=2.0)
    assert made_of(run) == made_of(run, "--sampler", "ddim") == run
    flags = ["--sampler", "ddpm", "--steps", "9", "--spacing", "linspace", "--variance", "small", "--clip", "none"]
    wanted = SamplerSpec(kind="ddpm", steps=9, spacing="linspace", variance="small", clip="none", guidance=0.0)
    assert made_of(SamplerSpec(), *flags, "--guidance", "0") == wanted
    changed = made_of(run, "--sampler", "dpm_solver")
    assert (changed.steps_of(DiffusionSpec()), changed.eta, changed.guidance) == (20, 0.0, 2.0)


def expected(planted: Path, count: int, labels: Tensor | None, first: int = 0, seed: int = 0) -> Tensor:
    index = torch.arange(first, first + count)
    return draw(Setup(load_trained(planted), FAST_SAMPLER), index, labels=labels, seed=seed)


def contents(out: Path) -> dict[str, bytes]:
    """Every file of an output, which is a file or a folder of files."""
    return {path.name: path.read_bytes() for path in (out.iterdir() if out.is_dir() else [out])}


def test_64_images_and_a_grid_go_into_the_runs_folder(planted: Path, sample: Sample) -> None:
    out = planted / "samples-000000320"
    assert sample() == f"{out}: 64 images by ddim in 3 steps, seed 0, ema weights after 320 images\n"
    wanted = expected(planted, 64, torch.arange(64) % 10)
    title = f"{planted.name}, 320 images seen\nddim in 3 steps, averaged weights"
    labelled = grid(wanted, title, [str(i % 10) for i in range(64)])
    assert np.asarray(Image.open(out / "grid.png")).tolist() == np.asarray(labelled).tolist()
    assert sorted(path.name for path in planted.iterdir()) == ["checkpoints", out.name]
    assert len(list(out.iterdir())) == 65
    shutil.rmtree(out)


def test_an_npz_is_what_evaluators_of_guided_diffusion_read(
    planted: Path, without_classes: Path, tmp_path: Path, sample: Sample
) -> None:
    sample("--count", 7, "--first", 5, "--seed", 9, "--labels", "4,2,0", "--out", tmp_path / "x.npz")
    labels = torch.tensor([4, 2, 0])[torch.arange(5, 12) % 3]
    with np.load(tmp_path / "x.npz") as archive:
        assert archive.files == ["arr_0", "arr_1"]
        drawn, written = archive["arr_0"], archive["arr_1"]
    assert drawn.dtype == np.uint8 and drawn.shape == (7, 8, 8, 1)
    assert (written.dtype, written.tolist()) == (np.int64, labels.tolist())
    assert drawn.transpose(0, 3, 1, 2).tolist() == expected(planted, 7, labels, first=5, seed=9).tolist()
    for run_dir in (planted, without_classes):
        out = tmp_path / f"{run_dir.name}.npz"
        sample("--count", 2, "--labels", "none", "--out", out, run_dir=run_dir)
        assert np.load(out).files == ["arr_0"]


def test_a_folder_of_pngs_numbered_by_image(planted: Path, tmp_path: Path, sample: Sample) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new" / "pngs", tmp_path / "empty"):
        sample("--count", 3, "--first", 10, "--out", out, "--labels", "3")
        found = {path.name: np.asarray(Image.open(path)).tolist() for path in out.glob("0*.png")}
        wanted = expected(planted, 3, torch.tensor([3, 3, 3]), first=10)
        assert found == {f"0000{10 + i}.png": image.tolist() for i, image in enumerate(wanted[:, 0])}


def test_weights_precision_and_batches(tmp_path: Path, sample: Sample) -> None:
    def values(*arguments: object) -> np.ndarray:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
        sample("--count", 12, *arguments, "--out", out)
        return np.load(out)["arr_0"].astype(int)

    whole = values()
    assert np.abs(whole - values("--batch-images", 5)).max() <= 1
    assert (whole != values("--weights", "raw")).any()
    printed = sample("--count", 2, "--precision", "fp16", "--out", tmp_path / "x")
    assert printed.startswith("fp16 on a CPU: stored in fp16, computed in fp32\n")


def test_a_folder_with_files_is_not_replaced_and_nothing_is_drawn(
    tmp_path: Path, sample: Sample, watch_drawing: Watch
) -> None:
    (out := tmp_path / "pngs").mkdir()
    (out / "holiday.png").write_bytes(b"mine")
    drawn = watch_drawing()
    for words in ((), ("--overwrite",)):
        printed = sample("--count", 2, "--out", out, *words, code=2)
        assert "pngs exists and is not empty; name a new folder" in printed and drawn == []
    assert contents(out) == {"holiday.png": b"mine"} and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 1001", "--steps = 1001 is above the 1000 timesteps; use fewer"),
        ("--steps 0", "--steps 0: input should be greater than or equal to 1"),
        ("--guidance-between 5,0.3", "--guidance-between = 5,0.3 must rise"),
        ("--guidance-between=-1,3", "--guidance-between -1.0: input should be greater than or equal to 0"),
        ("--size 9", "images-000000320 draws multiples of 2 pixels; use 8"),
        ("--size 1x15", "draws multiples of 2 pixels; use 2x16"),
        ("--size 8x8x9", "'8x9' is not a size in pixels such as 64 or, height first, 96x64"),
        ("--size 0", "'0' is not a size in pixels"),
        ("--variance small", "--variance is an option of ddpm, not of ddim; leave it out or use --sampler"),
        ("--labels 10", "--labels 10 is out of range: the U-Net has 10 classes, 0 to 9"),
        ("--labels 0,1,-2", "--labels 0,1,-2 should be all, none, a class such as 3"),
        (f"--labels {'9' * 5000}", "should be all, none, a class such as 3"),
        ("--out /", "/ exists and is not empty; name a new folder"),
        ("--labels none --guidance 3", "--guidance 3 needs classes to guide to"),
        ("--guidance-between 3", "argument --guidance-between: '3' is not two noise levels such as 0.3,5"),
        ("--guidance 2 --guidance-between 300,400", "has none of the steps' noise levels, which are from"),
        ("--guide nowhere --guidance 2", "nowhere does not exist; name a checkpoint"),
        ("--seed 4294967296", "argument --seed: '4294967296' is not a number from 0 to 2^32 - 1"),
        ("--guidance 1,2", "sample takes one --sampler and one --guidance; ddpm-ds evaluate compares several"),
        ("--out OUT/x.jpg", "unknown suffix .jpg; use .npz, .npy or .zarr, or none for a folder"),
        ("--out OUT/nowhere/x.npz", "can't be written; name a file in a folder that exists and is yours"),
        ("--out OUT/x.npz --mlflow", "--mlflow logs a grid"),
        ("--labels 3", "--labels 3: the U-Net has no classes (unet.classes is null); leave it out"),
        ("--guidance 2", "--guidance = 2 needs a class-conditional U-Net"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: str, message: str, planted: Path, without_classes: Path, tmp_path: Path, sample: Sample
) -> None:
    words = arguments.replace("OUT", str(tmp_path)).split()
    run_dir = without_classes if "no classes" in message or "class-conditional" in message else planted
    out = [] if "--out" in words else ["--out", tmp_path / "x"]
    assert message in sample(*words, *out, run_dir=run_dir, code=2)
    assert not any(tmp_path.iterdir()) and [path.name for path in planted.iterdir()] == ["checkpoints"]


def test_a_guide_of_another_size_draws_as_from_python(
    planted: Path, without_classes: Path, tmp_path: Path, sample: Sample
) -> None:
    small = {"channels": 4, "norm_groups": 2}
    for run_dir, sections, labels in ((planted, {}, torch.arange(3) % 10), (without_classes, UNLABELLED, None)):
        classes = {**sections, "unet": {**sections.get("unet", {}), **small}}
        guide, out = plant(tmp_path / f"{run_dir.name}-guide", **classes), tmp_path / f"{run_dir.name}.npz"
        sample("--count", 3, "--guidance", 2, "--guide", guide, "--out", out, run_dir=run_dir)
        trained, worse = load_trained(run_dir), load_trained(guide)
        wanted = draw(Setup(trained, GUIDED, worse), torch.arange(3), labels=labels)
        drawn = torch.from_numpy(np.load(out)["arr_0"]).permute(0, 3, 1, 2)
        assert drawn.equal(wanted) and drawn.equal(draw_from_python(trained, 3, sampler=GUIDED, guide=worse))
        plain = draw(Setup(trained, FAST_SAMPLER), torch.arange(3), labels=labels)
        assert difference(drawn, plain) > 5


def test_what_cannot_guide_is_one_line(trained: Trained, planted: Path, sample: Sample) -> None:
    edm, v, guided = {"schedule": "edm", "objective": "v"}, {"objective": "v"}, [GUIDED]
    of_edm, of_v = trained_of(tiny_spec(diffusion=edm)), trained_of(tiny_spec(diffusion=v))
    larger = {"data": {"image_size": 16}, "unet": {"attention_resolutions": [8]}}
    cases: list[tuple[Trained, dict[str, Any], str]] = [
        (trained, larger, r"images \(C, H, W\) = \(1, 16, 16\)"),
        (trained, UNLABELLED, "unet.classes = None"),
        (trained, {"diffusion": {"timesteps": 500}}, "diffusion.timesteps = 500"),
        (trained, {"diffusion": {"beta_end": 0.03}}, "diffusion.beta_end = 0.03"),
        (trained, {"diffusion": {"objective": "x0"}}, "diffusion.objective = x0"),
        (of_v, {"diffusion": {**v, "zero_terminal_snr": True}}, "diffusion.zero_terminal_snr = True"),
        (trained, {"diffusion": edm}, "diffusion.schedule = edm"),
        (of_edm, {"diffusion": {**edm, "sigma_data": 0.6}}, "diffusion.sigma_data = 0.6"),
    ]
    for one, sections, printed in cases:
        with pytest.raises(SpecError, match=f"^--guide memory has {printed}, and .*; name a guide with the same$"):
            check_guide(trained_of(tiny_spec(**sections)), one, guided)
    check_guide(trained_of(tiny_spec(diffusion={**edm, "noise_mean": -0.4, "loss": "l1"})), of_edm, guided)
    line = sample("--guide", planted, code=2)
    assert "guides nothing at --guidance 1; give another, such as 2" in line


def test_the_progress_counts_the_evaluations_of_both_u_nets(trained: Trained) -> None:
    shown: list[tuple[int, int]] = []
    sampler = GUIDED.model_copy(update={"guidance_between": (0.1, 10.0)})
    for guide in (None, trained_of(tiny_spec(), seed=2)):
        draw(Setup(trained, sampler, guide), INDEX, labels=INDEX, after_step=lambda *counts: shown.append(counts))
    assert shown == 2 * [(1, 5), (3, 5), (5, 5)]  # sigma is 157, 9.3 and 1.5


def test_the_grid_is_logged_where_that_is_asked_for(
    planted: Path, tmp_path: Path, sample: Sample, trackers: list[Any]
) -> None:
    sample("--count", 2, "--out", tmp_path / "x")
    assert trackers == []
    assert "MLflow run the-id" in sample("--count", 2, "--out", tmp_path / "y", "--mlflow")
    (child,) = trackers
    assert (child.kind, child.run_dir, child.params["seed"]) == ("sample", planted, 0)
    assert child.artifacts == [("grid.png", "")] and child.status == "FINISHED"


@pytest.mark.parametrize("name", ["x.npz", "pngs"])
def test_interrupted_drawing_continues_where_it_stopped(
    name: str, tmp_path: Path, sample: Sample, watch_drawing: Watch
) -> None:
    arguments = ("--count", 10, "--batch-images", 3, "--labels", "0,1")
    (tmp_path / "through").mkdir()
    sample(*arguments, "--out", tmp_path / "through" / name)
    watch_drawing(2, KeyboardInterrupt())
    printed = sample(*arguments, "--out", tmp_path / name, code=130)
    assert printed == "interrupted: 6 of 10 images are kept; the same command continues from there\n"
    drawn = watch_drawing()
    printed = sample(*arguments, "--out", tmp_path / name)
    assert printed.startswith("6 of 10 images are there from before\n") and drawn == [6, 7, 8, 9]
    assert contents(tmp_path / name) == contents(tmp_path / "through" / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "through"])


def test_a_request_is_another_if_its_pixels_are(trained: Trained) -> None:
    worse, other = (trained_of(tiny_spec(), seed=seed) for seed in (2, 3))
    usual = {"seed": 0, "count": 4, "batch_images": 2}

    def key(guide: Trained | None = None, sampler: SamplerSpec = GUIDED, **numbers: int) -> str:
        return Setup(trained, sampler, guide).request([0, 1], **{**usual, **numbers}).key

    half = Setup(trained_of(tiny_spec(), dtype=torch.bfloat16), GUIDED).request([0, 1], **usual)
    one, larger = (Setup(each, GUIDED).request([3], **usual) for each in (trained, trained.resized((16, 8))))
    changes = {key(seed=1), key(count=5), key(first=1), key(sampler=FAST_SAMPLER), half.key, one.key, larger.key}
    assert len({key(), key(worse), key(other), *changes}) == 10
    assert key(worse) == key(replace(worse, origin="moved")) == key(worse, batch_images=4)
    assert key(worse, FAST_SAMPLER) == key(None, FAST_SAMPLER), "which guides nothing"


def test_a_full_disk_and_a_full_device_are_one_line_and_drawn_images_are_kept(
    tmp_path: Path, sample: Sample, watch_drawing: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--count", 6, "--batch-images", 2, "--out", tmp_path / "x.npz")
    write_file = outputs.write_file

    def full(path: Path, content: bytes) -> None:
        if path.name == "000000004-2.npy":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "write_file", full)
        printed = sample(*arguments, code=2)
    (partial,) = tmp_path.iterdir()
    assert f"{partial} can't be written (No space left on device)" in printed
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: you tried to")):
        watch_drawing(0, error)
        printed = sample(*arguments, code=2)
        assert "--batch-images = 2: the device has no memory for so many images at once; use fewer" in printed
    watch_drawing()
    assert sample(*arguments).startswith("4 of 6 images are there from before")


def test_a_command_on_two_devices_draws_the_images_of_one(planted: Path, sample: Sample, tmp_path: Path) -> None:
    """The guide's images too; the other process ends with the command."""
    arguments = ("--count", 2, "--guide", planted, "--guidance", 2)
    for space in ("1", "2"):
        sample(*arguments, "--space", space, "--out", tmp_path / f"{space}.npz")
    one, two = (torch.from_numpy(np.load(tmp_path / f"{space}.npz")["arr_0"]) for space in ("1", "2"))
    assert difference(one, two) <= 1 and not multiprocessing.active_children()


def test_devices_share_images_of_several_sizes(trained: Trained) -> None:
    """The other process gets the weights once, and computes its own rows: 3 of 6 rows, and 4 of 8."""
    with SpaceRanks(2, torch.device("cpu")) as ranks, torch.inference_mode():
        for size in ((8, 8), (12, 8), (8, 8)):
            alone = trained.resized(size)
            shared = replace(alone, ranks=ranks).shared()
            x_t, t = torch.randn(2, 1, *size), torch.tensor([3, 700])
            assert torch.allclose(shared.unet(x_t, t, t % 10), alone.unet(x_t, t, t % 10), rtol=0.0, atol=1e-4)
            (_,) = multiprocessing.active_children()


LOSES = """
import multiprocessing, os, sys
from ddpm_ds.cli.main import main
from ddpm_ds.evaluate import sampling
inner = sampling.Drawing.take
def take(self, prediction):
    multiprocessing.active_children()[0].kill()
    inner(self, prediction)
sampling.Drawing.take = take
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_a_lost_process_ends_the_command_in_one_line(planted: Path, tmp_path: Path) -> None:
    """After the first prediction the other process is killed."""
    (tmp_path / "loses.py").write_text(LOSES)
    words = ["sample", str(planted), *FAST, "--space", "2", "--out", str(tmp_path / "x")]
    ended = subprocess.run([sys.executable, tmp_path / "loses.py", *words], capture_output=True, text=True)
    assert ended.returncode == EXIT_PEER_LOST and "Traceback" not in ended.stderr, ended
    assert "ddpm-ds: error: a process that shares the images with --space has ended; " in ended.stderr


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (
            (8, "--size", "6x8"),
            "--space 8: level 0 of an image of height 6 has 6 rows; sizes that work are 1, 2, 3, 4, 6;",
        ),
        ((7,), "--space 7: level 0 of an image of height 8 gives one rank 1.75 shares of 8 rows; sizes that work are"),
        ((9,), "'9' is not a number of devices from 1 to 8"),
    ],
)
def test_devices_that_would_have_too_few_rows_are_refused(
    sample: Sample, tmp_path: Path, given: tuple[object, ...], fault: str
) -> None:
    assert fault in sample("--space", *given, "--out", tmp_path / "x", code=2) and not multiprocessing.active_children()

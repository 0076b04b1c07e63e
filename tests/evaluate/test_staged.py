"""A U-Net whose stages are on several processes samples and is scored as the whole one is."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.cli.sample import add_drawing_options, called, load
from ddpm_ds.cli.sample import main as sample_launched
from ddpm_ds.data.cache import CONSTANTS, DatasetCache
from ddpm_ds.data.prepare import prepare
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate.inputs import TrainedRegression
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.staged import Pipelines
from ddpm_ds.unet import model
from ddpm_ds.unet.model import build_layer
from tests.evaluate.conditioned import HELD_OUT, field_spec, plant_fields, plant_on
from tests.evaluate.planted import FAST, plant
from tests.launching import PATIENCE_SECONDS, REPOSITORY, fork_ranks, run_ranks, wait_for, write_json

SAMPLE, EVALUATE = (REPOSITORY / "launch" / f"{name}.py" for name in ("sample", "evaluate"))
PART = 2
"""Images that go through the stages at once: as many as the whole U-Net draws at once, so that bits are the same."""


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of fields."""
    return plant_fields(tmp_path_factory.mktemp("fields")).run_dir


@pytest.fixture(scope="module")
def residuals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of what a regression leaves of fields."""
    folder = tmp_path_factory.mktemp("residuals")
    mean = plant_fields(folder, diffusion={"objective": "regression"})
    spec = field_spec(folder, data={"residual_of": str(mean.run_dir)})
    store = prepare(spec.data, regression=TrainedRegression(spec.data, torch.device("cpu")))
    return plant_on(store, folder / "residuals", spec).run_dir


def run(script: Path, run_dir: Path, stages: int, replicas: int, *words: object) -> str:
    """Run a verb by so many pipelines and return what it printed; each part has ``PART`` images."""
    batch = PART if stages == 1 else PART * 2 * stages
    shared = ("--steps", 2, "--batch-images", batch, "--stages", stages, *words)
    done = run_ranks(stages * replicas, script, str(run_dir), *FAST, *map(str, shared), MLFLOW_TRACKING_URI="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.launch
@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (5, 1)])
def test_members_for_inputs_have_the_bits_of_the_whole_u_net(
    stages: int, replicas: int, fields: Path, tmp_path: Path
) -> None:
    """The first cut into five stages is where h and the newest skip are one tensor."""
    words = ("--conditions", "held-out", "--members", 2 * 2 * stages, "--out")
    run(SAMPLE, fields, 1, 1, *words, tmp_path / "whole.npy")
    said = run(SAMPLE, fields, stages, replicas, *words, tmp_path / "staged.npy")
    assert said.count(f"{HELD_OUT} inputs, by ddim") == 1
    assert np.load(tmp_path / "staged.npy").shape[:2] == (HELD_OUT, 4 * stages)
    assert (tmp_path / "staged.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


@pytest.mark.launch
def test_a_guide_and_a_regression_go_through_the_stages_too(residuals: Path, tmp_path: Path) -> None:
    """The picture shows true images as well, for which the regression is asked once more."""
    guide = plant_fields(tmp_path, unet={"channels": 4, "norm_groups": 2}).run_dir
    words = ("--conditions", "held-out", "--members", 8, "--guidance", 2, "--guide", guide, "--out")
    run(SAMPLE, residuals, 1, 1, *words, tmp_path / "whole.png")
    run(SAMPLE, residuals, 2, 1, *words, tmp_path / "staged.png")
    assert (tmp_path / "staged.png").read_bytes() == (tmp_path / "whole.png").read_bytes()


@pytest.mark.launch
def test_held_out_fields_have_the_scores_of_the_whole_u_net(residuals: Path, tmp_path: Path) -> None:
    weights, found = tmp_path / "weights", []  # outside of a run, so that MLflow records nothing
    shutil.copytree(residuals / "checkpoints" / "images-000000320", weights)
    shutil.copy(residuals / CONSTANTS, weights)
    for stages, replicas in ((1, 1), (2, 2)):
        out = tmp_path / f"{stages}"
        words = ("--members", 8, "--sampler", "ddim,dpm_solver", "--eta", 0, "--out", out)
        said = run(EVALUATE, weights, stages, replicas, *words)
        assert said.count("channel  ") == 1 and len(list(out.iterdir())) == 2
        found.append([json.loads(path.read_text())["scores"] for path in sorted(out.glob("*/scores.json"))])
    assert found[0] == found[1]


@pytest.mark.launch
def test_pictures_without_conditions_have_the_scores_of_the_whole_u_net(digits: DatasetCache, tmp_path: Path) -> None:
    """Labels, too, are told to the first stage alone."""
    weights = plant(tmp_path / "run", data_sha256=dict(digits.meta.sha256)).rename(tmp_path / "weights")
    words = ("--count", 16, "--metrics", "pixel", "--dataset", digits.path, "--out")
    whole, staged = (
        run(EVALUATE, weights, *layout, *words, tmp_path / f"{layout}").splitlines()[-1] for layout in ((1, 1), (2, 1))
    )
    assert staged == whole and whole.startswith("pixel")


def test_a_rank_builds_and_reads_its_own_layers_alone(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    read: list[str] = []
    reads = Reader.read

    def build(layer: Any, index: int, seed: int) -> Any:
        built.append(index)
        return build_layer(layer, index, seed)

    def record(reader: Reader, kind: str, name: str, *span: int) -> Any:
        read.append(name)
        return reads(reader, kind, name, *span)

    whole = load_trained(planted)
    monkeypatch.setattr(model, "build_layer", build)
    monkeypatch.setattr(Reader, "read", record)
    bounds = partition(whole.layers, 3, "parameters")
    every: dict[str, nn.Parameter] = {}
    for stage in range(3):
        built.clear()
        read.clear()
        unet = load_trained(planted, pipelines=Pipelines(3, 3 + stage, 6)).unet
        own = dict(unet.layers.named_parameters())
        assert built == list(range(*bounds[stage : stage + 2])) == [*map(int, dict(unet.layers.named_children()))]
        assert read == list(own) and not every.keys() & own.keys()
        every.update(own)
    assert all(every.pop(name).equal(values) for name, values in whole.unet.layers.named_parameters()) and not every


def test_a_regression_and_a_guide_are_cut_as_well(residuals: Path) -> None:
    parser = argparse.ArgumentParser()
    add_drawing_options(parser)
    options = parser.parse_args([str(residuals), *FAST, "--stages", "2", "--guidance", "2", "--guide", str(residuals)])
    trained, _, guide = load(options, Pipelines(2, 1, 2))
    unets = called(trained, guide)
    assert len(unets) == 3
    for unet in unets:
        assert partition(trained.layers, 2, "parameters")[1] == int(next(iter(unet.layers.named_children()))[0])


@pytest.mark.parametrize(
    ("processes", "words", "said"),
    [
        (
            "4",
            ("--stages", "3"),
            "--stages 3 does not divide the number of processes, 4; start 3 or a multiple (deepspe",
        ),
        ("1", ("--stages", "2"), "launch/...), or use --stages 1"),
        ("40", ("--stages", "40"), "--stages 40, but the U-Net has 17 layers; use at most 17 stages"),
        ("2", ("--stages", "0"), "argument --stages: '0' is not a number from 1 to"),
    ],
)
def test_stages_that_cannot_be_are_one_line(
    processes: str,
    words: tuple[str, ...],
    said: str,
    planted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", processes)):
        monkeypatch.setenv(name, value)
    try:
        code = sample_launched([str(planted), *FAST, *words])
    except SystemExit as end:  # of the parser
        code = end.code  # type: ignore[assignment]
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and said in line


def test_an_export_has_no_stages(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    write_json(tmp_path / "hub" / "config.json", {})
    with pytest.raises(SpecError, match=r"--stages 2: .*hub is an export, which is read whole; name a run"):
        load_trained(tmp_path / "hub", pipelines=Pipelines(2, 0, 2))


@pytest.mark.launch
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_stage_ends_the_others_and_what_is_drawn_is_kept(lost: int, planted: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "x.npz", tmp_path / "said"
    words = ("--stages", "2", "--steps", "100", "--count", "64", "--batch-images", "1", "--out", str(out))
    ranks = fork_ranks(2, SAMPLE, str(planted), *FAST, *words, stdout=said, stderr=said)
    try:
        wait_for(lambda: list(tmp_path.glob(".x.npz.*/*.npy")), said=said.read_text)
        ranks[lost].send_signal(signal.SIGKILL)
        assert ranks[1 - lost].wait(timeout=PATIENCE_SECONDS) == 76
    finally:
        for process in ranks:
            process.kill()
    assert "ddpm_ds: error: another process was lost in the middle of a batch" in said.read_text()
    assert list(tmp_path.glob(".x.npz.*/*.npy"))

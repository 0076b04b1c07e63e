"""Whole runs; one of bad input is also started by the real launcher, as a user does it."""

import getpass
import json
import math
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageSequence

from ddpm_ds.tracking.recorder import PARAMETERS
from ddpm_ds.tracking.run_folder import NOTE_TAG, OBSERVATIONS, RATE, RunFolder, mean_of_points
from tests.forking import ONE_THREAD
from tests.launching import REPOSITORY, place_digits, place_empty_store, run_ranks
from tests.terminal import PROGRAM
from tests.training.ranks import end_of, measured_losses, mlflow_run, recorded_losses, the_same

TRAIN = REPOSITORY / "launch" / "train.py"
GOLDEN = Path(__file__).with_name("golden_losses.json")
TINY = [
    "unet.channels=8",
    "unet.norm_groups=4",
    "train.batch_images=32",
    "train.images=1600",
    "logging.log_every_images=160",
    "optimizer.warmup_images=0",
    "samples.every_images=800",
    "samples.count=9",
    "sampler.steps=4",
    "evaluation.every_images=800",
]
EDM = [
    "diffusion.schedule=edm",
    "diffusion.objective=v",
    "samples.every_images=null",
    "evaluation.every_images=null",
    "train.images=800",
]


def train(
    processes: int,
    folder: Path,
    *options: str,
    config: str = "zero0_fp32.json",
    overrides: list[str] = TINY,
    cache: Path | None = None,
    code: int = 0,
) -> subprocess.CompletedProcess[str]:
    """The main command with a small U-Net, its outputs in ``folder``, which ends with an exit ``code``."""
    changes = [f"data.store_root={folder.parent / 'data'}", *overrides]
    place_empty_store(folder.parent)
    place_digits(folder.parent)
    done = run_ranks(
        processes,
        TRAIN,
        "--deepspeed_config",
        str(REPOSITORY / "ds_configs" / config),
        "--run-dir",
        str(folder),
        *(part for change in changes for part in ("--set", change)),
        *options,
        MLFLOW_TRACKING_URI="",
        XDG_CACHE_HOME=str(cache or folder.parent / "cache"),
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def curve(folder: Path, name: str = "train/loss") -> list[float]:
    """The values of a metric of the run that ``folder`` was trained as."""
    client, run = mlflow_run(folder)
    return [point.value for point in client.get_metric_history(run.info.run_id, name)]


def tiles_of(picture: Path) -> npt.NDArray[np.int64]:
    """The nine samples of a picture (3 x 3, enlarged 22 times, under the title), each pixel once."""
    pixels = np.array(Image.open(picture), np.int64)
    assert pixels.shape[0] > pixels.shape[1] == 2 + 3 * 178, "a title"
    return pixels[-3 * 178 :, 2:].reshape(3, 178, 3, 178)[:, :176:22, :, :176:22]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on one process in fp32."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    done = train(1, folder)
    (folder.parent / "stdout").write_text(done.stdout)
    (folder.parent / "stderr").write_text(done.stderr)
    return folder


def error_lines(stderr: str) -> set[str]:
    """The errors that ranks report, each once: a slow rank 1 repeats what rank 0 has said."""
    return {line for line in stderr.splitlines() if line.startswith("ddpm_ds: error: ")}


@pytest.mark.launch
@pytest.mark.capability
@pytest.mark.parametrize("process", ["ddpm", "edm"])
def test_golden_losses(process: str, one_process: Path, tmp_path: Path) -> None:
    """Rung e. A change that moves these losses changes what is trained: say so, and write the new ones."""
    folder = one_process
    if process == "edm":
        folder = tmp_path / "runs" / "edm"
        train(1, folder, overrides=[*TINY, *EDM])
    golden = json.loads(GOLDEN.read_text())
    assert curve(folder) == pytest.approx(golden["train/loss"][process], rel=2e-4)


SHORT = ["train.images=160", "logging.log_every_images=32", "samples.every_images=160", "evaluation.every_images=160"]
SHORT += ["unet.multipliers=[1]", "unet.attention_resolutions=[8]", "unet.head_channels=4", "ema.halflife_images=100"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shorter run on one process."""
    folder = tmp_path_factory.mktemp("short") / "one"
    train(1, folder, config="zero1_fp32.json", overrides=[*TINY, *SHORT])
    return folder


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize(("stages", "replicas", "parts"), [(2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)])
def test_a_run_in_another_layout_has_the_curves_and_pictures_of_one_process(
    stages: int, replicas: int, parts: int, short: Path, tmp_path: Path
) -> None:
    processes, folder = stages * replicas * parts, tmp_path / "runs" / "split"
    options = ("-p", str(stages), "--set", f'ds.pipeline.tensor={{"size":{parts}}}', "--trace-steps", "2-3")
    done = train(processes, folder, *options, config="zero1_fp32.json", overrides=[*TINY, *SHORT])
    assert ("layers split; a rank sends " in done.stdout) == (parts > 1), "all that can be: groups and heads divide"
    assert (folder / "programs.txt").exists() == (stages > 1), "the schedule of a pipeline is planned"
    losses = curve(folder)
    assert len(losses) == 5 and losses == pytest.approx(curve(short), rel=1e-5) and losses[-1] < losses[0]
    assert curve(folder, "eval/loss") == pytest.approx(curve(short, "eval/loss"), rel=1e-4)
    for images in (0, 160):
        drawn, expected = (tiles_of(run / "samples" / f"images-{images:09}.png") for run in (folder, short))
        assert drawn.shape == expected.shape and np.abs(drawn - expected).max() <= 1
    tags, summary = mlflow_run(folder)[1].data.tags, json.loads((folder / "trace" / "summary.json").read_text())
    assert (tags["derived.stages"], tags["derived.tensor_size"]) == (str(stages), str(parts))
    assert [rank["part"] for rank in summary["ranks"]] == list(range(parts)) * (processes // parts)


@pytest.mark.launch
def test_a_run_is_in_mlflow_with_all_its_metrics_params_tags_and_files(one_process: Path) -> None:
    client, run = mlflow_run(one_process)
    assert run.info.status == "FINISHED"
    curves = {"train/loss", "perf/images_per_second", "usage/stage0_peak_memory_bytes"}  # and what meters' tests name
    assert set(run.data.metrics) >= curves
    once = {"stage0/forward_seconds", "stage0/backward_seconds", "perf/bubble_fraction", "perf/mfu", "perf/run_seconds"}
    assert set(RunFolder(one_process).columns(OBSERVATIONS)) >= once
    assert not once & (set(run.data.metrics) | set(run.data.tags)), "one number is no chart"
    assert all(math.isfinite(value) for value in run.data.metrics.values())
    assert run.data.metrics["train/seen_images"] == 1600
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(5, 51, 5))
    assert run.data.params.keys() == set(PARAMETERS)
    assert run.data.params["unet.channels"] == "8" and run.data.tags["derived.precision"] == "fp32"
    written = {"samples.count": "9", "ds_config.zero_optimization.stage": "0", "derived.steps": "50"}
    assert written.items() <= RunFolder(one_process).settings.items()
    assert run.inputs is not None
    (images,) = (given.dataset for given in run.inputs.dataset_inputs)
    assert images.name == "digits-8px" and json.loads(images.source)["sha256"].startswith(images.digest)
    assert run.data.tags["mlflow.user"] == getpass.getuser()
    assert run.data.tags.keys() >= {"git_commit", "git_dirty", "host", "world_size", "stage_cuts", "version.torch"}
    assert run.data.tags.keys() >= {"verdict.top", "verdict.share", "verdict.try"}
    layout, loss, verdict, *_ = run.data.tags[NOTE_TAG].splitlines()
    assert layout == "**Layout:** 1 stage x 1 replica, 1 micro-batch of 32, ZeRO-0, fp32 on cpu  "
    assert loss.startswith("**Final loss:** 0.") and verdict.startswith("**Verdict:** ")
    kept = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert kept >= {"spec.yaml", "ds_config.json", "machine.json", "trace", "verdict.txt", OBSERVATIONS, "progress.gif"}


@pytest.mark.launch
def test_a_run_has_pictures_and_held_out_losses_at_their_cadence(one_process: Path) -> None:
    client, run = mlflow_run(one_process)
    assert sorted(path.name for path in (one_process / "samples").iterdir()) == [
        "images-000000000.png",
        "images-000000800.png",
        "images-000001600.png",
    ]
    tiles = [tiles_of(one_process / "samples" / f"images-{images:09}.png") for images in (800, 1600)]
    assert np.abs(tiles[0] - tiles[1]).max() > 1, "those of an image are of other weights"
    with Image.open(one_process / "progress.gif") as gif:
        assert len(list(ImageSequence.Iterator(gif))) == 3
    logged = [Path(file.path).name for file in client.list_artifacts(run.info.run_id, "images")]
    steps = [re.match(r"eval.samples_ema.step.(\d+).*\.png", name) for name in logged]  # MLflow separates by + or %
    assert sorted(int(step[1]) for step in steps if step) == [0, 25, 50], "the slider begins with a picture"
    for name in ("eval/loss", *(f"validation/loss_t{percent}" for percent in range(10, 100, 10))):
        assert [point.step for point in client.get_metric_history(run.info.run_id, name)] == [25, 50], name
    assert curve(one_process, "eval/loss")[1] < curve(one_process, "eval/loss")[0]
    nine = [run.data.metrics[f"validation/loss_t{percent}"] for percent in range(10, 100, 10)]
    assert sum(nine) / 9 == pytest.approx(run.data.metrics["eval/loss"])
    assert nine[0] > 2 * nine[8]  # noise is hardest to tell where there is little of it
    assert run.data.metrics.keys() >= {"usage/samples_seconds", "usage/evaluation_seconds"}


@pytest.mark.launch
def test_a_run_shows_progress_and_ends_with_a_summary_and_no_chatter(one_process: Path) -> None:
    out, err = ((one_process.parent / name).read_text() for name in ("stdout", "stderr"))
    launcher = re.compile(r"\[20.*\[(launch|runner)\.py")
    shown = [line for line in (out + err).splitlines() if line.strip() and not launcher.match(line)]
    for expected in ("1,600/1,600 images (100%)", "final loss", "mlflow ui --backend-store-uri", str(one_process)):
        assert any(expected in line for line in shown), expected
    known = (
        *("run ", "data", "U-Net", "precision", "layout", "batch", "length", "samples", "validation", "outputs"),
        *("starting PyTorch", "waiting for all", "checking the run", "building the", "taking the", "sending the"),
        *("stage", "    0", "preparing", "digits-8px-1ch: 1,797 images in 10 classes: 0 178, ", "held-out loss"),
        *("final", "trained", "speed", "skipped", "MLflow", "serve", "open", "fp16", "flops of step", "traced steps"),
        *("forecast     first picture after about ", " " * 13),
    )
    begin = shown.index("where the time went")
    verdict = shown[begin : next(place for place, line in enumerate(shown) if line.startswith("final"))]
    assert any(line.startswith("  useful work") for line in verdict) and "try next: " in "\n".join(verdict)
    # the summary's numbers are those of verdict and comparison
    (trained,), (speed,) = ([line for line in shown if line.startswith(word)] for word in ("trained", "speed"))
    (share,) = re.findall(r"sampling and validation +([\d.]+%)", "\n".join(verdict))
    assert f"sampling and validation {share}" in trained
    assert f" {mean_of_points(RATE, RunFolder(one_process).histories()[RATE]):,.4g} images/s, " in speed
    chatter = [line for line in shown if not line.startswith(known) and "images (" not in line and line not in verdict]
    assert not chatter, "\n".join(chatter)


@pytest.mark.launch
def test_the_main_config_trains_on_two_processes_with_profiling_keys_on(tmp_path: Path) -> None:
    """fp16, ZeRO-2 and both timing keys, which crash the stock engine; cut by the layers' times."""
    folder, cache = tmp_path / "runs" / "main", tmp_path / "cache"
    profiled = ["ds.wall_clock_breakdown=true", "ds.flops_profiler.enabled=true", "ds.flops_profiler.profile_step=3"]
    small = ["train.images=448", "logging.log_every_images=64", "optimizer.learning_rate=0.005"]
    small += ["unet.multipliers=[1]", "unet.attention_resolutions=[]"]
    small += ["samples.every_images=null", "evaluation.every_images=null", "ds.pipeline.partition=auto"]
    done = train(2, folder, "-p", "2", config="zero2_fp16.json", overrides=[*TINY, *small, *profiled], cache=cache)
    assert "fp16 on a CPU: stored in fp16, computed in fp32" in done.stdout
    losses = curve(folder)
    assert losses[-1] < 0.7 * losses[0]
    known = json.loads((cache / "ddpm_ds" / "layer_times.json").read_text())
    assert len(known) > 3 and "cut by the layers' times on this device" in done.stdout
    measured = json.loads((folder / "machine.json").read_text())["layer_times"]
    assert {(one["forward"], one["backward"]) for one in measured} <= set(map(tuple, known.values()))
    client, run = mlflow_run(folder)
    stages = [f"flops.stage{stage}.txt" for stage in range(4)]  # two on each process
    profiles = [(folder / "flops" / name).read_text() for name in stages]
    assert all("DeepSpeed Flops Profiler" in profile for profile in profiles) and "ResidualBlock" in "".join(profiles)
    names = ("flops.json", *stages, "table.txt")
    assert sorted(file.path for file in client.list_artifacts(run.info.run_id, "flops")) == [
        f"flops/{name}" for name in names
    ]
    modelled = float(run.data.tags["derived.forward_gflops_per_image"])
    images = int(run.data.tags["derived.micro_batch_images"])
    assert RunFolder(folder).columns(OBSERVATIONS)["flops/forward_gflops"][0] == pytest.approx(modelled * images)
    assert run.data.metrics["train/loss_scale"] == 65536 and "usage/stage1_peak_memory_bytes" in run.data.metrics


@pytest.mark.launch
@pytest.mark.parametrize(
    ("config", "said", "scale"),
    [
        ("zero2_fp16.json", "lowest loss scale", ["ds.fp16.initial_scale_power=4"]),  # few halvings above the lowest
        pytest.param("zero2_bf16.json", "train/loss was not finite", [], marks=pytest.mark.long),
    ],
)
def test_numbers_gone_bad_end_the_run_as_failed_with_what_to_try(
    config: str, said: str, scale: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "bad"
    changes = ["unet.multipliers=[1]", "unet.attention_resolutions=[]", "samples.every_images=null"]
    changes += ["evaluation.every_images=null", "optimizer.learning_rate=1e6", "train.batch_images=8"]
    changes += ["logging.log_every_images=40", *scale]
    done = train(2, folder, "-p", "2", config=config, overrides=[*TINY, *changes], code=3)
    (line,) = error_lines(done.stderr)
    assert said in line and "learning_rate" in line
    assert "Traceback" not in done.stderr
    assert mlflow_run(folder)[1].info.status == "FAILED"
    changes += ["optimizer.learning_rate=1e-3", "train.images=80"]
    train(1, folder, config=config, overrides=[*TINY, *changes])
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(point["step"], point["train/lr"]) for point in points] == [(5, 1e-3), (10, 1e-3)]
    assert all(point["train/loss"] < 2 for point in points), "none of what was left"


@pytest.mark.launch
def test_images_of_a_held_out_source_are_measured_and_never_trained_on(tmp_path: Path) -> None:
    """Training is that of a run without them; a run goes on if they have moved, and refuses others."""
    draws = np.random.default_rng(0)
    np.save(tmp_path / "train.npy", draws.integers(0, 256, (24, 8, 8), np.uint8))
    for name, light in (("dark", 20), ("bright", 250)):
        np.save(tmp_path / f"{name}.npy", np.full((6, 8, 8), light, np.uint8))
    changes = ["data.source=arrays", f"data.path={tmp_path / 'train.npy'}", "data.held_out_images=0"]
    changes += ["unet.multipliers=[1]", "unet.attention_resolutions=[]", "unet.classes=null", "train.label_drop=0"]
    changes += ["samples.every_images=null", "evaluation.every_images=64", "logging.log_every_images=32"]
    runs = tmp_path / "runs"

    def start(name: str, held_out: str, images: int = 64, processes: int = 1, code: int = 0) -> str:
        held_out = "null" if held_out == "null" else str(tmp_path / f"{held_out}.npy")
        overrides = [*TINY, *changes, f"data.held_out_path={held_out}", f"train.images={images}"]
        return train(processes, runs / name, "-p", str(processes), overrides=overrides, code=code).stderr

    for name in ("null", "dark", "bright"):
        start(name, name)
    assert curve(runs / "null") == curve(runs / "dark") == curve(runs / "bright") and len(curve(runs / "null")) == 2
    dark, bright = (curve(runs / name, "eval/loss") for name in ("dark", "bright"))
    assert len(dark) == len(bright) == 1 and dark != bright and not (runs / "null" / "evaluations.jsonl").exists()

    assert "held out other images than those of the data-set cache" in start("dark", "bright", 128, code=2)
    (tmp_path / "dark.npy").rename(tmp_path / "moved.npy")
    assert "moved.npy" in start("dark", "moved", 128, processes=2) and len(curve(runs / "dark", "eval/loss")) == 2


@pytest.mark.launch
def test_buckets_of_aspect_are_trained_alike_in_every_layout_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Three sizes in turn, two in each step: on one process, on two stages, and stopped and resumed on these; some
    images of each are held out.
    """
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    random = np.random.default_rng(0)
    for number in range(48):
        pixels = random.integers(0, 256, ((24, 24), (33, 19), (19, 33))[number % 3], np.uint8)
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    changes = ["data.source=folder", f"data.path={pictures}", "data.image_size=24", "data.held_out_images=7"]
    changes += ["data.buckets.step=8", "data.buckets.images=8", "train.batch_images=16", "train.accumulation=4"]
    changes += ["unet.dropout=0", "unet.attention_resolutions=[]", "unet.attention_levels=[1]", "unet.classes=null"]
    changes += ["logging.log_every_images=16"]
    changes += ["train.label_drop=0", "samples.every_images=null", "evaluation.every_images=64"]
    for name, processes, lengths in (("one", 1, (64,)), ("whole", 2, (64,)), ("resumed", 2, (32, 64))):
        for images in lengths:
            overrides = [*TINY, *changes, f"train.images={images}"]
            done = train(processes, tmp_path / "runs" / name, "-p", str(processes), overrides=overrides)
    assert "images-000000032" in done.stderr
    one, whole, resumed = (tmp_path / "runs" / name for name in ("one", "whole", "resumed"))
    assert the_same(end_of(whole), end_of(resumed))
    assert curve(one) == pytest.approx(curve(whole), rel=1e-5) and len(curve(one)) == 4
    measured = [curve(run, "eval/loss") for run in (one, whole, resumed)]
    assert measured[0] == pytest.approx(measured[1], rel=1e-5) and len(measured[0]) == 1
    assert measured[1] == measured[2][-1:]
    for words in ((), ("--batch-images", "2")):
        assert measured_losses(one, *words) == pytest.approx(recorded_losses(one), rel=1e-5)
    wrong = train(1, tmp_path / "runs" / "wrong", overrides=[*TINY, *changes, "data.buckets.images=48"], code=2)
    assert "there are 41 images beside data.held_out_images = 7, fewer than the 48 that share" in wrong.stderr


@pytest.mark.launch
def test_bad_input_ends_all_ranks_with_one_line_and_code_2(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "never"
    config = str(REPOSITORY / "ds_configs" / "zero0_fp32.json")
    words = ["run", "--processes", "2", str(TRAIN), "--deepspeed_config", config]
    done = subprocess.run(
        [*PROGRAM, *words, "--run-dir", str(folder), "--set", "unet.chanels=3"],
        env={**os.environ, **ONE_THREAD, "MLFLOW_TRACKING_URI": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    wrong = "ddpm_ds: error: --set unet.chanels=3: unet.chanels is unknown; did you mean unet.channels?"
    assert done.stderr.splitlines() == [wrong] and not folder.parent.exists()

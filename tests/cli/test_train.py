"""Bad input: one line with the fix, exit code 2, before any process group, and no run left behind."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddpm_ds.cli import train as command
from ddpm_ds.cli.main import main
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.prepare import Recipes, prepare
from ddpm_ds.ground import device
from ddpm_ds.ground.device import choose_device
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.planning import run_plan
from ddpm_ds.planning.inputs import Machine, machine_like
from tests.launching import REPOSITORY

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
MAIN = REPOSITORY / "ds_configs" / "zero2_fp16.json"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.get(name, "0"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: object) -> str:
    """Return the one line of a refusal."""
    assert command.main(["--deepspeed_config", str(MAIN), *map(str, arguments)]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("ddpm_ds: error: "), err
    assert not (tmp_path / "runs").exists(), "a refused run left something behind"
    return err


REFUSED = {
    "--set unet.chanels=64": "did you mean unet.channels?",
    "--spec nowhere.yaml": "no such run spec",
    "-p 2": "don't divide 1 processes",
    "--sett x=1": "unrecognized arguments",
    "-p two": "'two' is not a whole number",
    f"--note {os.fsdecode(b'caf' + bytes([0xE9]))}": "is not UTF-8 text",
    "--set ds.gradient_cliping=1.0": "did you mean gradient_clipping?",
    "--run-dir file/run": "--run-dir file/run can't be written",
    "--run-dir run --resume never": "--run-dir run holds a run and --resume is never",
    "--run-dir photos": "--run-dir photos is neither empty nor the folder of a run",
    "--run-dir mine/digits-2 --resume digits-1": "has one; did you mean mine/digits-1?",
    **dict.fromkeys(
        [f"--resume {what}" for what in ("nowhere/digits-1", "a\0b", "x" * 5000, "file", "empty")],
        "is no checkpoint, and no run's folder that has one; write a path, such as runs/NAME",
    ),
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(words)[:40])
def test_bad_options_are_refused(words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for folder in ("empty", "run", "photos", "mine/digits-1/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("file", "run/spec.yaml", "photos/holiday.jpg"):
        (tmp_path / file).touch()
    assert REFUSED[words] in refused(capsys, tmp_path, "--set", "data.store_root=s", *words.split(" "))


def test_more_stages_than_layers_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # on one host, so that no rank elsewhere waits for a report
        monkeypatch.setenv(name, "32")
    assert "has mirrored cuts for 7 at most; use fewer stages" in refused(capsys, tmp_path, "-p", "32")
    line = ("--set", "ds.pipeline.schedule=1f1b")
    assert "use at most 17 stages" in refused(capsys, tmp_path, "-p", "32", *line)


PETS = ["data.source=folder", "data.path=pets"]


@pytest.mark.parametrize(
    ("folders", "changes", "said"),
    [
        ([], ["data.source=folder", "data.path=nowhere"], "nowhere"),
        (["pets"], PETS, "pets"),
        (["pets/", "pets/cats", "pets/dogs"], [*PETS, "unet.classes=3"], "but the images have 2 classes; --set unet.c"),
        (
            ["pets/cats", "pets/dogs", "pets/owls", "val/cats", "val/owls"],
            [*PETS, "data.held_out_path=val", "unet.classes=3"],
            "data.held_out_path = val: class 1 is owls, and that of data.path = pets is dogs; give both the same",
        ),
        (
            ["pets/"],
            [*PETS, "unet.classes=10"],
            "unet.classes = 10, but the images have no labels; folders in data.path are classes",
        ),
        (
            [],
            ["data.source=arrays", "data.path=pets.npy", "unet.classes=10"],
            "unet.classes = 10, but the images have no labels; they are the array labels of a .npz",
        ),
    ],
)
def test_images_that_are_missing_or_of_other_classes_are_refused(
    folders: list[str], changes: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Subfolders have pictures, the folder itself has none."""
    np.save(tmp_path / "pets.npy", np.zeros((2, 8, 8), np.uint8))
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        if "/" in folder:
            Image.new("L", (8, 8), len(folder)).save(tmp_path / folder / "one.png")
    changes = [*changes, "data.store_root=s", "data.held_out_images=0"]
    assert said in refused(capsys, tmp_path, *(part for change in changes for part in ("--set", change)))


def test_a_damaged_store_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = load_spec(DIGITS, ["data.store_root=s"])
    prepare(spec.data)
    images = Recipes(spec.data).of().path / "images.npy"
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    assert "images.npy" in refused(capsys, tmp_path, "--set", "data.store_root=s")


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("mlruns", "MLFLOW_TRACKING_URI=mlruns is a path, and MLflow 3 keeps no runs in folders; write sqlite:////"),
        ("file:///data/mlruns", "write sqlite:////data/mlruns/mlflow.db"),
        ("/data/runs.db", "write sqlite:////data/runs.db"),
        ("sqlite:////usr", "sqlite:////usr is a folder; write sqlite:////usr/mlflow.db"),
        ("host:5000", "MLFLOW_TRACKING_URI=host:5000 has no scheme; write http://host:5000"),
        ("postgres://me:hush@db/ml", "postgres://db/ml is no store of MLflow's"),
        ("http://[host", "is no store of MLflow's"),
        ("mysql+none://me:hush@db/ml", "mysql+none://db/ml can't be read; write it as mysql+pymysql://"),
        ("mysql://me:hu/sh@db:hush/ml", "mysql://db can't be read"),
        ("oracle+absent://me:hush@db/ml", "oracle+absent://db/ml is no store"),
    ],
)
def test_a_tracking_uri_that_mlflow_does_not_take_is_refused(
    uri: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    error = refused(capsys, tmp_path)
    assert said in error and "hush" not in error


def test_another_experiment_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another one")
    said = refused(capsys, tmp_path, "--run-dir", tmp_path / "run", "--set", "logging.experiment=mine")
    assert "MLFLOW_EXPERIMENT_NAME=another one differs from logging.experiment = mine" in said
    assert not (tmp_path / "run").exists()
    assert "--set 'logging.experiment=another one', or unset" in said


def test_cuda_asked_for_by_the_environment_and_absent_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ddpm_ds.ground.device._gpus", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert "finds no CUDA device; use --device cpu" in refused(capsys, tmp_path)


WITHOUT_GPU = """
import subprocess, sys
from ddpm_ds.cli import train

def start_child():
    assert "torch" not in sys.modules
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(child.pid)
    return child

train.start_child = start_child
sys.exit(train.main(sys.argv[1:]))
"""


def test_mlflow_is_imported_beside_pytorch_and_its_process_ends_when_the_run_is_refused_after_that(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-c", WITHOUT_GPU, "--deepspeed_config", str(MAIN), "--device", "cuda"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cuda" in done.stderr.splitlines()[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout.splitlines()[-1]), 0)
    assert list(tmp_path.iterdir()) == []


def test_on_cuda_cudnn_times_its_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.backends.cudnn.benchmark", False)
    assert choose_device("cpu").type == "cpu" and not torch.backends.cudnn.benchmark
    assert choose_device("cuda").type == "cuda" and torch.backends.cudnn.benchmark


SMALL = ("unet.channels=64", "train.batch_images=64", "ds.pipeline.activation_checkpoint_interval=0")
FP32 = REPOSITORY / "ds_configs" / "zero0_fp32.json"


@pytest.mark.parametrize(
    ("kind", "config", "processes", "share", "advice"),
    [
        ("cpu", MAIN, 1, 0.85, "--set ds.pipeline.activation_checkpoint_interval=1"),
        ("cpu", MAIN, 1, 0.77, "--set train.accumulation="),
        ("cpu", MAIN, 4, 0.75, "-p 2"),
        ("cpu", MAIN, 1, 0.3, "--set unet.channels="),
        ("cuda", MAIN, 1, 0.55, "--set ds.zero_optimization.offload_optimizer.device=cpu"),
        ("cuda", FP32, 4, 0.3, "ddpm-ds plan"),
    ],
)
def test_a_run_that_is_larger_than_the_memory_is_refused_with_advice_that_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, config: Path, processes: int, share: float, advice: str
) -> None:
    words = ["--deepspeed_config", str(config), *(word for one in SMALL for word in ("--set", one))]

    def machine() -> Machine:
        return machine_like(kind, device.memory_bytes(torch.device(kind)), half=False, devices=processes)

    def check(*typed: str) -> str | None:
        options = command.parse([*words, "-p", "1", *typed])
        plan, run_dir = command.checked(options, processes, ("0",) * processes)
        return command.check_run_memory(options.overrides, plan, run_dir, machine())

    monkeypatch.setattr("ddpm_ds.ground.device.host_memory", lambda: 2**50 if kind == "cpu" else 2**60)
    monkeypatch.setattr("ddpm_ds.ground.device.memory_bytes", lambda *_: 2**50)
    plan, _ = command.checked(command.parse([*words, "-p", "1"]), processes, ("0",) * processes)
    need = run_plan.memory_need(plan, machine(), 0).size
    limited = "ddpm_ds.ground.device.host_memory" if kind == "cpu" else "ddpm_ds.ground.device.memory_bytes"
    for part, found in ((1.2, None), (1.0, "warning")):
        monkeypatch.setattr(limited, lambda *_, part=part: int(need * part))
        assert (check() or "")[:7] == (found or "")
    monkeypatch.setattr(limited, lambda *_: int(need * share))
    with pytest.raises(LayoutError, match=f"needs about .* has .*{re.escape(advice)}") as caught:
        check()
    if typed := re.search(r"use ((?:-p \S+ ?|--set [^\s,]+ ?)+)", str(caught.value)):
        assert check(*typed[1].split()) is None


def test_a_run_larger_than_a_container_s_limit_is_refused_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "cgroup" / "memory.max").write_text(f"{2**24}\n")
    monkeypatch.setattr("ddpm_ds.ground.host.CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr("ddpm_ds.ground.host.OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(command, "_train_with_others", None)
    assert "needs about" in refused(capsys, tmp_path)


@pytest.mark.parametrize("verb", ["train", "plan --processes 1", "prepare", "sweep --vary processes=1 --dry-run"])
def test_the_files_of_a_folder_are_the_defaults_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    """The files that each verb takes: of the current folder, none, or of the run that ``--run-dir`` names."""
    words = [*shlex.split(verb), *(["--dry-run"] if verb == "train" else [])]
    own = ["--set", f"data.store_root={tmp_path / 'store'}"]
    missing = "--spec is missing" if verb != "train" else "--deepspeed_config is missing"
    assert main([*words, *own]) == 2 and missing in capsys.readouterr().err

    def files(folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "spec.yaml").write_text(DIGITS.read_text().replace("name: digits", f"name: {name}"))
        shutil.copy(FP32, folder / "ds_config.json")

    files(tmp_path, "mine")
    json = [] if verb == "prepare" else ["--deepspeed_config ds_config.json"]
    assert main([*words, *own]) == 0
    assert capsys.readouterr().out.startswith(f"taken        {' '.join(['--spec spec.yaml', *json])}\n")
    if json:
        assert main([*words, *own, "--spec", "digits", "--deepspeed_config", str(MAIN)]) == 0
        assert "taken" not in capsys.readouterr().out
    if verb == "train":
        files(tmp_path / "run", "theirs")
        assert main([*words, "--run-dir", "run"]) == 0
        out = capsys.readouterr().out
        assert "taken        --spec run/spec.yaml --deepspeed_config run/ds_config.json\n" in out and "theirs: " in out

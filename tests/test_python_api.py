"""What scripts import from ddpm_ds: the example of docs/python.md runs, names are light, and errors are one line."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import ddpm_ds
from ddpm_ds import SamplerSpec, load_trained, open_run, plan, sample
from ddpm_ds.cli.main import main
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.ground.errors import LONGEST_LINE, LayoutError, SpecError, UserError
from ddpm_ds.tracking.runs import ExperimentError
from tests.evaluate.planted import FAST_SAMPLER, UNLABELLED, plant, trained_of
from tests.launching import REPOSITORY, tiny_spec, write_json

PAGE = (REPOSITORY / "docs" / "python.md").read_text()
POINTS: list[dict[str, float]] = [
    {"step": 1, "train/loss": 1.0, "train/seen_images": 16},
    {"step": 2, "train/loss": 9.0, "train/seen_images": 32},
    {"step": 2, "train/loss": 0.5, "train/seen_images": 32, "perf/mfu": 0.25},
]
"""Log points of a run that has rolled back once."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two checkpoints without classes."""
    folder = tmp_path_factory.mktemp("work") / "runs" / "digits"
    for images in (160, 320):
        plant(folder, images, **UNLABELLED)
    (folder / "spec.yaml").write_text(tiny_spec(**UNLABELLED).model_dump_json())
    write_json(folder / "ds_config.json", {"train_batch_size": 16})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in POINTS) + '{"step": 3, "tr')
    return folder


def test_the_example_of_the_page_runs(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = run_dir.parents[1]
    for name in ("launch", "ds_configs"):
        shutil.copytree(REPOSITORY / name, work / name)
    monkeypatch.chdir(work)
    monkeypatch.setattr("ddpm_ds.training.from_python.TRAIN", ("-c", ""))  # tests/training/test_from_python.py trains
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["losses"] == {16: 1.0, 32: 0.5}
    assert names["config"]["pipeline"]["stages"] in (1, 2)
    assert names["eps"].shape == (1, 1, 8, 8) and names["images"].shape == (16, 1, 8, 8)
    printed = capsys.readouterr().out
    assert "tiny 16 images-000000320" in printed and "no step was traced" in printed


def test_the_page_and_the_package_have_the_same_names() -> None:
    documented = re.findall(r"^\| `(\w+)[(`]", PAGE, re.MULTILINE)
    assert sorted(documented) == sorted(ddpm_ds.__all__) and {*documented} <= {*dir(ddpm_ds)}
    for name in ddpm_ds.__all__:
        assert getattr(ddpm_ds, name).__doc__ and f"    {name} " in (ddpm_ds.__doc__ or "")
    with pytest.raises(AttributeError, match="no attribute 'smaple'"):
        ddpm_ds.smaple  # type: ignore[attr-defined]  # noqa: B018


def test_reading_specs_and_runs_brings_no_torch(run_dir: Path) -> None:
    code = """
import sys
import ddpm_ds
from ddpm_ds import SamplerSpec, load_spec, open_run, plan
assert open_run(sys.argv[1]).metrics["step"] == [1, 2]
heavy = {"torch", "deepspeed", "mlflow", "numpy"} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code, str(run_dir)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_is_its_folder_and_leaves_out_what_a_rollback_has_undone(run_dir: Path) -> None:
    run = open_run(str(run_dir))
    assert run.spec == tiny_spec(**UNLABELLED)
    assert [path.name for path in run.checkpoints] == ["images-000000160", "images-000000320"]
    metrics = run.metrics
    assert metrics["train/loss"] == [1.0, 0.5] and metrics["perf/mfu"][1] == 0.25 and math.isnan(metrics["perf/mfu"][0])
    assert run.evaluations == {} and run.verdict is None
    (run_dir / "verdict.txt").write_text("all is well\n")
    assert run.verdict == "all is well\n"
    with pytest.raises(ExperimentError, match="nothing is not the folder of a run"):
        open_run("nothing")


@pytest.fixture(scope="module")
def trained() -> Trained:
    """Weights of ten classes."""
    return trained_of(tiny_spec())


def test_images_are_those_of_the_command_line(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "drawn"
    options = ["--count", "5", "--first", "2", "--seed", "7", "--sampler", "ddim", "--steps", "3", "--eta", "1"]
    assert main(["sample", str(run_dir), *options, "--device", "cpu", "--out", str(out)]) == 0
    drawn = sample(load_trained(run_dir), 5, sampler=FAST_SAMPLER, seed=7, first=2, batch_images=2)
    for number, image in enumerate(drawn, start=2):
        with Image.open(out / f"{number:06}.png") as file:
            written = torch.frombuffer(bytearray(file.tobytes()), dtype=torch.uint8).view(8, 8)
        assert (written.int() - image[0].int()).abs().max() <= 1


def test_classes_come_in_turn_unless_labels_say_otherwise(trained: Trained) -> None:
    in_turn = sample(trained, 12, sampler=FAST_SAMPLER)
    assert torch.equal(in_turn, sample(trained, 12, sampler=FAST_SAMPLER, labels=range(10)))
    assert not torch.equal(in_turn, sample(trained, 12, sampler=FAST_SAMPLER, labels=[3]))
    assert not torch.equal(in_turn, sample(trained, 12, sampler=FAST_SAMPLER, labels=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampler": SamplerSpec(kind="dpm_solver", eta=0.5)},
            "sampler.eta = 0.5 is used only with sampler.kind: ddim",
        ),
        ({"sampler": SamplerSpec(steps=2000)}, "sampler.steps = 2000 is above the 1000 timesteps"),
        ({"labels": []}, "labels = [] names no class; use None"),
        ({"labels": [3, 10]}, "--labels 10 is out of range: the U-Net has 10 classes, 0 to 9"),
    ],
)
def test_what_can_not_be_drawn_is_one_line(trained: Trained, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        sample(trained, 1, **options)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(ddpm_ds, name) for name in ddpm_ds.__all__ if name != "UserError"
}
ARGUMENTS = [
    (name, argument)
    for name, function in FUNCTIONS.items()
    for argument in (SamplerSpec.model_fields if function is SamplerSpec else signature(function).parameters)
]
endless: list[Any] = []
endless.append(endless)
TEXTS = ["\0", "\ud800", "x" * 5000]
WRONG = [object(), endless, {"a": object()}, torch.ones(3), b"\xff", -1.5, math.nan, 10**5000, *TEXTS]
"""Values that no argument takes."""


@pytest.fixture(scope="module")
def refuses(run_dir: Path, trained: Trained) -> Callable[[str, str, Any], str]:
    """Call a function of the package with a wrong value for one argument; return the line that it raises."""
    usual: dict[str, dict[str, Any]] = {
        "load_spec": {"path": run_dir / "spec.yaml"},
        "load_trained": {"path": run_dir},
        "open_run": {"run": run_dir},
        "plan": {"spec": tiny_spec(), "ds_config": REPOSITORY / "ds_configs" / "zero0_fp32.json", "processes": 1},
        "sample": {"trained": trained, "count": 1, "sampler": FAST_SAMPLER},
        "train": {"spec": "digits", "ds_config": "zero0_fp32", "run_dir": run_dir.with_name("new")},
    }

    def refuse(name: str, argument: str, value: Any) -> str:
        with pytest.raises(UserError) as raised:
            FUNCTIONS[name](**{**usual.get(name, {}), argument: value})
        said = str(raised.value)
        assert all(line.isprintable() and len(line) < LONGEST_LINE + 10 for line in said.split("\n"))
        return said

    return refuse


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_an_argument_does_not_take_is_one_line_that_names_it(
    name: str, argument: str, refuses: Callable[[str, str, Any], str]
) -> None:
    for value in WRONG:
        said = refuses(name, argument, value)
        if not isinstance(value, str):  # which may be the name of a run or a device that there is not
            assert f"{argument} = " in said or f"{argument}." in said


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [
        ("plan", "processes", 10**9, "plan: processes = 1000000000: input should be less than or equal to 65536"),
        ("plan", "flops", 0, "flops = 0: input should be "),
        ("sample", "count", 10**12, "count = 1000000000000: input should be less than or equal to 1000000"),
        ("sample", "first", 2**49, ": input should be less than or equal to 281474976710656"),
        ("SamplerSpec", "sigma_min", 0, "sigma_min = 0 should be a "),
        ("sample", "labels", "3", "are not allowed as a Sequence value or input should be 'all'"),
        ("sample", "trained", "runs/digits", 'trained = "runs/digits": input should be an instance of Trained'),
        ("sample", "sampler", SamplerSpec().model_copy(update={"steps": 10**9}), "sampler.steps = 1000000000: input"),
        ("plan", "spec", tiny_spec().model_copy(update={"name": 5}), "plan: spec.name = 5: input should be"),
        ("plan", "overrides", "ds.zero_optimization.stage=1", "are not allowed as a Sequence value"),
        ("plan", "times", 5, "plan: times = 5: input should be callable"),
        ("load_trained", "device", "meta", "device = meta is unknown; use cpu, cuda or a numbered one such as cuda:0"),
        ("load_trained", "device", "cuda:99", "device = cuda:99, but this process has "),
        ("load_trained", "dtype", torch.int8, "dtype = torch.int8 should be torch.float32 or torch.float16 or"),
        ("SamplerSpec", "step", 5, "sampler.step is unknown; did you mean sampler.steps?"),
        ("SamplerSpec", "kind", "heun", 'sampler.kind = "heun" should be "ddpm" or "ddim"'),
    ],
)
def test_the_line_says_what_the_argument_takes(
    name: str, argument: str, value: Any, message: str, refuses: Callable[[str, str, Any], str]
) -> None:
    assert message in refuses(name, argument, value)


def test_a_guide_of_another_data_type_is_refused(trained: Trained) -> None:
    guide = trained_of(tiny_spec(), seed=2, dtype=torch.float16)
    with pytest.raises(SpecError, match=r"has weights \(device, dtype\) = "):
        sample(trained, 1, sampler=FAST_SAMPLER.model_copy(update={"guidance": 2.0}), guide=guide)


def test_a_plan_leaves_the_environment_unchanged_for_later_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    before = dict(os.environ)
    json_path = write_json(tmp_path / "ds.json", {"optimizer": {"type": "AdamW", "params": {}}})
    found = plan(tiny_spec(), json_path, ["ds.zero_optimization.stage=2"], processes=2, device_kind="l4", top=2)
    assert len(found.best) == 2 and found.ds_config(1)["zero_optimization"]["stage"] in (0, 1, 2)
    assert dict(os.environ) == before
    with pytest.raises(LayoutError, match="--device-kind z80 is not in the planner's table; use b300 or"):
        plan(tiny_spec(), json_path, processes=2, device_kind="z80")
    for number in (2, -1, "first"):
        with pytest.raises(LayoutError, match="is no layout of the plan; use one from 0 to 1"):
            found.ds_config(number)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="nothing fits 2 devices of"):
        plan(tiny_spec(), json_path, processes=2, device_kind="l4", device_memory=1)


def test_a_plan_is_for_this_machines_gpu_where_it_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr("ddpm_ds.ground.device.memory_bytes", lambda device, sharing=None: 2**34)
    json_path = write_json(tmp_path / "ds.json", {"optimizer": {"type": "AdamW", "params": {}}})
    found = plan(tiny_spec(), json_path, processes=2, top=1).predictor.machine
    assert (found.kind, found.memory_bytes) == ("l4", 2**34)

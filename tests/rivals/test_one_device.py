"""``--one-device``: what it compares, what it leaves out, and the command as a user starts it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rivals import abilities, command, one_device_build
from rivals.abilities import Abilities, why_not_here
from rivals.loops import UnetProbe, without_dropout
from rivals.one_device_build import choose
from rivals.one_device_choice import ONE_DEVICE_ROWS, Switches, groups, rounds_and_steps
from rivals.probes import check_probes, tolerance
from rivals.rows_one_device import OurLoop, Start
from rivals.rows_other_unets import DiffusersLoop, dim64

from ddpm_ds.data.prepare import prepare
from ddpm_ds.errors import BadNumbersError, LayoutError
from ddpm_ds.predict.plan import plan_run
from ddpm_ds.train.resolve import decide
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.operations import KeyedDropout
from tests.launching import REPOSITORY

SPECS = REPOSITORY / "launch" / "specs"
PLANTED = Path(__file__).with_name("one_device_planted.py")
CPU = torch.device("cpu")
TINY = (
    "unet.channels=8",
    "unet.norm_groups=4",
    "train.batch_images=4",
    "data.workers=0",
    "optimizer.warmup_images=16",
    "optimizer.learning_rate=0.01",
)
ABLE = Abilities(None, None)


@pytest.fixture(scope="module")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def setting(store_root: Path, config: str = "zero1_fp32.json", *overrides: str, spec: str = "digits.yaml") -> Setting:
    """A tiny U-Net on digits, in this process."""
    path = REPOSITORY / "ds_configs" / config
    root = f"data.store_root={store_root}"
    plan = plan_run(SPECS / spec, [*TINY, root, *overrides], path, world_size=1, stages=None, device="cpu")
    return Setting(decide(plan, CPU), prepare(plan.spec.data), CPU, verbose=False)


def planned(config: str = "zero1_fp32.json", *overrides: str, spec: str = "digits.yaml") -> Setting:
    """The same without images: enough to decide what can run."""
    path = REPOSITORY / "ds_configs" / config
    plan = plan_run(SPECS / spec, overrides, path, world_size=1, stages=None, device="cpu")
    nothing: Any = None
    return Setting(decide(plan, CPU), nothing, CPU, verbose=False)


def losses(row: OurLoop | DiffusersLoop, steps: int) -> list[float]:
    return [float(row.step()) for _ in range(steps)]


def test_diffusers_and_ours_train_the_same_whatever_is_switched_on(store_root: Path) -> None:
    start = Start.of(setting(store_root))
    theirs = losses(DiffusersLoop(start, compiled=False), 6)
    assert theirs[-1] != theirs[3]  # weights move
    for switches in (Switches(), Switches(channels_last=True, fused_adamw=True)):
        assert losses(OurLoop(start, switches), 6) == pytest.approx(theirs, rel=1e-4)


def test_a_loss_scale_changes_nothing_but_rounding(store_root: Path) -> None:
    seen = "optimizer.epsilon=0.01"  # Adam would hide a wrong scale of the gradients
    wide, narrow = (
        losses(OurLoop(Start.of(setting(store_root, config, seen)), Switches()), 10)
        for config in ("zero1_fp32.json", "zero2_fp16.json")
    )
    assert narrow == pytest.approx(wide, rel=2e-3)


def test_nothing_that_is_compared_begins_at_zero(store_root: Path) -> None:
    start = Start.of(setting(store_root))
    assert all(parameter.any() for parameter in start.unet.parameters())
    probe = OurLoop(start, Switches()).probe(next(start.setting.batches(1, 0)))
    assert probe.prediction.abs().mean() > 0.1 and probe.gradient_norm > 0.1


@pytest.mark.parametrize("config", ["zero2_fp16.json", "zero2_bf16.json"])
def test_sixteen_bit_weights_have_masters_that_small_steps_add_up_in(config: str, store_root: Path) -> None:
    start = Start.of(setting(store_root, config, "optimizer.learning_rate=1e-7", "optimizer.warmup_images=0"))
    row = OurLoop(start, Switches())
    weights = [parameter.clone() for parameter in row.model.parameters()]
    assert weights[0].dtype is not torch.float32
    masters = [master.detach().clone() for master in row._update._masters]
    for _ in range(3):
        row.step()
    moved = [float((new.detach() - old).abs().max()) for new, old in zip(row._update._masters, masters, strict=True)]
    assert min(moved) > 1e-7 and max(moved) < 4e-7  # a step of Adam moves by the learning rate
    for new, old, master in zip(row.model.parameters(), weights, row._update._masters, strict=True):
        assert torch.equal(new, master.to(old.dtype))


def test_a_probe_lowers_a_loss_scale_that_overflows_and_leaves_everything_as_it_was(store_root: Path) -> None:
    start = Start.of(setting(store_root, "zero2_fp16.json", "unet.dropout=0.5"))
    micro_batch = next(start.setting.batches(1, 0))
    row = OurLoop(start, Switches())
    normal = row.probe(micro_batch)
    row._update._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    assert row.probe(micro_batch).gradient_norm == pytest.approx(normal.gradient_norm, rel=1e-2)
    assert row._update._scaler.get_scale() == 2.0**40
    assert all(parameter.grad is None for parameter in row.model.parameters())
    assert {part.rate for part in row.model.modules() if isinstance(part, KeyedDropout)} == {0.5}


def test_dropout_of_both_kinds_is_off_inside_and_on_again_outside() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), KeyedDropout(0.25, 0, 0))
    with without_dropout(model):
        assert model[0].p == 0.0 and model[1].rate == 0.0
    assert model[0].p == 0.5 and model[1].rate == 0.25


PROBE = UnetProbe(torch.tensor([[3.0, 4.0]]), 1.0, 2.0)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(PROBE, prediction=torch.tensor([[3.0, 4.1]])), "prediction of all"),
        (replace(PROBE, loss=1.1), "loss of all"),
        (replace(PROBE, gradient_norm=2.1), "gradients' norm of all"),
        (replace(PROBE, gradient_norm=math.nan), "gradients' norm of all"),
    ],
)
def test_a_row_that_computes_something_else_is_refused(other: UnetProbe, what: str) -> None:
    with pytest.raises(BadNumbersError, match=f"{what} differs from that of plain by .*nothing is timed"):
        check_probes({"plain": PROBE, "all": other}, 1e-2)
    assert check_probes({"plain": PROBE, "all": replace(PROBE, loss=1.001)}, 1e-2)["all"].loss == pytest.approx(1e-3)


def test_what_rounding_explains_depends_on_precision_and_on_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tolerance("fp32", CPU) < tolerance("fp16", CPU) < tolerance("bf16", CPU)
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert tolerance("fp32", cuda) == 1e-2
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert tolerance("fp32", cuda) == tolerance("fp32", CPU)


@pytest.fixture
def slow_16_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rates = {torch.float32: 50e9, torch.bfloat16: 1e9, torch.float16: 1e9}
    monkeypatch.setattr(abilities, "convolution_rate", rates.__getitem__)
    yield


@pytest.mark.usefixtures("slow_16_bits")
def test_autocast_is_not_waited_for_where_its_arithmetic_is_slow() -> None:
    cifar = planned("zero2_bf16.json", "train.batch_images=8", spec="cifar10.yaml")
    reason = why_not_here("diffusers", cifar, ABLE)
    assert reason is not None and "runs at 2 GFLOP/s" in reason and "in fp32 at 1e+02" in reason
    assert "a step would take about 149 s" in reason  # 3 x 6.22 G x 8 / 1 G
    assert why_not_here("plain", cifar, ABLE) is None  # computes in fp32 there
    assert why_not_here("diffusers", planned("zero2_bf16.json", "train.batch_images=8"), ABLE) is None
    assert why_not_here("diffusers", planned("zero1_fp32.json", spec="cifar10.yaml"), ABLE) is None


def test_what_is_missing_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, cifar = planned(), planned(spec="cifar10.yaml")
    monkeypatch.setattr(abilities, "find_spec", lambda package: None)
    said = "denoising_diffusion_pytorch is not installed; pip install 'ddpm_ds[bench]'"
    assert why_not_here("lucidrains", cifar, ABLE) == said
    assert "use --spec launch/specs/cifar10.yaml" in str(why_not_here("ours-dim64", digits, ABLE))
    assert why_not_here("ours-dim64", cifar, ABLE) is None
    unable = Abilities(why_not_compiled="no compiler", why_not_fused="no GPU")
    assert why_not_here("compile", digits, unable) == "no compiler"
    assert why_not_here("fused-kernels", digits, unable) == "no GPU"
    assert why_not_here("all", digits, unable) is None


@pytest.mark.needs_programs("g++|clang++")
def test_on_a_cpu_nothing_is_compiled_unless_it_is_named() -> None:
    digits = planned()
    able, names, reasons = choose(None, digits)
    assert "compile" in reasons and able.why_not_compiled is not None and "all" in names and "engine" in names
    able, names, _ = choose(["compile", "all"], digits)
    assert names == ["compile", "all"] and able.why_not_compiled is None
    with pytest.raises(LayoutError, match="--rows fused-kernels leaves nothing to run: fused-kernels: "):
        choose(["fused-kernels"], digits)


def test_the_other_unet_is_that_of_its_spec_with_the_runs_objective() -> None:
    other = dim64(planned("zero1_fp32.json", "diffusion.loss=huber", spec="cifar10.yaml"))
    assert other.plan.parameters == 16_432_195 and other.plan.spec.diffusion.loss == "huber"
    assert groups(["all", "diffusers", "lucidrains"]) == [["all", "diffusers"], ["lucidrains"]]


def test_time_that_is_left_open_is_used_up_to_a_limit() -> None:
    assert rounds_and_steps(None, None, 1e-3) == (5, 20)
    assert rounds_and_steps(None, None, 12.0) == (5, 2)
    assert rounds_and_steps(None, None, 100.0) == (3, 1)
    assert rounds_and_steps(7, 3, 1e3) == (7, 3)


@pytest.mark.launch
def test_a_wrong_row_is_refused_and_good_ones_are_timed(tmp_path: Path, store_root: Path) -> None:
    file = tmp_path / "result.json"
    sets = [part for value in (*TINY, f"data.store_root={store_root}", "unet.dropout=0.1") for part in ("--set", value)]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [
            *(sys.executable, str(PLANTED), "--one-device", *sets, "--images", "6"),
            *("--deepspeed_config", str(REPOSITORY / "ds_configs" / "zero1_fp32.json")),
            *("--rounds", "2", "--steps-per-round", "1", str(file)),
        ],
        env={**alone, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stderr.splitlines() if "ddpm_ds: error" in line]
    assert "of fused-adamw differs from that of plain" in line and "nothing is timed" in line
    assert done.stdout.count("step ms") == 1
    report = json.loads(file.read_text())
    rows = {row["row"]: row for row in report["rows"]}
    assert list(rows) == ["diffusers", "plain", "channels-last", "fused-adamw", "bare", "engine"]
    assert {row["row"] for row in report["not_run"]} == {"fused-kernels", "lucidrains"}
    for name, row in rows.items():
        assert row["prediction_difference"] < 1e-4 and row["gradient_norm_difference"] < 1e-4
        assert row["images_per_second"] == pytest.approx(6 / row["step_seconds"]["median"])
        flops = 6 * row["macs"] * row["images_per_second"]
        assert row["mfu"] == pytest.approx(flops / report["peak_flops"])
        assert len(row["round_step_seconds"]) == 2
        assert (row["forward_backward_seconds"] is None) == (name == "engine")
        assert row["name"] in done.stdout
    assert rows["diffusers"]["speed"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["diffusers"]["parameters"] == rows["plain"]["parameters"]
    assert rows["plain"]["gradient_norm_difference"] > 0 and report["images"] == 6
    assert f"engine over bare: {report['engine_over_bare']['median']:.3f}" in done.stdout


def test_rows_that_do_not_fit_the_device_together_are_named(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, start: Start, able: Abilities) -> OurLoop:
        if name == "all":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return OurLoop(start, Switches())

    monkeypatch.setattr(one_device_build, "build_one_device_row", full)
    with pytest.raises(LayoutError, match="row all no longer fits the device beside plain; name fewer rows"):
        one_device_build.build_all(
            ["plain", "all"], setting(store_root), ABLE, 1e-4, memory=False, after_row=lambda: None
        )


@pytest.mark.parametrize(
    ("processes", "wrong", "said"),
    [
        ("1", ["--images", "4"], "--images is of --one-device; write --set train.batch_images=N"),
        ("1", ["--one-device", "--rows", "plain,1f1b"], "'1f1b' is no row; rows are diffusers, diffusers-compiled"),
        ("1", ["--one-device", "--images", "0"], "'0' is not a positive number"),
        ("2", ["--one-device"], "--one-device has one process, and 2 were started"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    processes: str, wrong: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, processes)
    config = str(REPOSITORY / "ds_configs" / "zero1_fp32.json")
    assert command.main(["--deepspeed_config", config, *wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_help_names_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ONE_DEVICE_ROWS) and "bench.py --one-device" in out

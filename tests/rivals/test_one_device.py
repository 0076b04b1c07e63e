"""``--one-device``: what it compares, what it leaves out, and the command as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rivals import benchmark, unets
from rivals.rows import Loop, Setting
from rivals.unets import Switches, comparable_unet, diffusers_loop, dim64, missing_switches, our_loop, why_not_here

from ddpm_ds.data.prepare import prepare
from ddpm_ds.errors import LayoutError
from ddpm_ds.planning import decided, plan_run
from ddpm_ds.unet.operations import KeyedDropout
from tests.launching import REPOSITORY, run_ranks

SPECS = REPOSITORY / "launch" / "specs"
PLANTED = Path(__file__).with_name("planted.py")
CPU = torch.device("cpu")
TINY = (
    "unet.channels=8",
    "unet.norm_groups=4",
    "train.batch_images=4",
    "data.workers=0",
    "optimizer.warmup_images=16",
    "optimizer.learning_rate=0.01",
)


@pytest.fixture(scope="module")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def planned(config: str = "zero1_fp32.json", *overrides: str, spec: str = "digits.yaml") -> Setting:
    """A run in this process without images: enough to decide what can run."""
    path = REPOSITORY / "ds_configs" / config
    plan = plan_run(SPECS / spec, overrides, path, world_size=1, stages=None, device="cpu")
    nothing: Any = None
    return Setting(decided(plan, CPU), nothing, CPU)


def setting(store_root: Path, config: str = "zero1_fp32.json", *overrides: str) -> Setting:
    """A tiny U-Net on digits."""
    of = planned(config, *TINY, f"data.store_root={store_root}", *overrides)
    return Setting(of.plan, prepare(of.plan.spec.data), CPU)


def losses(row: Loop, steps: int) -> list[float]:
    return [float(row.step()) for _ in range(steps)]


def test_diffusers_and_ours_train_the_same_whatever_is_switched_on(store_root: Path) -> None:
    own = setting(store_root)
    theirs = losses(diffusers_loop(own, compiled=False, randn=False), 6)
    assert theirs[-1] != theirs[3]  # weights move
    for switches in (Switches(), Switches(channels_last=True, fused_adamw=True)):
        assert losses(our_loop(own, switches), 6) == pytest.approx(theirs, rel=1e-4)


def test_a_loss_scale_changes_nothing_but_rounding(store_root: Path) -> None:
    seen = "optimizer.epsilon=0.01"  # Adam would hide a wrong scale of the gradients
    wide, narrow = (
        losses(our_loop(setting(store_root, config, seen), Switches()), 10)
        for config in ("zero1_fp32.json", "zero2_fp16.json")
    )
    assert narrow == pytest.approx(wide, rel=2e-3)


def test_nothing_that_is_compared_begins_at_zero(store_root: Path) -> None:
    own = setting(store_root)
    assert all(parameter.any() for parameter in comparable_unet(own).parameters())
    probe = our_loop(own, Switches()).probe(next(own.batches(1, 0)))
    assert probe.prediction.abs().mean() > 0.1 and probe.gradient_norm > 0.1


@pytest.mark.parametrize("config", ["zero2_fp16.json", "zero2_bf16.json"])
def test_sixteen_bit_weights_have_masters_that_small_steps_add_up_in(config: str, store_root: Path) -> None:
    row = our_loop(setting(store_root, config, "optimizer.learning_rate=1e-7", "optimizer.warmup_images=0"), Switches())
    weights = [parameter.clone() for parameter in row.model.parameters()]
    assert weights[0].dtype is not torch.float32
    masters = [master.detach().clone() for master in row.optimizer.masters]
    for _ in range(3):
        row.step()
    moved = [float((new.detach() - old).abs().max()) for new, old in zip(row.optimizer.masters, masters, strict=True)]
    assert min(moved) > 1e-7 and max(moved) < 4e-7  # a step of Adam moves by the learning rate
    for new, old, master in zip(row.model.parameters(), weights, row.optimizer.masters, strict=True):
        assert torch.equal(new, master.to(old.dtype))


def test_a_probe_lowers_a_loss_scale_that_overflows_and_leaves_everything_as_it_was(store_root: Path) -> None:
    own = setting(store_root, "zero2_fp16.json", "unet.dropout=0.5")
    micro_batch = next(own.batches(1, 0))
    row = our_loop(own, Switches())
    normal = row.probe(micro_batch)
    row.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    assert row.probe(micro_batch).gradient_norm == pytest.approx(normal.gradient_norm, rel=1e-2)
    assert row.optimizer.scaler.get_scale() == 2.0**40
    assert all(parameter.grad is None for parameter in row.model.parameters())
    assert {part.rate for part in row.model.modules() if isinstance(part, KeyedDropout)} == {0.5}


def test_what_is_missing_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, cifar = planned(), planned(spec="cifar10.yaml")
    unable = {"compile": "no compiler", "fused-kernels": "no GPU", "autocast": "slow"}
    assert (
        why_not_here("compile", digits, unable) == why_not_here("diffusers-compiled", digits, unable) == "no compiler"
    )
    assert why_not_here("fused-kernels", digits, unable) == "no GPU"
    assert why_not_here("diffusers", digits, unable) == "slow"
    assert why_not_here("all", digits, unable) is None
    monkeypatch.setattr(unets, "find_spec", lambda package: None)
    remedy = "denoising_diffusion_pytorch is not installed; pip install 'ddpm_ds[bench]'"
    assert why_not_here("lucidrains", cifar, {}) == remedy
    assert "use --spec launch/specs/cifar10.yaml" in str(why_not_here("ours-dim64", digits, {}))
    assert why_not_here("ours-dim64", cifar, {}) is None


def test_what_takes_minutes_on_a_cpu_is_left_out_unless_it_is_named() -> None:
    assert set(missing_switches(planned(), None)) == {"compile", "fused-kernels"}
    narrow = planned("zero2_fp16.json")  # which no CPU computes in
    assert "name the row in --rows" in missing_switches(narrow, None)["autocast"]
    assert "autocast" not in missing_switches(narrow, ["diffusers", "plain"])
    assert "takes minutes" not in missing_switches(planned(), ["compile"]).get("compile", "")


def test_the_other_unet_is_that_of_its_spec_with_the_runs_objective() -> None:
    other = dim64(planned("zero1_fp32.json", "diffusion.loss=huber", spec="cifar10.yaml"))
    assert other.plan.parameters == 16_432_195 and other.plan.spec.diffusion.loss == "huber"


@pytest.mark.long
@pytest.mark.launch
def test_a_wrong_row_is_refused_and_good_ones_are_timed(tmp_path: Path, store_root: Path) -> None:
    file = tmp_path / "result.json"
    sets = [part for value in (*TINY, f"data.store_root={store_root}", "unet.dropout=0.1") for part in ("--set", value)]
    names = "plain,channels-last,fused-kernels,fused-adamw,diffusers,diffusers-randn,bare,engine,lucidrains"
    config = str(REPOSITORY / "ds_configs" / "zero1_fp32.json")
    words = ("--one-device", *sets, "--images", "6", "--deepspeed_config", config, "--rows", names)
    more = ("--rounds", "2", "--steps-per-round", "1", "--json", str(file), "--host")
    done = run_ranks(1, PLANTED, *words, *more, WRONG="plain,fused-adamw")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stderr.splitlines() if "ddpm_ds: error" in line]
    assert "of fused-adamw differs from that of plain" in line and "nothing is timed" in line
    assert done.stdout.count("step ms") == 1
    report = json.loads(file.read_text())
    rows = {row["row"]: row for row in report["rows"]}
    assert list(rows) == ["diffusers", "diffusers-randn", "plain", "channels-last", "fused-adamw", "bare", "engine"]
    assert {row["row"] for row in report["not_run"]} == {"fused-kernels", "lucidrains"}
    for name, row in rows.items():
        assert row["prediction_difference"] < 1e-4 and row["gradient_norm_difference"] < 1e-4
        assert row["images_per_second"] == pytest.approx(6 / row["step_seconds"]["median"])
        flops = 6 * row["macs"] * row["images_per_second"]
        assert row["mfu"] == pytest.approx(flops / report["peak_flops"])
        assert len(row["round_step_seconds"]) == 2
        assert (row["forward_backward_seconds"] is None) == (name == "engine")
        assert row["name"] in done.stdout
    engine, bare = rows["engine"]["host"], rows["bare"]["host"]
    assert 0 <= engine["launches"] - bare["launches"] < 20 and engine["slow"] == 0 < engine["calls"]
    random, keyed = rows["diffusers-randn"]["host"], rows["diffusers"]["host"]
    assert keyed["launches"] - random["launches"] > 100 and random["waits"] == engine["waits"] == 0
    assert f"{engine['operators']:,}" in done.stdout and "launches" in done.stdout
    assert rows["diffusers"]["speed"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["diffusers"]["parameters"] == rows["plain"]["parameters"]
    assert rows["plain"]["gradient_norm_difference"] > 0 and report["images"] == 6
    assert f"engine over bare: {report['engine_over_bare']['median']:.3f}" in done.stdout


def test_rows_that_do_not_fit_the_device_together_are_named(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, own: Setting, missing: dict[str, str]) -> Loop:
        if name == "all":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return our_loop(own, Switches())

    monkeypatch.setattr(benchmark, "build_one_device_row", full)
    with pytest.raises(LayoutError, match="row all no longer fits the device beside plain; name fewer rows"):
        benchmark.warm_rows(["plain", "all"], setting(store_root), {}, 1e-4, memory=False, host=False)


def test_a_unet_of_its_own_is_compared_with_such_alone(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "build_one_device_row", lambda name, own, missing: our_loop(own, Switches()))
    names = ["plain", "all", "lucidrains", "ours-dim64"]
    _, compared = benchmark.warm_rows(names, setting(store_root), {}, 1e-4, memory=False, host=False)
    assert [known["reference"] for known in compared] == ["plain", "plain", "lucidrains", "lucidrains"]
    assert [known["prediction_difference"] for known in compared] == [0.0, 0.0, None, None]

"""Rows that can run in a layout, and reasons why others can't."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rivals import choice
from rivals.choice import READ_TEXT, ROWS, TORCH_SCHEDULES, bounds_of, why_not
from rivals.deepspeed_rows import TupleLayer, stock_zero_stage
from rivals.rows import Setting

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.planning.inputs import machine_like
from ddpm_ds.planning.run_plan import RunDraft, make_plan
from ddpm_ds.unet.layers import SIZES, OutputLayer, unet_layers
from ddpm_ds.unet.model import UNet
from tests.launching import REPOSITORY, drafted, tiny_text_spec

CONFIGS = REPOSITORY / "ds_configs"
SPECS = REPOSITORY / "launch" / "specs"


def plan_of(processes: int, stages: int, *changes: str, batch: int = 32, micro: int = 8, **files: str) -> RunDraft:
    changes = (f"train.batch_images={batch}", f"train.accumulation={micro}", *changes)
    spec, config = SPECS / files.get("spec", "digits.yaml"), CONFIGS / files.get("config", "zero1_fp32.json")
    return drafted(spec, changes, config, world_size=processes, stages=stages)


DIFFUSERS = ("diffusers", "diffusers-compiled", "diffusers-randn")
PLAIN = dict.fromkeys(("plain", *DIFFUSERS), "runs in one process, and")
REPLICATED = {
    **dict.fromkeys(("folded", "stock-dualpipev", "torch-dualpipev"), "needs 4 micro-batches, and the batch has 3"),
    **dict.fromkeys(("torch", "torch-zbv"), "has no replicas"),
}
DROPPED = dict.fromkeys(DIFFUSERS, "draws other masks; use --set unet.dropout=0")
PIPED = dict.fromkeys(("folded", "planned", "stock-dualpipev", *TORCH_SCHEDULES), "needs 2 stages")


@pytest.mark.parametrize(
    ("plan", "reasons"),
    [
        (plan_of(2, 2), PLAIN),
        (plan_of(4, 2, batch=24, micro=3), PLAIN | REPLICATED),
        (plan_of(1, 1, "unet.dropout=0.1"), PIPED | DROPPED),
        (
            plan_of(1, 1, "diffusion.schedule=edm", "diffusion.objective=v", spec="cifar10_dim64.yaml"),
            PIPED | {"diffusers-randn": "timesteps are whole numbers"},
        ),
        (
            plan_of(2, 2, batch=8, micro=4, spec="tiny_text.yaml"),
            {row: "reads no captions" for row in ROWS if row not in READ_TEXT},
        ),
    ],
)
def test_a_row_that_cannot_run_says_why(
    plan: RunDraft, reasons: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda package: None if package.startswith("denoising") else package)
    found = {row: reason for row in ROWS if (reason := why_not(row, plan)) is not None}
    assert set(found) == set(reasons)
    assert all(reason in found[row] for row, reason in reasons.items())


def test_the_plans_own_cuts_are_used_and_others_made_for_the_other_schedules() -> None:
    plan = plan_of(2, 2)
    assert bounds_of(plan, "planned") == plan.bounds == bounds_of(plan, "folded") and len(bounds_of(plan, "1f1b")) == 3
    line = replace(plan, ds=plan.ds.with_layout(schedule="1f1b", stages=16, micro_batches=32))
    assert "mirrored cuts" in (why_not("folded", line) or "")


def test_every_row_is_cut_by_the_layers_times_as_a_run_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a device whose last layer takes longer than all others together."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ddpm_ds.processes.process_group.decided_by_rank_0", lambda decide, kind: decide())
    monkeypatch.setattr(
        "ddpm_ds.observe.device_speed.time_layer",
        lambda layer, *_: LayerSeconds(*[1.0 if isinstance(layer, OutputLayer) else 0.001] * 2),
    )
    draft, device = plan_of(2, 2), torch.device("cpu")
    plan = make_plan(draft, "aa", machine_like("cpu", 2**34, half=False, devices=2))
    setting, last = Setting(plan, DatasetCache.__new__(DatasetCache), device), len(plan.layers) - 1
    assert last in setting.under("1f1b").bounds and last in setting.under("1f1b", 4).bounds
    assert last not in bounds_of(plan, "1f1b") and setting.under("folded").bounds[-2] == last != plan.bounds[-2]


def test_the_stock_engine_gets_a_zero_stage_under_which_it_trains_right() -> None:
    for config, stages, expected, why in (
        ("zero2_fp16.json", 2, 1, "refuses ZeRO-2"),
        ("zero0_fp32.json", 2, 1, "clips by the first stage's norm alone"),
        ("zero0_fp32.json", 1, 0, ""),
    ):
        zero_stage, reason = stock_zero_stage(plan_of(stages, stages, config=config).ds)
        assert zero_stage == expected and why in reason and bool(why) == bool(reason)


def test_the_relay_gives_every_layer_the_text_that_it_carries_with_a_gradient() -> None:
    spec = tiny_text_spec()
    layers = unet_layers(spec.unet, spec.data.interface)
    text = spec.unet.text
    assert text is not None
    x, context = torch.randn(2, *spec.data.shape), torch.randn(2, text.tokens, text.context_channels)
    inputs = (x, torch.tensor([3.0, 500.0]), torch.randn(2, (text.pooled_channels or 0) + SIZES))
    carry: Any = (torch.arange(2), context, *inputs)
    for number, layer in enumerate(layers):
        carry = TupleLayer(layer, number, 0, reads_text=True).eval()(carry)
    assert torch.equal(carry, UNet(layers, 0).eval()(*inputs, context=context.detach()))
    (given,) = torch.autograd.grad(carry.sum(), [context])
    assert given.shape == context.shape

"""From files and a device to a plan."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddpm_ds.cli.plan import decided_since, describe_plan, stage_table
from ddpm_ds.ground.errors import DsConfigError, LayoutError
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.planning import run_plan
from ddpm_ds.planning.inputs import machine_like
from ddpm_ds.planning.run_plan import (
    RunDraft,
    RunPlan,
    check_memory,
    forecast,
    make_plan,
    memory_need,
    with_decisions,
)
from ddpm_ds.unet.layers import AttentionLayer, Layer
from tests.launching import CUTS, REPOSITORY, drafted

ZERO_2 = REPOSITORY / "ds_configs" / "zero2_bf16.json"
CONFIG = REPOSITORY / "ds_configs" / "zero0_fp32.json"
CPU = machine_like("cpu", 2**34, half=False, devices=1)
DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"


def test_a_plan_says_that_the_planner_has_chosen_its_stages_and_p_chooses_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddpm_ds.ground.device.host_memory", lambda: 4 * 2**33)
    plan = drafted(DIGITS, [], CONFIG, world_size=4, stages=None)
    assert plan.ds.layout.stages == 1
    lines = describe_plan(plan, Path("runs/x")).splitlines()
    assert "layout       4 processes: 1 stage x 4 replicas" in lines
    assert any(line.startswith("stages       on cpu 1 stage x 4 replicas, ") for line in lines)
    assert drafted(DIGITS, [], CONFIG, world_size=4, stages=4).chosen is None


def test_graphs_that_are_asked_for_without_a_gpu_are_refused_and_the_advice_is_a_plan() -> None:
    asked, advised = (drafted(DIGITS, [f"ds.graphs={way}"], ZERO_2, world_size=1, stages=1) for way in ("true", "auto"))
    with pytest.raises(DsConfigError, match=r"graphs = true needs a GPU; use --set ds\.graphs=auto"):
        make_plan(asked, ("a",), machine_like("cpu", 2**34, half=True, devices=1, nodes=1))
    plan = make_plan(advised, ("a",), machine_like("cpu", 2**34, half=True, devices=1, nodes=1))
    assert plan.ds.config.graphs == "auto"


def test_graphs_of_what_no_graph_can_hold_are_refused_unless_they_are_off() -> None:
    zero = "ds.zero_optimization"
    for change in (f"{zero}.offload_optimizer.device=cpu", f"{zero}.stage=0", "ds.optimizer.params.fused=false"):
        config = [change, "ds.bf16.enabled=false"]
        with pytest.raises(DsConfigError, match=r'graphs = true needs .*; give that, or use "auto"'):
            drafted(DIGITS, [*config, "ds.graphs=true"], ZERO_2, world_size=1, stages=1)
        drafted(DIGITS, [*config, "ds.graphs=auto"], ZERO_2, world_size=1, stages=1)


def test_what_a_device_decides_is_an_integer_and_an_axis_in_the_plan() -> None:
    draft = drafted(DIGITS, [], CONFIG, world_size=4, stages=2, hosts="aabb")
    layout = make_plan(draft, "aabb", machine_like("cpu", 2**32, half=False, devices=4, nodes=2)).ds.layout
    assert (layout.checkpoint_interval, layout.in_flight, layout.across_hosts) == (0, 4, "stages")
    assert (draft.ds.layout.checkpoint_interval, draft.ds.layout.across_hosts) == ("auto", "auto")


def test_a_forecast_counts_steps_pictures_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["train.images=64000", "samples.every_images=16000", "samples.count=96", "sampler.steps=50"]
    changes += ["evaluation.every_images=null", "checkpoint.every_minutes=null", "checkpoint.every_images=null"]
    plan = make_plan(drafted(DIGITS, changes, CONFIG, world_size=1, stages=1), ("a",), CPU)
    monkeypatch.setattr(run_plan, "_step_seconds", lambda plan, device: (2.4, 0.0))
    monkeypatch.setattr(run_plan, "picture_seconds", lambda plan: 60.0)
    monkeypatch.setattr(run_plan, "SAVED_BYTES", 0)
    words = "forecast     first picture after about 11 min, done after about 44 min"  # 1 minute each, beside 40
    assert forecast(plan, torch.device("cpu"), 0) == words
    resumed = forecast(plan, torch.device("cpu"), 32000)
    assert resumed.endswith("first picture after about 11 min, done after about 22 min")
    monkeypatch.setattr(run_plan, "SAVED_BYTES", 5e8 * 600 / plan.parameters)
    assert forecast(plan, torch.device("cpu"), 0).endswith("done after about 54 min")
    monkeypatch.setattr(run_plan, "FIRST_PICTURE_SECONDS", 61)
    assert forecast(plan, torch.device("cpu"), 0).endswith("done after about 55 min"), "one before the first step"
    assert forecast(plan, torch.device("cpu"), 32000).endswith("done after about 32 min")
    monkeypatch.setattr(run_plan, "FIRST_PICTURE_SECONDS", 0)
    longer = plan.spec.model_copy(update={"train": plan.spec.train.model_copy(update={"images": 72000})})
    monkeypatch.setattr(run_plan, "SAVED_BYTES", 0)
    assert forecast(replace(plan, spec=longer), torch.device("cpu"), 0).endswith("after about 50 min"), "one at the end"
    none = plan.spec.model_copy(update={"samples": plan.spec.samples.model_copy(update={"every_images": None})})
    assert forecast(replace(plan, spec=none), torch.device("cpu"), 0) == "forecast     done after about 40 min"


def test_a_step_is_forecast_by_measured_layers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, device = make_plan(drafted(DIGITS, [], CONFIG, world_size=1, stages=1), ("a",), CPU), torch.device("cpu")
    times: list[float] = []
    for seconds in (0.1, 0.2):
        monkeypatch.setattr("ddpm_ds.observe.device_speed.time_layer", lambda *given, s=seconds: LayerSeconds(s, 2 * s))
        times.append(run_plan._step_seconds(plan, device)[0])
    assert times[1] == pytest.approx(2 * times[0], rel=0.05)  # beside the optimizer
    known = replace(plan.machine, layer_times=(LayerSeconds(0.1, 0.2),) * len(plan.layers))
    expected = pytest.approx(0.3 * len(plan.layers), rel=0.05)
    assert run_plan._step_seconds(replace(plan, machine=known), device) == (expected, 0)


@pytest.mark.parametrize("schedule", ["1f1b", "planned"])
def test_auto_cuts_by_the_times_of_the_layers_where_they_differ_from_flops(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is slow on the planted device: flops give one rank three of the four layers of it or more."""

    def planted(layer: Layer, *_: object) -> LayerSeconds:
        seconds = 0.1 if isinstance(layer, AttentionLayer) else 0.001
        return LayerSeconds(seconds, 2 * seconds)

    def planned(partition: str) -> tuple[RunPlan, str]:
        """The plan, and what is printed when it is made."""
        changes = [f"ds.pipeline.schedule={schedule}", *([f"{CUTS}={partition}"] if partition else [])]
        draft = drafted(DIGITS, changes, CONFIG, world_size=2, stages=2)
        plan = with_decisions(make_plan(draft, "aa", replace(CPU, devices=2)), torch.device("cpu"))
        return plan, decided_since(draft, plan)

    def heaviest(plan: RunPlan) -> int:
        """The attention layers of the rank that has most."""
        ranks = [0, 0]
        for stage, (first, stop) in zip(plan.stages, itertools.pairwise(plan.bounds), strict=True):
            ranks[stage.rank] += sum(isinstance(layer, AttentionLayer) for layer in plan.layers[first:stop])
        return max(ranks)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ddpm_ds.observe.device_speed.time_layer", planted)
    monkeypatch.setattr("ddpm_ds.processes.process_group.decided_by_rank_0", lambda decide, kind: decide())
    (timed, said), (by_flops, nothing) = planned(""), planned("flops")
    assert heaviest(timed) == 2 < heaviest(by_flops), (timed.bounds, by_flops.bounds)
    assert said == f"\ncut by the layers' times on this device\n{stage_table(timed, printed=True)}" and not nothing
    assert timed.machine.layer_times == tuple(map(planted, timed.layers)) and by_flops.machine.layer_times is None
    monkeypatch.setattr("ddpm_ds.observe.device_speed.time_layer", lambda *_: pytest.fail("was timed again"))
    (again, _), (listed, as_above) = planned("auto"), planned(str(list(timed.bounds[1:-1])))
    assert again.bounds == timed.bounds == listed.bounds
    assert decided_since(timed, again) == "\ncut by the layers' times on this device, as above" and not as_above


@pytest.mark.parametrize(
    ("change", "back"),
    [
        ("ema.on_host=true", "ema.on_host=false"),
        ("ds.zero_optimization.offload_optimizer.device=cpu", "ds.zero_optimization.offload_optimizer.device=none"),
    ],
)
def test_a_host_too_small_for_its_share_is_refused_with_what_may_lie_on_the_gpus(
    change: str, back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks of one host copy 16 bytes of each parameter for a checkpoint, besides what the files put there."""
    monkeypatch.setattr("ddpm_ds.planning.memory.STAGING_BYTES", 2**10)
    gpus = machine_like("NVIDIA H100", 80 * 2**30, half=True, devices=8)

    def again(changes: Sequence[str], stages: int) -> RunDraft:
        return drafted(DIGITS, [change, *changes], ZERO_2, world_size=8, stages=stages, hosts="aaaaaaaa")

    monkeypatch.setattr("ddpm_ds.ground.device.host_memory", lambda: 2)
    draft = again([], 1)
    need = memory_need(draft, gpus, 0)
    assert need.where == "machine" and need.size > 16 * draft.parameters
    monkeypatch.setattr("ddpm_ds.ground.device.host_memory", lambda: int(need.size / 1.2))
    with pytest.raises(
        LayoutError, match=rf"^training digits needs .*, and this machine has .*; use --set {back}, or a"
    ):
        check_memory(draft, gpus, 0, again, new=True)
    monkeypatch.setattr("ddpm_ds.ground.device.host_memory", lambda: int(need.size / 1.05))
    assert (check_memory(draft, gpus, 0, again, new=True) or "").startswith("warning")

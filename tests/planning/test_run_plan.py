"""From files and a device to a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpm_ds.cli.plan import describe_plan
from ddpm_ds.ground.errors import DsConfigError
from ddpm_ds.planning.inputs import machine_like
from ddpm_ds.planning.run_plan import make_plan
from tests.launching import REPOSITORY, drafted

ZERO_2 = REPOSITORY / "ds_configs" / "zero2_bf16.json"
CONFIG = REPOSITORY / "ds_configs" / "zero0_fp32.json"
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

"""Space groups in the planner: what their swaps take, and what a rank holds."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpm_ds.cli.plan import describe_plan, report, why
from ddpm_ds.config.ds_model import changed
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.planning.costs import planned_costs, ring_seconds, step_traffic, swap_seconds
from ddpm_ds.planning.decisions import Choice, Plan, choose_layout, layouts, search, space_splits
from ddpm_ds.planning.inputs import Machine, Workload, machine, machine_like
from ddpm_ds.planning.memory import communicator_bytes, pipeline_memory
from ddpm_ds.planning.predictor import Prediction, Predictor
from ddpm_ds.planning.run_plan import RunDraft, check_memory, forecast, make_plan, memory_need
from ddpm_ds.schema.layout import Layout, SpaceSplit, TensorSplit
from ddpm_ds.unet.shards import Swaps, swaps_of
from tests.ds_json import laid_out
from tests.launching import REPOSITORY, drafted, tiny_spec
from tests.planning.small import FUSED, small_job, small_machine

DIGITS, ZERO_2 = REPOSITORY / "launch" / "specs" / "digits.yaml", REPOSITORY / "ds_configs" / "zero2_bf16.json"
ONE = Layout(1, 1, "1f1b", 4, 2, 0, 1, False)
SHARED = replace(ONE, space=SpaceSplit(2))


def job_of() -> Workload:
    return small_job(
        tiny_spec(
            unet={"channels": 32, "attention_resolutions": [], "dropout": 0.0},
            data={"image_size": 64},
            train={"batch_images": 8},
        ),
        on_cpu=True,
    )


@pytest.mark.parametrize("interval", [0, 2])
def test_swaps_of_a_step_take_their_bytes_on_the_link_and_a_wait_each(interval: int) -> None:
    job, bandwidth = job_of(), 1e3
    layout = replace(SHARED, checkpoint_interval=interval)
    machine = small_machine(2, kind="cpu", link_bandwidth=bandwidth)
    layers = job.of(layout).layers
    times, bounds = [LayerSeconds(0.0, 0.0)] * len(layers), (0, len(layers))
    (costs,) = planned_costs(job, machine, layout, bounds, times)
    (phase,) = costs.phases
    expected = [
        one.number * machine.sum_seconds + 4 * 4 * (one.elements + one.statistics) / bandwidth
        for one in swaps_of(layers, interval)
    ]
    ring = ring_seconds(machine, layout, 0, 4 * sum(layer.parameters for layer in layers), 1)
    assert phase.forward_seconds == pytest.approx(expected[0])
    assert expected[1] <= phase.backward_seconds <= expected[1] + 2 * ring
    (alone,) = planned_costs(job, machine, layout, bounds, times, with_sums=False)
    assert alone.phases[0].forward_seconds == 0


def test_ranks_that_share_images_keep_half_of_their_activations_and_of_adams_state() -> None:
    job, bounds = job_of(), (0, len(job_of().layers))
    whole, shared = (pipeline_memory(job, layout, bounds)[0] for layout in (ONE, SHARED))
    assert shared.parts["activations"] < 0.55 * whole.parts["activations"]
    assert shared.parts["weights"] >= whole.parts["weights"]
    replicas = pipeline_memory(job, replace(ONE, replicas=2), bounds)[0]
    assert shared.parts["optimizer"] == replicas.parts["optimizer"] < whole.parts["optimizer"]
    assert communicator_bytes(SHARED, 0) == 2 * communicator_bytes(replace(ONE, replicas=2), 0)


def test_a_measured_swap_counts_in_the_place_of_what_is_assumed() -> None:
    job, machine = job_of(), small_machine(2, kind="cpu")
    own = [one for one in swaps_of(job.of(SHARED).layers, 0)]
    for swap in (None, (0.5, 1e3)):
        wait, bandwidth = swap or (machine.sum_seconds, machine.link_bandwidth)
        expected = sum(one.number * wait + 4 * one.size(4) / bandwidth for one in own)
        found = sum(swap_seconds(job, replace(machine, swap=swap), SHARED, one) for one in own)
        assert found == pytest.approx(expected)


def test_a_group_over_hosts_sends_rows_to_neighbours_and_statistics_to_all() -> None:
    """Four ranks on two hosts: one pair of neighbours is apart, and four pairs of all."""
    job = job_of()
    layout, bounds = replace(ONE, space=SpaceSplit(4)), (0, len(job.layers))
    machine = small_machine(4, kind="cpu", nodes=2, network_bandwidth=1.0)
    wires = step_traffic(job, machine, layout, bounds)
    own = sum(swaps_of(job.of(layout).layers, 0), Swaps())
    rows, others = 4 * 4 * own.rows, 4 * (own.size(4) - 4 * own.rows)
    assert wires.swaps == round(2 * (2 * rows / 2 + 8 * others / 3)) and wires.sums == 0  # two micro-batches
    assert wires.between_hosts == wires.swaps + wires.gradients + wires.weights
    slow = swap_seconds(job, machine, layout, own) - own.number * machine.sum_seconds
    assert slow == pytest.approx(4 * own.size(4)), "the network's bytes a second"
    near = replace(layout, space=SpaceSplit(2), replicas=2)
    assert step_traffic(job, machine, near, bounds).swaps == 0


def test_cuts_follow_the_rows_that_a_rank_has() -> None:
    """All of level 0 is shared by four, and the rest is not: half of a whole U-Net's time is elsewhere."""
    job = job_of()
    predictor = Predictor(job, small_machine(8, kind="cpu", link_bandwidth=1e12, swap=(0.0, 1e12)))
    layout = Layout(2, 1, "1f1b", 4, 2, 0, 1, False)
    shared = replace(layout, space=SpaceSplit(4, (0,)))
    assert predictor.bounds(shared) != predictor.bounds(layout)
    phases = [rank.pass_seconds for rank in predictor.costs(shared)]
    assert max(phases) < max(rank.pass_seconds for rank in predictor.costs(shared, predictor.bounds(layout)))
    waiting = replace(predictor, machine=replace(predictor.machine, swap=(10.0, 1e12)), _cuts={})
    assert waiting.bounds(shared) != predictor.bounds(shared)
    sent, whole = (predictor.costs(one)[0].phases[0].activation_bytes for one in (shared, layout))
    assert sent < whole


def test_gradients_go_around_the_ring_of_all_ranks_that_hold_them() -> None:
    job, machine = job_of(), small_machine(4, kind="cpu")
    bounds, times = (0, len(job.layers)), [LayerSeconds(0.0, 0.0)] * len(job.layers)
    groups, replicas = (
        planned_costs(job, machine, one, bounds, times, with_sums=False)
        for one in (replace(SHARED, replicas=2), replace(ONE, replicas=4))
    )
    assert groups == replicas


def field(size: tuple[int, int], devices: int, kind: str = "h100", **rates: Any) -> Predictor:
    """A weather field of 99 channels, one image a step in bf16, each step a graph: 73 M parameters."""
    spec = tiny_spec(
        data={"source": "arrays", "path": "fields.npz", "values": "float32", "image_size": size, "channels": 99}
        | {"horizontal_flips": False},
        unet={"channels": 128, "multipliers": [1, 2, 2, 2, 2], "blocks_per_level": 4, "attention_resolutions": []}
        | {"dropout": 0.0, "norm_groups": 32, "classes": None},
        train={"batch_images": 1, "label_drop": 0.0},
        sampler={"clip": "none"},
        samples={"count": 1},
    )
    blocks: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "graphs": True}
    job = small_job(spec, **blocks, optimizer=FUSED)
    return Predictor(job, replace(machine(kind, half=True, devices=devices, nodes=1), **rates))


def in_space(predictor: Predictor, devices: int) -> Prediction:
    """One group of all devices, with the levels that take least time."""
    space = next(one for one in space_splits(predictor, devices) if one.size == devices)
    return predictor.predict(replace(ALONE, space=space, zero_stage=2))


ALONE = Layout(1, 1, "1f1b", 1, 1, 0, 0, False)
FIELDS = {(512, 640): (1.79, 3.20, 5.29), (1056, 1792): (1.96, 3.75, 6.83)}
"""Speed of 2, 4 and 8 H100 relative to one (docs/planner.md)."""


@pytest.mark.parametrize("size", FIELDS)
def test_a_field_is_as_much_faster_on_several_gpus_as_the_page_says(size: tuple[int, int]) -> None:
    one = field(size, 1).predict(ALONE)
    for devices, faster in zip((2, 4, 8), FIELDS[size], strict=True):
        shared = in_space(field(size, devices), devices)
        assert one.step_seconds / shared.step_seconds == pytest.approx(faster, rel=0.01)
        assert shared.memory[0].activations < 1.2 / devices * one.memory[0].activations


def looked_for(predictor: Predictor, *, assumes: bool = True) -> Plan:
    """The planner's search of a job's layouts with space groups and without any, on devices of one node."""
    job, devices = predictor.job, predictor.machine.devices
    ways = [(TensorSplit(), one) for one in space_splits(predictor, devices)]
    grouped = (one for split in ways for one in layouts(job, devices, offload=False, split=split))
    return search(predictor, 3, grouped=grouped, assumes=assumes)


def test_space_groups_are_proposed_where_they_save_enough_and_the_proposal_says_what_was_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = looked_for(field((512, 640), 2))
    assert [one.layout.space.size for one in found.best[:2]] == [2, 1]
    assert "1 has space groups of 2: its swaps take 7% of a step, with a wait of 40 µs each (assumed, not " in why(
        found
    )
    config = laid_out(found.ds_config(), found.predictor.job.spec, world_size=2, stages=None, path="plan")
    assert config.layout == found.best[0].layout
    assert [line.split()[:3] for line in report(found).splitlines()][:2] == [["stages", "space", "replicas"], [*"112"]]
    unmeasured = looked_for(field((512, 640), 2), assumes=False)
    assert {one.layout.space.size for one in unmeasured.best} == {1} and unmeasured.in_space is not None
    measured = looked_for(field((512, 640), 2, swap=(2e-5, 3e11)), assumes=False)
    assert measured.best[0].layout.space.size == 2 and "20 µs each (measured)" in why(measured)
    slow = looked_for(field((512, 640), 2, swap=(5e-3, 3e11)))
    assert {one.layout.space.size for one in slow.best} == {1}
    assert "Space groups: the best, " in why(slow) and "replicas would be faster" in why(slow)
    monkeypatch.setattr(
        "ddpm_ds.planning.decisions.LEAST_GAIN", 1 - found.best[0].step_seconds / found.best[1].step_seconds
    )
    assert {one.layout.space.size for one in looked_for(field((512, 640), 2)).best} == {1}, "no more is saved"


def test_what_fits_no_device_is_shared_even_if_no_swap_was_measured() -> None:
    found = looked_for(field((1056, 1792), 4, memory_bytes=10 * 2**30), assumes=False)
    assert {one.layout.space.size for one in found.best} == {4}
    assert "One image does not fit: 4 ranks share it." in why(found)


def opened(job: Workload, **pipeline: Any) -> Workload:
    return replace(job, config=changed(job.config, {"pipeline": {"space": {"size": "auto"}, **pipeline}}))


@pytest.mark.parametrize("tensor", [1, "auto"])
def test_a_run_that_leaves_space_open_shares_what_is_large_on_one_host_if_a_swap_was_measured(tensor: Any) -> None:
    def choice(hosts: str = "aa", size: tuple[int, int] = (512, 640), **rates: Any) -> Choice:
        predictor = field(size, 2, **rates)
        job = opened(predictor.job, tensor={"size": tensor})
        return choose_layout(replace(predictor, job=job), "x.json", hosts, None)

    measured = choice(swap=(2e-5, 3e11))
    assert measured.space is not None and measured.space.size == 2 and measured.stages == 1
    assert measured.keys["pipeline.space"] == measured.space.block
    assert "1 stage x 2 space ranks x 1 replica" in measured.line and measured.line.endswith("chooses otherwise")
    assert "pipeline.space" in measured.line
    for other in (choice(), choice("ab", swap=(2e-5, 3e11)), choice(size=(32, 32), swap=(2e-5, 3e11))):
        assert other.space == SpaceSplit()
    closed = choose_layout(field((512, 640), 2, swap=(2e-5, 3e11)), "x.json", "aa", None)
    assert closed.space is None and closed.keys == {}


LARGE = ["unet.attention_resolutions=[]", "data.image_size=512", "train.batch_images=4", "samples.count=4"]


def test_a_run_that_fits_no_device_is_refused_with_ranks_that_share_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpm_ds.planning.memory.communicator_bytes", lambda layout, rank: 0)
    monkeypatch.setattr("ddpm_ds.ground.device.host_memory", lambda: 2**40)

    def again(changes: Sequence[str], stages: int) -> RunDraft:
        given = [*LARGE, "ds.pipeline.activation_checkpoint_interval=0", *changes]
        return drafted(DIGITS, given, ZERO_2, world_size=4, stages=stages, hosts="aaaa")

    def gpus(size: int) -> Machine:
        return machine_like("NVIDIA H100", size, half=True, devices=4)

    most = 2**40
    shared = again(["ds.pipeline.space.size=4", "train.accumulation=4", *RECOMPUTE], 1)
    needs = memory_need(shared, gpus(most), 0).size
    with pytest.raises(LayoutError, match="so that 4 ranks share an image, or a GPU with ") as found:
        check_memory(again([], 1), gpus(int(needs / 0.89)), 0, again, new=False)
    typed = re.findall(r"--set (\S+?),? ", str(found.value))
    assert "ds.pipeline.space.size=4" in typed
    assert check_memory(again(typed, 1), gpus(int(needs / 0.89)), 0, again, new=False) is None


RECOMPUTE = ["ds.pipeline.activation_checkpoint_interval=1"]


def test_a_forecast_warns_where_swaps_take_a_third_of_a_step_and_its_advice_is_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["ds.pipeline.space.size=2", "train.batch_images=1", "optimizer.warmup_images=0"]
    draft = drafted(DIGITS, [*LARGE[:2], *given], ZERO_2, world_size=2, stages=1, hosts="aa")
    plan = make_plan(draft, "aa", machine_like("NVIDIA H100", 2**36, half=True, devices=2))
    for swap, warned in (((1.0, 1e12), True), ((1e-9, 1e12), False)):
        said = forecast(replace(plan, machine=replace(plan.machine, swap=swap)), torch.device("cpu"), 0)
        assert ("\nwarning      swaps of space groups take " in said) is warned
        if warned:
            typed = re.findall(r"--set '?([^' ]+)", said)
            assert typed == ["ds.pipeline.space={}", "train.batch_images=2"]
            assert drafted(DIGITS, [*LARGE[:2], *given, *typed], ZERO_2, world_size=2, stages=1).ds.layout.replicas == 2


def test_small_images_in_space_groups_are_warned_of() -> None:
    def warnings(size: int) -> list[str]:
        changes = ["ds.pipeline.space.size=2", f"data.image_size={size}", "unet.attention_resolutions=[]"]
        draft = drafted(DIGITS, changes, ZERO_2, world_size=2, stages=1)
        return [line for line in describe_plan(draft, Path("runs/x")).splitlines() if line.startswith("warning")]

    (said,) = warnings(32)
    assert said.startswith("warning      images of 32x32 take a device less time than swaps; replicas would be faster:")
    assert warnings(64) == []

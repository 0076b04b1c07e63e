"""What a run leaves to the planner: the number of stages, and what the memory of its devices decides."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import pytest

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.errors import LayoutError
from ddpm_ds.planning.run_plan import plan_run
from ddpm_ds.predict.decisions import choose_stages, fitted
from ddpm_ds.predict.layouts import Workload
from ddpm_ds.predict.machine import machine_like
from ddpm_ds.predict.memory import activation_bytes, pipeline_memory
from ddpm_ds.predict.predictor import Predictor
from tests.launching import REPOSITORY, tiny_spec

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
ZERO_0, ZERO_1 = (REPOSITORY / "ds_configs" / f"zero{stage}_fp32.json" for stage in (0, 1))
LARGE = {"channels": 512, "multipliers": [1, 1], "blocks_per_level": 2}


def chosen(spec: RunSpec, mib: int, hosts: str = "aaaa", **pipeline: Any) -> tuple[int, str]:
    """The number of stages on processor cores of these hosts with so many MiB each, and the reason."""
    config = json.loads(ZERO_0.read_text())
    config["pipeline"] |= pipeline
    devices = machine_like("cpu", mib * 2**20, half=False, devices=len(hosts), nodes=len(set(hosts)))
    return choose_stages(Predictor(Workload(spec, config, on_cpu=True), devices), ZERO_0, hosts)


def test_what_fits_one_device_is_trained_by_replicas_and_what_does_not_is_cut() -> None:
    large = tiny_spec(unet=LARGE)
    assert chosen(tiny_spec(), 8192)[0] == chosen(large, 8192)[0] == 1
    assert chosen(tiny_spec(), 8192, schedule="folded")[0] in (2, 4)  # a fold has two ranks or more
    assert chosen(large, 1536)[0] > 1


@pytest.mark.parametrize(
    ("mib", "changes", "hosts", "schedule", "said"),
    [
        (64, {"unet": LARGE}, "aaaa", "1f1b", "nothing fits 4 devices"),
        (8192, {"train": {"batch_images": 3}}, "aa", "folded", "train.batch_images"),
    ],
)
def test_what_can_not_be_laid_out_is_one_line(
    mib: int, changes: dict[str, Any], hosts: str, schedule: str, said: str
) -> None:
    with pytest.raises(LayoutError, match=said) as error:
        chosen(tiny_spec(**changes), mib, hosts, schedule=schedule)
    assert "\n" not in str(error.value)


def test_the_hosts_are_part_of_the_choice() -> None:
    """As a plan of that number of stages then says what is split over them."""
    stages, why = chosen(tiny_spec(unet=LARGE), 1536, "aabb")
    assert stages > 1 and ("across nodes" in why) == (stages == 2)


def test_where_memory_is_short_fewer_micro_batches_are_in_flight_before_any_activation_is_computed_again() -> None:
    plan = plan_run(DIGITS, [], ZERO_1, world_size=2, stages=2)
    job, usual = Workload(plan.spec, plan.ds.blocks, on_cpu=True), replace(plan.ds.layout, checkpoint_interval=0)
    enough = max(rank.total for rank in pipeline_memory(job, usual, plan.bounds))
    fewest = 2 * activation_bytes(job, replace(usual, in_flight=2), plan.bounds)
    assert fewest < enough

    def found(memory: int, in_flight: int | Literal["auto"] = "auto") -> tuple[int | str, int | str]:
        layout = fitted(job, replace(plan.ds.layout, in_flight=in_flight), plan.bounds, memory)
        return layout.in_flight, layout.checkpoint_interval

    assert found(enough) == (4, 0) and found(enough - 1) == found(fewest) == (2, 0)
    assert found(fewest - 2)[1] == 1
    assert found(enough - 1, in_flight=4)[0] == 4 and found(enough, in_flight=1)[0] == 1

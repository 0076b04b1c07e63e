"""What a run decides when it knows its devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddpm_ds.predict.layouts import Workload
from ddpm_ds.predict.memory import activation_bytes, pipeline_memory
from ddpm_ds.predict.plan import plan_run
from ddpm_ds.train import resolve
from tests.launching import REPOSITORY

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
CONFIG = REPOSITORY / "ds_configs" / "zero1_fp32.json"


def test_where_memory_is_short_fewer_micro_batches_are_in_flight_before_any_activation_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_run(DIGITS, [], CONFIG, world_size=2, stages=2)
    job, usual = Workload(plan.spec, plan.ds.blocks, on_cpu=True), replace(plan.ds.layout, checkpoint_interval=0)
    enough = max(rank.total for rank in pipeline_memory(job, usual, plan.bounds))
    fewest = 2 * activation_bytes(job, replace(usual, in_flight=2), plan.bounds)
    assert fewest < enough

    def decided(memory: int, in_flight: int | None = None) -> tuple[int | str, int | str]:
        monkeypatch.setattr(resolve, "memory_bytes", lambda device: memory)
        ds = plan.ds if in_flight is None else plan.ds.with_layout(in_flight=in_flight)
        found = resolve.decide(replace(plan, ds=ds), torch.device("cpu")).ds
        return found.layout.in_flight, found.layout.checkpoint_interval

    assert decided(enough) == (4, 0) and decided(enough - 1) == decided(fewest) == (2, 0)
    assert decided(fewest - 2)[1] == 1
    assert decided(enough - 1, in_flight=4)[0] == 4 and decided(enough, in_flight=1)[0] == 1

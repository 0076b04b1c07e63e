"""Placement in nodes, and what rings and links of a layout take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpm_ds.config.ds_config import resolve
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.placement import ACROSS_HOSTS, Grid, run_exchange, traffic
from ddpm_ds.predict.costs import Ring, link, rank_costs, step_traffic
from ddpm_ds.predict.layouts import Candidate, ds_config
from ddpm_ds.predict.stages import Segment
from tests.predict.small import small_job, small_machine

FOLD = Candidate(2, 4, "folded", 2, 8, 0, 1, False)
SEGMENTS = (
    (Segment(0, 3, 100, sent_elements=10, received_elements=0), Segment(9, 12, 60, 0, received_elements=7)),
    (Segment(3, 6, 50, 0, received_elements=10), Segment(6, 9, 30, sent_elements=7, received_elements=0)),
)


def test_stages_or_replicas_lie_in_other_nodes() -> None:
    """Eight devices in two nodes: of 2 stages x 4 replicas either a stage is a node, or each node has two pipelines."""
    machine = small_machine(8, nodes=2)
    turned = replace(FOLD, across="replicas")
    assert [Ring.of(FOLD, machine, stage) for stage in range(2)] == [Ring(4, 4, crosses=False)] * 2
    assert [Ring.of(turned, machine, stage) for stage in range(2)] == [Ring(4, 2, crosses=True)] * 2
    assert link(machine, FOLD)(0, 1).bytes_per_second == machine.network_bandwidth
    assert link(machine, turned)(0, 1).bytes_per_second == machine.link_bandwidth
    four = Candidate(4, 2, "1f1b", 1, 8, 0, 1, False)
    rates = [link(machine, four)(stage, stage + 1).bytes_per_second for stage in range(3)]
    assert rates == [machine.link_bandwidth, machine.network_bandwidth, machine.link_bandwidth]
    alone = Candidate(1, 8, "1f1b", 1, 2, 0, 1, False)
    assert Ring.of(alone, machine, 0) == Ring(8, 4, crosses=True)


def test_replicas_that_straddle_nodes_unevenly() -> None:
    """Three nodes of two, two stages of three replicas: the first has 2 + 1 devices, the second 1 + 2."""
    machine = small_machine(6, nodes=3)
    layout = Candidate(2, 3, "1f1b", 1, 2, 0, 1, False)
    assert [Ring.of(layout, machine, stage) for stage in range(2)] == [Ring(3, 1, crosses=True)] * 2


def test_bytes_of_a_step_are_those_of_the_placement() -> None:
    """As a run of the same layout, cuts and hosts counts them (tests/pipeline/test_placement.py)."""
    task = small_job(bf16={"enabled": True}, zero_optimization={"stage": 2})
    layout, hosts = Candidate(2, 2, "1f1b", 2, 4, 0, 2, False), ("0", "0", "1", "1")
    bounds = partition(task.layers, 2, "flops")
    config = ds_config(task, layout, bounds)
    ds = resolve(config, task.spec, world_size=4, stages=None, path="ds.json")
    for across in ACROSS_HOSTS:
        planned = step_traffic(task, small_machine(4, nodes=2), replace(layout, across=across), bounds)
        counted = traffic(Grid(2, 2, across, hosts), run_exchange(ds, task.layers, bounds))
        assert (planned.activations, planned.gradients, planned.weights) == (
            counted.activations,
            counted.gradients,
            counted.weights,
        )
        assert list(planned.sent.values()) == list(counted.sent.values())
    here = step_traffic(task, small_machine(4), layout, bounds)
    assert here.between_hosts == 0 and here.within_hosts == planned.within_hosts + planned.between_hosts


def test_recomputing_adds_a_forward_to_the_backward_but_not_the_first_layer() -> None:
    task, machine = small_job(), small_machine(8)
    times = [LayerSeconds(1.0, 10.0)] * 12
    plain = rank_costs(task, machine, FOLD, 0, SEGMENTS[0], times)
    assert [(phase.forward_seconds, phase.backward_seconds) for phase in plain.phases] == [(3, 30), (3, 30)]
    again = rank_costs(task, machine, Candidate(2, 4, "folded", 2, 8, 1, 1, False), 0, SEGMENTS[0], times)
    assert [phase.backward_seconds for phase in again.phases] == [32, 33]
    assert [(phase.activation_bytes, phase.gradient_bytes) for phase in plain.phases] == [(80, 0), (0, 56)]


def test_reducing_across_nodes_uses_the_network_of_all_devices_of_a_node() -> None:
    machine = small_machine(8, nodes=2, link_bandwidth=100.0, network_bandwidth=10.0)
    ring = Ring.of(Candidate(1, 8, "1f1b", 1, 2, 0, 1, False), machine, 0)
    assert ring.bandwidth(machine) == 40
    assert ring.seconds(800, 2, machine) == pytest.approx(2 * 800 * 7 / 8 / 40 + 6 * machine.latency_seconds)

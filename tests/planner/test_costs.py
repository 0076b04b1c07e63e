"""Bytes on the wire and placement, counted by hand."""

from __future__ import annotations

import pytest

from ddpm_ds.observe.layer_times import LayerSeconds
from ddpm_ds.planner.costs import Replicas, Traffic, link, rank_costs, traffic
from ddpm_ds.planner.layouts import Layout
from ddpm_ds.planner.stages import Segment
from tests.planner.small import small_job, small_machine

FOLD = Layout(2, 4, "folded", 2, 8, 0, 1, False)
SEGMENTS = (
    (Segment(0, 3, 100, sent_elements=10, received_elements=0), Segment(9, 12, 60, 0, received_elements=7)),
    (Segment(3, 6, 50, 0, received_elements=10), Segment(6, 9, 30, sent_elements=7, received_elements=0)),
)


def test_replicas_are_neighbours_and_stages_lie_in_other_nodes_first() -> None:
    """Eight devices in two nodes: with 2 stages x 4 replicas a stage is a node; with 4 x 2 two stages share one."""
    machine = small_machine(8, nodes=2)
    assert [Replicas.of(FOLD, machine, stage) for stage in range(2)] == [Replicas(4, 4, 0)] * 2
    assert link(machine, FOLD)(0, 1).bytes_per_second == machine.network_bandwidth
    four = Layout(4, 2, "1f1b", 1, 8, 0, 1, False)
    rates = [link(machine, four)(stage, stage + 1).bytes_per_second for stage in range(3)]
    assert rates == [machine.link_bandwidth, machine.network_bandwidth, machine.link_bandwidth]
    alone = Layout(1, 8, "1f1b", 1, 2, 0, 1, False)
    assert Replicas.of(alone, machine, 0) == Replicas(8, 4, 2)


def test_replicas_that_straddle_nodes_unevenly() -> None:
    """Three nodes of two, two stages of three replicas: the first has 2 + 1 devices, the second 1 + 2."""
    machine = small_machine(6, nodes=3)
    layout = Layout(2, 3, "1f1b", 1, 2, 0, 1, False)
    assert [Replicas.of(layout, machine, stage) for stage in range(2)] == [Replicas(3, 1, 2)] * 2


def test_bytes_of_a_step() -> None:
    """Messages: (10 + 7) elements there and back for 16 images of each of 4 replicas, in fp32, to the other node.

    Gradients: over each of 4 edges of a ring 2 x 3/4 of them, and 3/4 of the weights when they are gathered.
    """
    task = small_job()
    messages = 2 * (10 + 7) * 16 * 4 * 4
    edges = (2 * 3 + 3) * 240 * 4
    assert traffic(task, small_machine(8, nodes=2), FOLD, SEGMENTS) == Traffic(edges, messages)
    assert traffic(task, small_machine(8), FOLD, SEGMENTS) == Traffic(edges + messages, 0)


def test_zero_2_reduces_every_micro_batch_and_gathers_once() -> None:
    task = small_job()
    second = Layout(2, 4, "folded", 2, 8, 0, 2, False)
    edges = (8 * 2 * 3 + 3) * 240 * 4
    assert traffic(task, small_machine(8, nodes=2), second, SEGMENTS).within_nodes == edges


def test_recomputing_adds_a_forward_to_the_backward_but_not_the_first_layer() -> None:
    task, machine = small_job(), small_machine(8)
    times = [LayerSeconds(1.0, 10.0)] * 12
    plain = rank_costs(task, machine, FOLD, 0, SEGMENTS[0], times)
    assert [(phase.forward_seconds, phase.backward_seconds) for phase in plain.phases] == [(3, 30), (3, 30)]
    again = rank_costs(task, machine, Layout(2, 4, "folded", 2, 8, 1, 1, False), 0, SEGMENTS[0], times)
    assert [phase.backward_seconds for phase in again.phases] == [32, 33]
    assert [(phase.activation_bytes, phase.gradient_bytes) for phase in plain.phases] == [(80, 0), (0, 56)]


def test_reducing_across_nodes_uses_the_network_of_all_devices_of_a_node() -> None:
    machine = small_machine(8, nodes=2, link_bandwidth=100.0, network_bandwidth=10.0)
    ring = Replicas.of(Layout(1, 8, "1f1b", 1, 2, 0, 1, False), machine, 0)
    assert ring.bandwidth(machine) == 40
    assert ring.seconds(800, 2, machine) == pytest.approx(2 * 800 * 7 / 8 / 40 + 6 * machine.latency_seconds)

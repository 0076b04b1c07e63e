"""Placement in nodes, and what rings and links of a layout take."""

from dataclasses import replace
from typing import Any

import pytest

from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.placement import ACROSS_HOSTS, Grid, run_exchange, traffic
from ddpm_ds.pipeline.schedule import weight_passes
from ddpm_ds.planning.costs import (
    links,
    planned_costs,
    ring_bandwidth,
    ring_seconds,
    step_traffic,
    update_seconds,
    waits,
)
from ddpm_ds.planning.decisions import ds_config
from ddpm_ds.planning.inputs import machine, rank_stages
from ddpm_ds.planning.simulate import typical_programs
from ddpm_ds.schema.layout import Layout, Schedule
from tests.ds_json import laid_out
from tests.planning.small import small_job, small_machine

FOLD = Layout(2, 4, "folded", 2, 8, 0, 1, False)
RATES: dict[str, Any] = {"link_bandwidth": 100.0, "network_bandwidth": 10.0}


@pytest.mark.parametrize(
    ("layout", "devices", "nodes", "rings", "speeds"),
    [
        (FOLD, 8, 2, [100, 100], [10]),  # each stage is a node
        (replace(FOLD, across_hosts="replicas"), 8, 2, [20, 20], [100]),  # two pipelines in each node
        (Layout(4, 2, "1f1b", 1, 8, 0, 1, False), 8, 2, [100] * 4, [100, 10, 100]),
        (Layout(1, 8, "1f1b", 1, 2, 0, 1, False), 8, 2, [40], []),
        (Layout(2, 3, "1f1b", 1, 2, 0, 1, False), 6, 3, [10, 10], [10]),  # 2 + 1 devices, and 1 + 2
    ],
)
def test_what_crosses_nodes_is_as_slow_as_their_network(
    layout: Layout, devices: int, nodes: int, rings: list[float], speeds: list[float]
) -> None:
    """A ring through several nodes is as fast as the network of the fewest devices that a node has in it."""
    machine = small_machine(devices, nodes=nodes, **RATES)
    assert [ring_bandwidth(machine, layout, stage) for stage in range(layout.stages)] == rings
    assert [link.bytes_per_second for link in links(machine, layout)] == speeds


def test_an_all_reduce_goes_around_the_ring_twice() -> None:
    machine, alone = small_machine(8, nodes=2, **RATES), Layout(1, 8, "1f1b", 1, 2, 0, 1, False)
    seconds = ring_seconds(machine, alone, 0, 800, 2)
    assert seconds == pytest.approx(2 * 800 * 7 / 8 / 40 + 6 * machine.latency_seconds)
    assert ring_seconds(machine, replace(alone, replicas=1), 0, 800, 2) == 0


@pytest.mark.parametrize("schedule", ["1f1b", "planned"])
def test_bytes_of_a_step_are_those_of_the_placement(schedule: Schedule) -> None:
    job = small_job(bf16={"enabled": True}, zero_optimization={"stage": 2})
    layout, hosts = Layout(2, 2, schedule, 2, 4, 0, 2, False), ("0", "0", "1", "1")
    bounds = partition(job.layers, 2, "flops", schedule)
    half = typical_programs(schedule, 2, 2, most_kept=2)  # twice as many micro-batches have twice as many passes
    passes = [[2 * count for count in own] for own in weight_passes(half, schedule)]
    config = ds_config(job, layout, bounds)
    ds = laid_out(config, job.spec, world_size=4, stages=None, path="ds.json")
    for across in ACROSS_HOSTS:
        planned = step_traffic(job, small_machine(4, nodes=2), replace(layout, across_hosts=across), bounds, half)
        counted = traffic(Grid(2, 2, across, hosts), run_exchange(ds, job.layers, bounds, passes))
        assert replace(planned, sent={}) == replace(counted, sent={})
        assert list(planned.sent.values()) == list(counted.sent.values())
    here = step_traffic(job, small_machine(4), layout, bounds, half)
    assert here.between_hosts == 0 and here.within_hosts == planned.within_hosts + planned.between_hosts


def test_recomputing_adds_a_forward_to_the_backward_but_not_the_first_layer() -> None:
    job, machine = small_job(), small_machine(8, kind="cpu")
    bounds = partition(job.layers, 2, "flops", "folded")
    times = [LayerSeconds(1.0, 10.0)] * len(job.layers)
    outer = bounds[1], bounds[4] - bounds[3]
    plain, again = (
        planned_costs(job, machine, replace(FOLD, checkpoint_interval=interval), bounds, times)[0].phases
        for interval in (0, 1)
    )
    assert [(phase.forward_seconds, phase.backward_seconds) for phase in plain] == [(n, 10 * n) for n in outer]
    assert [phase.backward_seconds for phase in again] == [11 * outer[0] - 1, 11 * outer[1]]
    sent, received = (rank_stages(job.layers, bounds, "folded")[0][phase] for phase in (0, 1))
    assert (plain[0].activation_bytes, plain[0].gradient_bytes) == (sent.sent_elements * 2 * 4, 0)
    assert (plain[1].activation_bytes, plain[1].gradient_bytes) == (0, received.received_elements * 2 * 4)


def test_a_waiting_message_holds_two_of_a_gpus_multiprocessors_and_is_as_fast_as_they_copy() -> None:
    job = small_job()
    whole, halves = (0, len(job.layers)), (0, 5, len(job.layers))
    times = [LayerSeconds(1.0, 2.0)] * len(job.layers)

    def seconds(kind: str, bounds: tuple[int, ...]) -> float:
        layout = Layout(len(bounds) - 1, 1, "1f1b", 1, 2, 0, 1, False)
        costs = planned_costs(job, small_machine(2, kind=kind), layout, bounds, times)
        return sum(rank.pass_seconds for rank in costs)

    assert seconds("h100", whole) == seconds("cpu", whole) == seconds("cpu", halves) == 3.0 * len(job.layers)
    assert seconds("h100", halves) == pytest.approx(132 / 130 * 3.0 * len(job.layers))
    layout = Layout(4, 1, "1f1b", 4, 1, 0, 0, False)
    inside, across = ([link.bytes_per_second for link in links(machine("h100", half=True, devices=4, nodes=n), layout)]
                      for n in (1, 2))  # fmt: skip
    assert inside == [4e10] * 3 and across == [4e10, pytest.approx(0.7 * 50e9), 4e10]


@pytest.mark.parametrize(
    ("computing", "travelling", "buffers", "expected"),
    [
        ((2, 2, 2), (1, 1, 1), 0, (0, 1)),  # only the last one is waited for
        ((1, 1, 4), (3, 3, 0), 0, (0, 1)),  # 1-4 and 4-7 travel, 0-6 is computed
        ((1, 1, 4), (3, 3, 1), 0, (0, 2)),
        ((1, 1, 4), (3, 3, 1), 2, (0, 2)),
        ((1, 1, 4), (3, 3, 1), 1, (2, 1)),  # the second is ready at 2, and takes the buffer at 4: 4-7, 8-9
        ((0, 0, 0, 0), (2, 2, 2, 2), 2, (4, 4)),
    ],
)
def test_pieces_travel_one_at_a_time_beside_what_is_computed_next(
    computing: tuple[int, ...], travelling: tuple[int, ...], buffers: int, expected: tuple[int, int]
) -> None:
    assert waits(computing, travelling, buffers) == expected


@pytest.mark.parametrize("chunks", [1, 4])
def test_replicas_wait_for_what_the_layers_after_it_do_not_hide(chunks: int) -> None:
    """A backward hides gradients of the layers behind it, and a forward weights of those that follow."""
    machine = small_machine(8, **RATES)
    sizes = [layer.parameters for layer in small_job().layers]
    elements, count = sum(sizes), len(sizes)
    chunk = max(-(-elements // chunks), *(own for layer in small_job().layers for _, own in layer.own_elements))
    job = small_job(zero_optimization={"stage": 1, "reduce_bucket_size": -(-elements // chunks)})
    bounds, layout = (0, count), Layout(1, 8, "1f1b", 1, 2, 0, 1, False)

    def ring(*numbers: int) -> float:
        return sum(ring_seconds(machine, layout, 0, one * 4, 1, one / chunk) for one in numbers)

    pieces = [0]  # in the order of arrival
    for size in reversed(sizes):
        pieces = [*pieces, size] if pieces[-1] >= chunk or not pieces[-1] else [*pieces[:-1], pieces[-1] + size]
    pieces = pieces[1:]
    assert sum(pieces) == elements and len(pieces) == pytest.approx(chunks, abs=1)
    wire, last = ring(*pieces), ring(pieces[-1])
    step = update_seconds(job, machine, layout, elements / 8)

    def waited(zero: int, *seconds: float) -> tuple[float, float, float]:
        """The seconds for gradients in each pass and at the end, and for weights, if a pass of the layers takes so."""
        times = [LayerSeconds(one, one) for one in seconds]
        found = planned_costs(job, machine, replace(layout, zero_stage=zero), bounds, times)[0]
        return found.weight_pass_seconds, found.reduce_seconds, found.optimizer_seconds - step

    nothing, first, behind = [0.0] * count, [10 * wire, *[0.0] * (count - 1)], [*[0.0] * (count - 1), 10 * wire]
    assert waited(1, *nothing) == pytest.approx((0, wire, wire))
    assert waited(2, *nothing) == pytest.approx((wire, 0, wire))
    # the first layer's weights and gradients can't travel beside it, nor those of its chunk
    assert waited(1, *first) == pytest.approx((0, last, last))
    assert waited(1, *behind) == pytest.approx((0, wire, wire))
    # ZeRO-2 has two buffers, which the two pieces before the last take
    assert waited(2, *first) == pytest.approx((ring(*pieces[:-3]), last, last))


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (4, 1), (16, 1), (8, 2)])
def test_all_devices_of_a_host_share_its_memory_when_adam_steps_there(devices: int, nodes: int) -> None:
    """A host steps one to two billion parameters a second, however many processes it has."""
    job = small_job()
    layout = Layout(1, devices, "1f1b", 1, 1, 0, 1, True)
    parameters = sum(layer.parameters for layer in job.layers)
    gpus = replace(machine("l4", half=False, devices=devices, nodes=nodes), launch_seconds=0.0, link_bandwidth=1e30)
    gpus = replace(gpus, network_bandwidth=1e30)
    (costs,) = planned_costs(job, gpus, layout, (0, len(job.layers)), [LayerSeconds(0.0, 0.0)] * len(job.layers))
    copying = parameters / devices * 8 / min(gpus.host_bandwidth, 2.2e10)
    latency = costs.reduce_seconds
    assert 1e9 < parameters / nodes / (costs.optimizer_seconds - copying - latency) < 2e9

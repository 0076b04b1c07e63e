"""Places of stages and replicas, and bytes that leave each host, counted by walking all messages of all processes."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.pipeline.cuts import partition, segments, sent_shapes
from ddpm_ds.pipeline.placement import (
    ACROSS_HOSTS,
    AcrossHosts,
    Grid,
    Sharing,
    across_hosts,
    launched_hosts,
    run_exchange,
    sharing,
    traffic,
)
from ddpm_ds.pipeline.schedule import program
from ddpm_ds.schema.layout import Layout, Schedule
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.spec import Interface
from tests.ds_json import config_of, laid_out
from tests.launching import tiny_spec

SPEC = tiny_spec(unet={"blocks_per_level": 2})
LAYERS = unet_layers(SPEC.unet, Interface(channels=1, size=(8, 8)))
ADAMW = {"type": "AdamW", "params": {"torch_adam": True}}


def hosts_of(*counts: int) -> tuple[str, ...]:
    """Hosts a, b, c ... of so many processes."""
    return tuple(name for name, count in zip("abcdefgh", counts, strict=False) for _ in range(count))


Send = tuple[str, int, int, float]
"""Kind, sending and receiving global rank, bytes."""


def every_message(
    grid: Grid, schedule: Schedule, bounds: tuple[int, ...], micro_batches: int, size: int
) -> Iterator[Send]:
    """Messages that the programs of all pipelines send, with ``size`` bytes for an element of a micro-batch."""
    for replica in range(grid.replicas):
        for stage in range(grid.stages):
            for name, phase, _ in program(schedule, micro_batches, grid.stages, stage):
                if name not in ("SendActivation", "SendGrad"):
                    continue
                start, stop = segments(bounds, schedule, stage)[phase]
                forward = name == "SendActivation"
                shapes = sent_shapes(LAYERS, stop if forward else start, phase=phase, schedule=schedule)
                target = stage + (1 if forward == (phase == 0) else -1)
                here, there = grid.rank(stage, replica), grid.rank(target, replica)
                yield "activations", here, there, size * sum(map(math.prod, shapes))


def every_collective(grid: Grid, schedule: Schedule, bounds: tuple[int, ...], shared: Sharing) -> Iterator[Send]:
    """Messages of the ring algorithms: in each of R - 1 turns of a pass every rank gives 1/R to the next."""
    for stage in range(grid.stages):
        held = segments(bounds, schedule, stage)
        parameters = sum(layer.parameters for start, stop in held for layer in LAYERS[start:stop])
        ring = [rank for rank in range(len(grid.hosts)) if grid.coordinates(rank)[0] == stage]
        for turn in range((grid.replicas - 1) * (shared.reductions * shared.passes + 1)):
            gathers = turn < grid.replicas - 1
            width = shared.weight_bytes if gathers else shared.gradient_bytes
            for place, rank in enumerate(ring):
                following = ring[(place + 1) % len(ring)]
                yield "weights" if gathers else "gradients", rank, following, width * parameters / grid.replicas


ZERO2: dict[str, Any] = {"zero_optimization": {"stage": 2}}
CONFIGS: list[dict[str, Any]] = [
    {},
    ZERO2 | {"communication_data_type": "fp16"},
]
CASES = [
    (2, 2, (2, 2)),
    (2, 2, (3, 1)),
    (2, 2, (1, 1, 1, 1)),
    (4, 2, (4, 4)),
    (2, 4, (3, 3, 2)),
    (2, 3, (2, 2, 2)),
    (1, 4, (2, 2)),
    (4, 1, (1, 3)),
    (2, 2, (4,)),
]


@pytest.mark.parametrize("across", ACROSS_HOSTS)
@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
@pytest.mark.parametrize(("stages", "replicas", "counts"), CASES)
def test_the_bytes_that_cross_hosts_are_those_of_every_message(
    stages: int, replicas: int, counts: tuple[int, ...], schedule: Schedule, across: AcrossHosts
) -> None:
    if schedule == "folded" and stages == 1:
        return
    bounds = partition(LAYERS, stages, "flops", schedule)
    grid = Grid(stages, replicas, across, hosts_of(*counts))
    micro_batches, micro = 2 * stages, 3
    config = config_of(**CONFIGS[(stages + replicas) % len(CONFIGS)])
    layout = Layout(stages, replicas, schedule, micro, micro_batches, 0, config.zero_optimization.stage, False)
    shared = sharing(config, layout)
    found = traffic(grid, run_exchange(ResolvedDsConfig(layout, config), LAYERS, bounds))
    crossing: dict[str, float] = defaultdict(float)
    by_host: dict[Hashable, float] = dict.fromkeys(grid.hosts, 0.0)
    messages = [
        *every_message(grid, schedule, bounds, micro_batches, 4 * micro),
        *every_collective(grid, schedule, bounds, shared),
    ]
    for kind, source, target, size in messages:
        if grid.hosts[source] != grid.hosts[target]:
            crossing[kind] += size
            by_host[grid.hosts[source]] += size
        else:
            crossing["within"] += size
    counted = (found.activations, found.gradients, found.weights, found.within_hosts)
    assert counted == pytest.approx([crossing[kind] for kind in ("activations", "gradients", "weights", "within")])
    assert found.sent == pytest.approx(by_host)
    assert (found.between_hosts, found.busiest) == pytest.approx((sum(by_host.values()), max(by_host.values())))


def test_zero_2_reduces_weight_gradients_after_their_own_passes_and_all_others_after_each_micro_batch() -> None:
    """Two replicas of eight micro-batches: half of 4 bytes each goes to the other."""
    bounds = partition(LAYERS, 2, "flops", "planned")

    def gradients(stage: int, reductions: list[list[float]]) -> tuple[float, ...]:
        config = config_of(zero_optimization={"stage": stage})
        layout = Layout(2, 2, "planned", 1, 8, 0, stage, False)
        return run_exchange(ResolvedDsConfig(layout, config), LAYERS, bounds, reductions).gradients

    (down, up), _ = ([LAYERS[start:stop] for start, stop in segments(bounds, "planned", rank)] for rank in range(2))
    weights = sum(3 * layer.weights for layer in down) + sum(1.5 * layer.weights for layer in up)
    vectors = sum(layer.parameters - layer.weights for layer in (*down, *up))
    each = gradients(2, [[8, 8], [8, 8]])
    assert gradients(2, [[3, 1.5], [8, 8]]) == (2 * weights + 2 * 8 * vectors, each[1])
    assert gradients(1, [[3, 1.5], [8, 8]]) == tuple(count / 8 for count in each)


# -------------------------------------------------------------------------------- the axis across hosts


def resolved(stages: int, world_size: int = 4, **config: Any) -> ResolvedDsConfig:
    spec = tiny_spec(train={"batch_images": config.pop("batch_images", 16)})
    values = {"optimizer": ADAMW, **config, "pipeline": {"schedule": "1f1b", **config.get("pipeline", {})}}
    return laid_out(values, spec, world_size=world_size, stages=stages)


def test_auto_takes_the_axis_that_sends_less_from_the_busiest_host() -> None:
    """ZeRO-2 reduces gradients after every micro-batch; a large batch is many activations and one reduction."""
    hosts = hosts_of(2, 2)
    for ds, expected in (
        (resolved(2, **ZERO2), "stages"),
        (resolved(2, batch_images=256), "replicas"),
        (resolved(2, batch_images=256, pipeline={"across_hosts": "stages"}), "stages"),
        (resolved(2, pipeline={"across_hosts": "replicas"}, **ZERO2), "replicas"),
    ):
        bounds = partition(LAYERS, 2, "flops")
        sent = run_exchange(ds, LAYERS, bounds)
        busiest = {across: traffic(Grid(2, 2, across, hosts), sent).busiest for across in ACROSS_HOSTS}
        assert across_hosts(ds, LAYERS, bounds, hosts) == expected
        assert ds.layout.across_hosts != "auto" or expected == min(ACROSS_HOSTS, key=lambda across: busiest[across])


def test_one_host_one_stage_and_one_replica_leave_no_choice() -> None:
    two, whole = partition(LAYERS, 2, "flops"), (0, len(LAYERS))
    asked = {"across_hosts": "replicas"}
    assert across_hosts(resolved(2, pipeline=asked), LAYERS, two, hosts_of(4)) == "stages"
    assert across_hosts(resolved(2, 2, pipeline=asked), LAYERS, two, hosts_of(1, 1)) == "stages"
    assert across_hosts(resolved(1, pipeline={"across_hosts": "stages"}), LAYERS, whole, hosts_of(2, 2)) == "replicas"


@pytest.mark.parametrize(
    ("config", "precision", "zero_stage", "expected"),
    [
        ({}, "fp32", 0, Sharing(1, 2, 4, 0)),
        ({}, "bf16", 0, Sharing(1, 1, 2, 2)),
        ({}, "fp16", 1, Sharing(1, 1, 2, 2)),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "bf16", 1, Sharing(1, 1, 2, 2)),
        ({}, "fp16", 2, Sharing(8, 1, 2, 2)),
        ({"communication_data_type": "fp32"}, "fp16", 2, Sharing(8, 1, 4, 2)),
    ],
)
def test_what_replicas_share(config: dict[str, Any], precision: Any, zero_stage: int, expected: Sharing) -> None:
    blocks = {} if precision == "fp32" else {precision: {"enabled": True}}
    layout = Layout(1, 2, "1f1b", 1, 8, 0, zero_stage, False)
    assert sharing(config_of(**config, **blocks), layout) == expected


# -------------------------------------------------------------------------------- before the ranks have met


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({}, ("0",) * 4),
        ({"LOCAL_WORLD_SIZE": 2}, ("0", "0", "1", "1")),
        ({"LOCAL_WORLD_SIZE": 2, "CROSS_SIZE": 2}, ("0", "0", "1", "1")),
        ({"LOCAL_WORLD_SIZE": 4, "GROUP_WORLD_SIZE": 1}, ("0",) * 4),
        ({"LOCAL_WORLD_SIZE": 3, "CROSS_SIZE": 2}, ()),
        ({"LOCAL_WORLD_SIZE": 1, "CROSS_SIZE": 2}, ()),
        ({"LOCAL_WORLD_SIZE": 3}, ()),
    ],
)
def test_hosts_of_one_size_are_known_before_the_ranks_have_met(
    variables: dict[str, int], hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "CROSS_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert launched_hosts(4) == hosts

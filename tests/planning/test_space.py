"""Space groups in the planner: what their swaps take, and what a rank holds."""

from dataclasses import replace

import pytest

from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.planning.costs import planned_costs, ring_seconds
from ddpm_ds.planning.inputs import Workload
from ddpm_ds.planning.memory import communicator_bytes, pipeline_memory
from ddpm_ds.schema.layout import Layout, SpaceSplit
from ddpm_ds.unet.shards import swaps_of
from tests.launching import tiny_spec
from tests.planning.small import small_job, small_machine

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

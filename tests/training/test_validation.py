"""Samples and held-out loss through the pipeline: those of one process, on every layout, and training never notices."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.config.ds_config import DS_CONFIGS
from ddpm_ds.config.spec_file import SPECS
from ddpm_ds.diffusion.choices import TARGETS
from ddpm_ds.diffusion.levels import levels_of
from ddpm_ds.pipeline.staged import Give, Take
from ddpm_ds.planning.inputs import machine
from ddpm_ds.planning.run_plan import FIRST_PICTURE_SECONDS, make_plan, picture_seconds
from ddpm_ds.training import validation
from ddpm_ds.training.held_out_loss import HeldOutLoss, channel_names
from ddpm_ds.training.objective import Denoising
from ddpm_ds.training.validation import Previews, Validation
from ddpm_ds.unet.model import UNet
from tests.launching import drafted, tiny_spec
from tests.pipeline.batches import STATISTICS, global_batch
from tests.pipeline.ladder_worker import Process, fields_spec, layers_of, run_cases
from tests.training.validation_worker import NO_IMAGES, WATCHDOG, Look, engine_of, in_memory
from tests.unet.variants import randomise

CPU = torch.device("cpu")
WORKER = Path(__file__).with_name("validation_worker.py")
LOSS_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3}
EDM = {"schedule": "edm", "objective": "v"}
WEIGHTED = {"objective": "v", "weighting": "p2", "zero_terminal_snr": True, "input_perturbation": 0.1}
PIXELS_OFF = {"fp32": 0.01, "fp16": 0.3}
"""Share of the pixels that may round to the neighbouring value."""


@pytest.mark.launch
@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            [
                Look(1, 2, zero=1, guidance=3.0, kind="ddpm", process=WEIGHTED),
                Look(2, 1, "fp16", guidance=2.0, kind="ddim"),
                Look(2, 1, schedule="folded", kind="dpm_solver", guidance=2.0, process=EDM, between=(0.1, 50.0)),
                Look(2, 1, text=True, guidance=3.0, between=(0.1, 50.0)),
                Look(2, 1, schedule="folded", text=True, buckets=True),
                Look(1, 2, zero=1, text=True, buckets=True),
                Look(1, 1, zero=1, guidance=3.0, kind="ddpm", space=2),
            ],
            id="2 processes",
        ),
        pytest.param(
            [
                Look(1, 2, zero=1, guidance=3.0, kind="ddpm"),
                Look(2, 1, schedule="folded", process=WEIGHTED),
                Look(2, 1, schedule="folded", text=True, guidance=3.0),
                Look(1, 2, zero=1, text=True),
                Look(2, 1, text=True, guidance=3.0, kind="ddim", between=(0.1, 50.0)),
                Look(2, 1, "fp16", text=True, buckets=True),
            ],
            id="2 processes, more",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [
                Look(2, 2, "fp16", guidance=2.0, across="replicas"),
                Look(2, 2, count=1, zero=0),
                Look(4, 1, count=20, zero=1),
                Look(2, 2, kind="ddpm", guidance=2.0, schedule="folded", across="replicas"),
                Look(4, 1, "fp16", schedule="folded"),
                Look(2, 2, schedule="folded", text=True, guidance=3.0),
                Look(2, 1, "fp16", guidance=2.0, space=2),
                Look(2, 1, schedule="folded", text=True, guidance=3.0, space=2),
                Look(1, 2, kind="ddpm", across="replicas", space=2),
            ],
            id="4 processes",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_the_pipeline_draws_and_measures_is_that_of_one_process(looks: list[Look], tmp_path: Path) -> None:
    processes = looks[0].stages * looks[0].replicas * looks[0].space
    ranks = run_cases(processes, WORKER, [asdict(look) for look in looks], tmp_path)
    for number, look in enumerate(looks):
        records = [rank[number] for rank in ranks]
        assert all(record["averages_used"] for record in records), look
        assert all(record["put_back"] for record in records), look
        assert all(record["training"] and record["undisturbed"] for record in records), look
        assert records[0]["shape"] == [look.count, 1, 8, 8]
        assert records[0]["pixels"] <= PIXELS_OFF[look.precision], look
        assert look.precision != "fp32" or records[0]["image"] <= 1, look
        expected = records[0]["expected"]
        firsts = [record["held_out"] for record in records if record["held_out"]]
        assert len(firsts) == look.replicas * look.space
        for values in firsts:
            assert values == pytest.approx(expected, rel=LOSS_TOLERANCE[look.precision]), look


def test_images_that_are_drawn_are_gathered_as_nccl_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions are channels-last, and a prediction of x0 is the image itself."""

    class Forward:
        """A pipeline whose U-Net predicts zeros."""

        def __init__(self, engine: object, images: int) -> None:
            pass

        def run(self, calls: int, give: Give, take: Take, **how: object) -> None:
            for number in range(calls):
                x_t, *_ = give(number)
                take(number, torch.zeros_like(x_t, memory_format=torch.channels_last))

    def all_gather(everyone: list[Tensor], mine: Tensor, group: object) -> None:
        assert mine.is_contiguous() and all(one.is_contiguous() for one in everyone)  # else ValueError on GPUs
        for one in everyone:
            one.copy_(mine)

    monkeypatch.setattr(validation, "ForwardPipeline", Forward)
    monkeypatch.setattr(validation, "broadcast_object", lambda value, kind: value)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    spec = tiny_spec(data={"channels": 3}, diffusion={"objective": "x0"}, sampler={"steps": 2}, samples={"count": 4})
    drawn = Previews(spec, engine_of(2), WATCHDOG, NO_IMAGES).draw()
    assert drawn is not None and drawn.images.shape == (4, 3, 8, 8)


@pytest.mark.parametrize(("seconds", "parts_of"), [(0.4, [1, 8, 8, 3, 1, 8]), (0.6, [1] * 22)])
def test_pictures_and_held_out_loss_end_between_two_parts_when_the_run_is_asked_to_stop(
    seconds: float, parts_of: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step as after one; the averages are put back, and nothing is recorded. Evaluations of more than
    half a second are parts of their own.
    """
    ran, now = list[int](), 0.0

    def run(calls: int, give: Give, take: Take, **how: object) -> None:
        nonlocal now
        now += seconds
        ran.append(calls)
        for number in range(calls):
            take(number, torch.zeros_like(give(number)[0]))

    monkeypatch.setattr(validation, "ForwardPipeline", lambda engine, images: SimpleNamespace(run=run))
    monkeypatch.setattr(validation, "broadcast_object", lambda value, kind: value)
    monkeypatch.setattr(validation, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: None)
    spec = tiny_spec(samples={"every_images": 8, "count": 4}, evaluation={"every_images": 8}, sampler={"steps": 20})
    engine = engine_of(4, sized_layers=[None])
    losses = Mock(calls=20, images=4, **{"inputs.return_value": (torch.zeros(1),)})
    for polls in (0, 2, len(parts_of)):  # 20 steps of a picture, and then 20 calls
        asked, averages, recorder = iter([False] * polls), MagicMock(), MagicMock()
        averages.applied.return_value.__exit__.return_value = False

        def stops(asked: Iterator[bool] = asked) -> bool:
            return next(asked, True)

        previews = Previews(spec, engine, WATCHDOG, NO_IMAGES, stops=stops)
        monkeypatch.setattr(dist, "all_gather", lambda everyone, mine, group: None)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        all_of = Validation(8, 8, engine, averages, losses, previews, WATCHDOG, recorder, stops)
        all_of.after_step(0, done=False)
        assert ran == parts_of[:polls] and averages.applied.return_value.__exit__.called
        assert recorder.log.call_count == 1 and not recorder.evaluation.called
        ran.clear()
    previews._stops = lambda: True
    all_of.before_first_step()
    assert not ran and recorder.log.call_count == 2


@pytest.mark.parametrize(
    ("spec", "device", "devices", "drawn"),
    [
        ("digits", "cpu", 1, True),
        ("folder32", "cpu", 1, True),
        ("cifar10", "cpu", 1, False),
        ("folder", "cpu", 1, False),
        ("folder", "h100", 1, True),
        ("sdxl", "cpu", 1, False),
        ("sdxl", "h100", 4, True),
    ],
)
def test_the_time_of_a_picture_is_predicted_by_its_flops(
    spec: str, device: str, devices: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    path = [] if spec in ("digits", "cifar10") else ["data.path=x"]
    draft = drafted(SPECS / f"{spec}.yaml", path, DS_CONFIGS / "zero2_fp16.json", world_size=devices, stages=1)
    plan = make_plan(draft, ("0",) * devices, machine(device, half=True, devices=devices, nodes=1))
    assert (picture_seconds(plan) < FIRST_PICTURE_SECONDS) is drawn


@pytest.mark.parametrize(("seconds", "drawn"), [(29.0, True), (31.0, False)])
def test_no_picture_before_the_first_step_takes_more_than_half_a_minute(
    seconds: float, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "broadcast_object", lambda value, kind: value)
    averages, recorder, previews = MagicMock(), MagicMock(), MagicMock()
    averages.applied.return_value.__exit__.return_value = False
    parts = engine_of(4), averages, None, previews, WATCHDOG, recorder, lambda: False
    all_of = Validation(8, 8, *parts, picture_seconds=seconds)
    all_of.before_first_step()
    assert previews.draw.called == drawn == recorder.samples.called
    said = "no picture before the first step: it would take about 0:31"
    assert recorder.log.call_args_list == ([] if drawn else [((said,),)])
    all_of.after_step(0, done=True)
    assert previews.draw.call_count == 1 + drawn


@pytest.mark.parametrize("process", ["stored", "regression"])
def test_the_held_out_loss_of_fields_leaves_masked_pixels_out_and_is_by_channel(process: Process) -> None:
    """Image by image and channel by channel, through a U-Net that is given the condition of each."""
    spec, count = fields_spec(process), 10
    batch, unet = global_batch(spec, 0), UNet(layers_of(spec), 0).eval().requires_grad_(False)
    randomise(unet, 1)
    parts = {name: getattr(batch, name)[:count].numpy() for name in ("images", "condition", "mask", "vector")}
    constants = np.random.default_rng(0).random((1, 8, 16), np.float32)
    store = in_memory(batch.labels.numpy(), parts, STATISTICS, constants)
    measuring = HeldOutLoss(spec, CPU, store, np.arange(count), images=4)
    sums = measuring.zeros()
    for call in range(measuring.calls):
        measuring.add(sums, call, unet(*measuring.inputs(call)))
    found = measuring.values(sums)

    objective = Denoising(spec, CPU, STATISTICS, constants, seed=0)
    levels = levels_of(spec.diffusion)
    quantiles = range(10, 100, 10) if process == "stored" else [10]
    losses = np.zeros((len(quantiles), count, 2))  # of each image and channel
    counted = batch.mask[:count].expand(-1, 2, -1, -1).numpy().astype(np.float64) if batch.mask is not None else None
    assert counted is not None and (counted[1] == 0.0).all()
    for place, quantile in enumerate(quantiles):
        prepared = objective.held_out(batch.each(lambda tensor: tensor[:count]), *levels.quantile(quantile))
        prediction = unet(*objective.inputs(prepared))
        target = TARGETS[spec.diffusion.objective].target(prepared.x0, prepared.eps, levels.level(prepared.t).each())
        squares = (prediction - target).double().square().numpy() * counted
        losses[place] = squares.sum((2, 3)) / np.maximum(counted.sum((2, 3)), 1.0)
    assert found["eval/loss"] == pytest.approx(losses.mean(), rel=1e-5), "both channels have one mask"
    for channel in range(2):
        assert found[f"validation/loss_channel_{channel}"] == pytest.approx(losses[:, :, channel].mean(), rel=1e-5)
    of_levels = {name: loss for name, loss in found.items() if name.startswith("validation/loss_t")}
    expected = {f"validation/loss_t{percent}": losses[place].mean() for place, percent in enumerate(quantiles)}
    assert of_levels == (pytest.approx(expected, rel=1e-5) if process == "stored" else {})


def test_channels_are_named_by_their_variables_where_each_has_one() -> None:
    named = fields_spec("stored").data.model_copy(update={"variables": ("t2m", "u 10m/s")})
    assert channel_names(named) == ["t2m", "u_10m_s"]
    assert channel_names(named.model_copy(update={"variables": ("both",)})) == ["0", "1"]
    assert channel_names(tiny_spec().data) == [], "pictures have colours"

"""DeepSpeed's profile of every stage: its counts are the cost model's, in every layout; it is made once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import ForwardPass
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddpm_ds.observe.flops import FlopsProfile, StageProfile, agreement, profile_layers, total
from ddpm_ds.unet.layers import unet_layers
from tests.launching import launch, tiny_spec, write_json
from tests.observe.flops_worker import SETTINGS, STEPS, Told
from tests.pipeline.ladder_worker import Case
from tests.unet.variants import VARIANTS, batch, layers_of, random_unet


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_agree_with_the_cost_model_in_every_layer(name: str) -> None:
    layers, inputs = layers_of(name), batch(name)
    unet = random_unet(layers)
    found, _ = profile_layers(dict(enumerate(unet.layers)), layers, 2, lambda: unet(*inputs), {}, step=1)
    assert [layer.name for layer in found] == [layer.name for layer in layers]
    for layer, expected in zip(found, layers, strict=True):
        assert layer.total.macs == pytest.approx(2 * expected.macs, rel=0.02), layer.name
        assert layer.total.parameters == expected.parameters, layer.name
        assert 2 * layer.total.macs < layer.total.flops < 2.3 * layer.total.macs, layer.name
        assert layer.total.seconds > 0 and total(layer.parts.values()).macs <= layer.total.macs, layer.name
    plain = sdpa_kernel(SDPBackend.MATH)  # PyTorch's counter does not know the one for CPUs
    with FlopCounterMode(display=False) as counter, torch.no_grad(), plain:
        unet(*inputs)
    assert counter.get_total_flops() == pytest.approx(2 * sum(layer.total.macs for layer in found), rel=0.02)
    assert "within 0.0" in agreement([StageProfile(0, 0, found, "")])


def test_a_layer_that_differs_from_the_cost_model_is_named() -> None:
    layers = layers_of("bare")
    unet = random_unet(layers)
    found, _ = profile_layers(dict(enumerate(unet.layers)), layers, 2, lambda: unet(*batch("bare")), {}, step=1)
    half = replace(found[1], modelled_macs=2 * found[1].modelled_macs)
    said = agreement([StageProfile(0, 0, (found[0], half, *found[2:]), "")])
    assert said == "MACs differ from those of the cost model by over 2% in conv_in (-50.0%)."


@pytest.mark.parametrize(("depth", "levels"), [(-1, 3), (0, 1), (1, 2), (9, 3)])
def test_module_depth_counts_from_the_stage_to_the_innermost(depth: int, levels: int) -> None:
    layers = layers_of("bare")
    unet = random_unet(layers)
    settings = {"module_depth": depth, "detailed": depth == -1}
    modules = dict(enumerate(unet.layers))
    _, text = profile_layers(modules, layers, 2, lambda: unet(*batch("bare")), settings, step=7)
    assert [line for line in text.splitlines() if line.startswith("depth")] == [f"depth {d}:" for d in range(levels)]
    assert "Profile Summary at step 7" in text and ("(norm1): GroupNorm(" in text) == settings["detailed"]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class OneStage:
    """What the observer uses of an engine, without the rest."""

    def __init__(self, global_steps: int = 0) -> None:
        self.layers = layers_of("bare")
        unet = random_unet(self.layers)
        setattr(unet.layers, "schedule", "1f1b")  # noqa: B010
        self.module, self.stage_id, self.num_stages, self.micro_batch_size = unet.layers, 0, 1, 2
        self.global_steps = global_steps
        self.grid = SimpleNamespace(get_data_parallel_id=lambda: 0)
        self.forward = lambda **_: unet(*batch("bare"))
        self.execute = {ForwardPass: self.forward}

        self.messages_by_host = False

    def ends(self, phase: int) -> tuple[int, int]:
        return 0, len(self.layers)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.messages_by_host = True
        yield
        self.messages_by_host = False


def observe(folder: Path, steps: list[int], settings: dict[str, Any], *, engine: OneStage | None = None) -> Told:
    """Take steps, of a run of 10, under an observer."""
    engine, told = engine or OneStage(), Told()
    observer = FlopsProfile(engine, engine.layers, settings, folder, told, steps=10)  # type: ignore[arg-type]
    for step in steps:
        observer.begin_step(step)
        profiled = engine.execute[ForwardPass] is not engine.forward
        assert engine.messages_by_host == profiled, "the profiler waits for the device"
        for number in range(2):
            engine.execute[ForwardPass](buffer_id=number)
    observer.finish()
    assert engine.execute[ForwardPass] is engine.forward
    return told


@pytest.mark.usefixtures("alone")
def test_a_rewound_run_is_profiled_once(tmp_path: Path) -> None:
    told = observe(tmp_path, [1, 2, 3, 1, 2, 3], SETTINGS)
    assert [step for step, _ in told.metrics] == [2] and len(told.said) == 1
    assert len(json.loads((tmp_path / "flops.json").read_text())["stages"]) == 1  # of two micro-batches
    assert [step for step, _ in observe(tmp_path, [1, 2], SETTINGS).metrics] == [2]  # the last step is reported too


@pytest.mark.usefixtures("alone")
def test_a_run_that_goes_on_after_the_step_is_not_profiled_again(tmp_path: Path) -> None:
    told = observe(tmp_path, [5, 6], SETTINGS, engine=OneStage(global_steps=4))
    assert told.said == [
        "flops_profiler.profile_step = 2, but the run goes on after step 4: nothing is profiled; write a step from 5 on"
    ]
    assert not told.metrics and not any(tmp_path.iterdir())
    observe(tmp_path, [1, 2, 3], SETTINGS)
    assert vars(observe(tmp_path, [5, 6], SETTINGS, engine=OneStage(global_steps=4))) == vars(Told())


def test_a_step_past_the_end_is_said_in_one_line_and_a_profile_that_is_off_is_silent(tmp_path: Path) -> None:
    late = SETTINGS | {"profile_step": 11}
    told = observe(tmp_path, [1, 10], late)
    assert told.said == [
        "flops_profiler.profile_step = 11, but the run has 10 steps: nothing is profiled; write a step up to 10"
    ]
    assert vars(observe(tmp_path, [1, 2, 3], SETTINGS | {"enabled": False})) == vars(Told())
    assert vars(observe(tmp_path, [1, 2, 3], {})) == vars(Told()) and not any(tmp_path.iterdir())


@pytest.mark.usefixtures("alone")
def test_another_observer_may_have_wrapped_the_same_instruction(tmp_path: Path) -> None:
    engine, told = OneStage(), Told()
    observer = FlopsProfile(engine, engine.layers, SETTINGS, tmp_path, told, steps=10)  # type: ignore[arg-type]
    observer.begin_step(2)
    ours = engine.execute[ForwardPass]
    engine.execute[ForwardPass] = theirs = lambda **arguments: ours(**arguments)
    theirs(buffer_id=0)
    observer.begin_step(3)
    assert engine.execute[ForwardPass] is theirs
    theirs(buffer_id=0)  # passes through
    observer.finish()
    assert len(told.metrics) == 1


@pytest.mark.usefixtures("alone")
def test_output_file_is_where_the_texts_go_and_a_disk_that_refuses_stops_nothing(tmp_path: Path) -> None:
    told = observe(tmp_path / "run", [2], SETTINGS | {"output_file": str(tmp_path / "mine" / "profile")})
    assert "stage 0 of 1" in (tmp_path / "mine" / "profile.stage0.txt").read_text()
    assert told.artifacts == ["flops/profile.stage0.txt", "flops/table.txt", "flops/flops.json"]
    (tmp_path / "file").touch()
    told = observe(tmp_path / "file", [2], SETTINGS)
    assert len(told.metrics) == 1 and not told.artifacts
    assert told.said == [f"{tmp_path / 'file'} can't be written (File exists); training goes on"]


def profiled_cases(processes: int, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The profile of each case as JSON, after its files and metrics have been looked at."""
    file = write_json(folder / "cases.json", cases)
    done = launch(processes, Path(__file__).with_name("flops_worker.py"), str(file), str(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = []
    for number, values in enumerate(cases):
        here, case = folder / str(number), Case(**values)
        profile, told = (json.loads((here / name).read_text()) for name in ("flops.json", "report.json"))
        stages = range(2 * case.stages if case.schedule == "folded" else case.stages)
        texts = [f"flops.stage{stage}.txt" for stage in stages]
        assert told["artifacts"] == [f"flops/{name}" for name in (*texts, "table.txt", "flops.json")]
        ((step, metrics),) = told["metrics"]
        assert step == 2 == profile["step"] and STEPS == 3
        names = {f"flops/stage{stage}_{unit}" for stage in stages for unit in ("gflops", "latency_ms")}
        assert metrics.keys() == {"flops/forward_gflops", *names}
        assert all(value > 0 for value in metrics.values())
        assert metrics["flops/forward_gflops"] == pytest.approx(
            sum(metrics[f"flops/stage{stage}_gflops"] for stage in stages)
        )
        owner = [min(s, 2 * case.stages - 1 - s) if case.schedule == "folded" else s for s in stages]
        assert [stage["stage"] for stage in profile["stages"]] == list(stages)
        assert [stage["rank"] for stage in profile["stages"]] == [rank * case.replicas for rank in owner]
        for stage, name in enumerate(texts):
            text, rank = (here / name).read_text(), owner[stage] * case.replicas
            assert text.startswith(f"stage {stage} of {len(stages)}, on rank {rank}: layers ")
            assert "DeepSpeed Flops Profiler" in text and "UnetStage(" in text
        (said,) = told["said"]
        assert said.startswith("flops of step 2: ") and said.endswith("table.txt")
        found.append(profile)
    return found


def counts(profile: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of every layer and its parts, without times."""

    def untimed(value: dict[str, Any]) -> dict[str, Any]:
        return {name: number for name, number in value.items() if name != "seconds"}

    return [
        (layer["name"], untimed(layer["total"]), {name: untimed(part) for name, part in layer["parts"].items()})
        for layer in profile["layers"]
    ]


CASES: list[dict[str, Any]] = [
    {"stages": 1, "replicas": 4, "zero": 0, "precision": "fp32", "checkpoint": 0, "micro_batches": 2},
    {"stages": 4, "replicas": 1, "zero": 0, "precision": "fp32", "checkpoint": 1, "micro_batches": 8}
    | {"reentrant": True},
    {"stages": 2, "replicas": 2, "zero": 2, "precision": "fp16", "checkpoint": 1, "micro_batches": 4}
    | {"schedule": "folded"},
]


@pytest.mark.launch
def test_every_layout_counts_the_same_with_recomputation_and_in_half_precision(tmp_path: Path) -> None:
    profiles = profiled_cases(4, CASES, tmp_path)
    spec = tiny_spec()
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    for profile in profiles:
        assert profile["micro_batch_images"] == 2
        assert counts(profile) == counts(profiles[0])
        macs = {layer["name"]: layer["total"]["macs"] for layer in profile["layers"]}
        assert macs == pytest.approx({layer.name: 2 * layer.macs for layer in layers}, rel=0.02)

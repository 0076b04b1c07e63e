"""The flops profile: its table equals PyTorch's own count, in every layout; it is made once."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddpm_ds.config.ds_model import FlopsProfiler
from ddpm_ds.observe.flops import FlopsProfile, profile_layers
from ddpm_ds.observe.observer import instructions_wrapped
from ddpm_ds.pipeline.schedule import Instruction
from ddpm_ds.unet.tensor_group import ALONE, TensorGroup
from tests.observe.observed_worker import SETTINGS, Told
from tests.unet.variants import VARIANTS, batch, context, layers_of, random_unet


@pytest.mark.parametrize(("depth", "levels"), [(-1, 3), (0, 1), (1, 2), (9, 3)])
def test_module_depth_counts_from_the_stage_to_the_innermost(depth: int, levels: int) -> None:
    unet = random_unet(layers_of("bare"))
    settings = FlopsProfiler(module_depth=depth, detailed=depth == -1)
    seconds, text = profile_layers(dict(enumerate(unet.layers)), lambda: unet(*batch("bare")), settings, step=7)
    assert len(seconds) == len(unet.layers) and min(seconds) > 0
    assert [line for line in text.splitlines() if line.startswith("depth")] == [f"depth {d}:" for d in range(levels)]
    assert "Profile Summary at step 7" in text and ("(norm1): GroupNorm(" in text) == settings.detailed


class OneStage:
    """What the observer uses of an engine, without the rest."""

    def __init__(self, global_steps: int = 0, name: str = "bare", compiled: bool = False) -> None:
        self.layers = layers_of(name)
        unet = random_unet(self.layers)
        layer: Any
        for layer in unet.layers[1:3] if compiled else ():  # conv_in and a block
            layer.compute = torch.compile(layer.compute, backend="eager", dynamic=False)
        setattr(unet.layers, "schedule", "1f1b")  # noqa: B010
        setattr(unet.layers, "tensor", ALONE)  # noqa: B010
        self.module, self.stage_id, self.num_stages, self.micro_batch_size = unet.layers, 0, 1, 2
        self.global_steps = global_steps
        self.grid = SimpleNamespace(get_data_parallel_id=lambda: 0)
        setattr(unet.layers, "own_layers", lambda phase: dict(enumerate(unet.layers)))  # noqa: B010
        self.forward = lambda *_: unet(*batch(name), context=context(self.layers))
        self.execute = {"ForwardPass": self.forward}
        self.messages_by_host = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.messages_by_host = True
        yield
        self.messages_by_host = False


def observe(folder: Path, steps: list[int], settings: FlopsProfiler, *, engine: OneStage | None = None) -> Told:
    """Take steps, of a run of 10, under an observer."""
    engine, told = engine or OneStage(), Told()
    observer = FlopsProfile(engine, engine.layers, settings, folder, told, steps=10)  # type: ignore[arg-type]
    for step in steps:
        observer.begin_step(step)
        profiled = engine.execute["ForwardPass"] is not engine.forward
        assert engine.messages_by_host == profiled, "the profiler waits for the device"
        for number in range(2):
            engine.execute["ForwardPass"](Instruction("ForwardPass", 0, (number,)))
    observer.finish()
    assert engine.execute["ForwardPass"] is engine.forward
    return told


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", VARIANTS)
def test_the_table_is_what_pytorch_counts(name: str, tmp_path: Path) -> None:
    engine = OneStage(name=name)
    told = observe(tmp_path, [1], FlopsProfiler(enabled=True), engine=engine)
    plain = sdpa_kernel(SDPBackend.MATH)  # PyTorch's counter does not know the one for CPUs
    with FlopCounterMode(display=False) as counter, torch.no_grad(), plain:
        engine.forward()
    profile = json.loads((tmp_path / "flops.json").read_text())
    assert profile["total"]["flops"] == counter.get_total_flops() == 2 * profile["total"]["macs"]
    assert profile["total"]["parameters"] == sum(parameter.numel() for parameter in engine.module.parameters())
    assert [layer["name"] for layer in profile["layers"]] == [layer.name for layer in engine.layers]
    assert sum(layer["total"]["flops"] for layer in profile["layers"]) == counter.get_total_flops()
    assert told.metrics[0][1]["flops/forward_gflops"] == counter.get_total_flops() / 1e9


@pytest.mark.usefixtures("alone")
def test_compiled_layers_are_profiled_as_they_are_written(tmp_path: Path) -> None:
    engine = OneStage(compiled=True)
    engine.forward()
    graphs = counters["stats"]["unique_graphs"]
    observe(tmp_path, [1, 2], SETTINGS, engine=engine)
    assert counters["stats"]["unique_graphs"] == graphs > 0, "nothing is compiled again"
    macs = 2 * sum(layer.macs for layer in engine.layers) / 1e6
    assert f"{macs:.2f} MMACs" in (tmp_path / "flops.stage0.txt").read_text()


@pytest.mark.usefixtures("alone")
def test_a_run_is_profiled_once(tmp_path: Path) -> None:
    second = SETTINGS.model_copy(update={"profile_step": 2})
    told = observe(tmp_path, [1, 2, 3, 1, 2, 3], second)  # a rollback
    assert [step for step, _ in told.metrics] == [2] and len(told.logged) == 1
    assert len(json.loads((tmp_path / "flops.json").read_text())["stages"]) == 1  # of two micro-batches
    resumed = observe(tmp_path, [5, 6], second, engine=OneStage(global_steps=4))
    assert vars(resumed) == vars(Told())
    told = observe(tmp_path / "other", [5, 6], second, engine=OneStage(global_steps=4))
    assert not told.metrics and not (tmp_path / "other").exists()
    assert told.logged == ["flops_profiler.profile_step = 2 does not come (steps to come: 5 to 10); name one"]
    past_the_end = observe(tmp_path / "other", [1], SETTINGS.model_copy(update={"profile_step": 11}))
    assert past_the_end.logged[0].endswith("= 11 does not come (steps to come: 1 to 10); name one")
    assert vars(observe(tmp_path, [1, 2, 3], SETTINGS.model_copy(update={"enabled": False}))) == vars(Told())


@pytest.mark.usefixtures("alone")
def test_a_tensor_group_is_profiled_once_by_its_first_rank(tmp_path: Path) -> None:
    first, second = OneStage(), OneStage()
    for rank, engine in enumerate((first, second)):
        setattr(engine.module, "tensor", TensorGroup(rank, 2))  # noqa: B010
    observe(tmp_path, [1], SETTINGS, engine=first)
    assert "The ranks of a tensor group share" in (tmp_path / "table.txt").read_text()
    observer = FlopsProfile(second, second.layers, SETTINGS, tmp_path, Told(), steps=10)  # type: ignore[arg-type]
    observer.begin_step(1)
    assert second.execute["ForwardPass"] is second.forward


def test_an_instruction_that_another_observer_has_wrapped_meanwhile_stays_wrapped_and_passes_through() -> None:
    calls, own = list[Any](), Instruction("ForwardPass", 1, (0,))
    engine = SimpleNamespace(execute={"ForwardPass": lambda _: calls.append("forward")})

    def around(instruction: Instruction, execute: Callable[[], None]) -> None:
        calls.append(instruction)
        execute()

    with instructions_wrapped(engine, around):
        ours = engine.execute["ForwardPass"]
        engine.execute["ForwardPass"] = theirs = lambda instruction: ours(instruction)
        theirs(own)
    theirs(own)
    assert engine.execute["ForwardPass"] is theirs and calls == [own, "forward", "forward"]


@pytest.mark.usefixtures("alone")
def test_output_file_is_where_the_texts_go_and_a_disk_that_refuses_stops_nothing(tmp_path: Path) -> None:
    told = observe(
        tmp_path / "run", [1], SETTINGS.model_copy(update={"output_file": str(tmp_path / "mine" / "profile")})
    )
    assert "stage 0 of 1" in (tmp_path / "mine" / "profile.stage0.txt").read_text()
    assert told.artifacts == ["flops/profile.stage0.txt", "flops/table.txt", "flops/flops.json"]
    (tmp_path / "file").touch()
    told = observe(tmp_path / "file", [1], SETTINGS)
    assert len(told.metrics) == 1 and not told.artifacts
    assert told.logged == [f"{tmp_path / 'file'} can't be written (File exists); training continues"]

"""Each assumption about DeepSpeed's insides, so that an upgrade fails here and says what moved."""

import ast
import contextlib
import inspect
import logging
import subprocess
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import deepspeed
import psutil
import pytest
import torch
from deepspeed.accelerator import cuda_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine, EngineTimers
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass, TrainSchedule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from filelock import FileLock
from torch.distributed import HashStore, distributed_c10d
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ddpm_ds.ground.errors import HostError
from ddpm_ds.pipeline import build
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.module import FoldedUnetModule, UnetPipelineModule
from ddpm_ds.pipeline.placement import ACROSS_HOSTS, Grid
from ddpm_ds.schema.layout import AcrossHosts, Schedule
from tests.launching import PATIENCE_SECONDS

MEANT: dict[type, dict[str, str]] = {
    UnetPipelineEngine: {
        "__init__": "ours calls it",
        "train_batch": "executes a program in the place of a schedule",
        "train_batch_size": "counts an image once, however many ranks share it",
        "was_step_applied": "the device may decide that, so it is asked",
        "skipped_steps": "brought up to date when it is read",
        "data_iterator": "set between the first and the last rank as well, which may read text",
    },
    UnetPipelineModule: {
        "__init__": "ours calls it",
        "forward": "walks the stage's layers with a carry",
        "_partition_layers": "cuts at the given layers",
        "parts": "set by that cut",
    },
    FoldedUnetModule: {
        "_partition_layers": "cuts into two stages for each rank",
        "parts": "set by that cut",
        "phase_bounds": "set by that cut",
        "activate_phase": "also chooses the layers of that stage",
        "num_stages": "counted as DeepSpeed does from there on",
    },
}
"""Names by which our classes replace DeepSpeed's, each with the reason."""


def source(thing: object) -> str:
    return textwrap.dedent(inspect.getsource(thing))  # type: ignore[arg-type]


def names_in(thing: object) -> set[str]:
    """Every attribute and plain name that the source of ``thing`` uses."""
    tree = ast.parse(source(thing))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def names_of(kind: type) -> set[str]:
    """Names that a class gives to its instances: its own attributes, and those that its methods set on ``self``."""
    assigned = {
        node.attr
        for node in ast.walk(ast.parse(source(kind)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return assigned | (vars(kind).keys() - {"__module__", "__doc__", "__annotations__"})


@pytest.mark.parametrize("ours", MEANT)
def test_our_classes_hide_no_name_of_deepspeeds_by_accident(ours: type) -> None:
    """Our engine once had a ``loss_scale()``, which made every fixed loss scale 1."""
    theirs = [kind for kind in ours.__mro__ if kind.__module__.startswith(("deepspeed.", "torch."))]
    assert {PipelineEngine, deepspeed.pipe.PipelineModule} & set(theirs)
    assert names_of(ours) & set().union(*map(names_of, theirs)) == MEANT[ours].keys()


@pytest.mark.parametrize("across", ACROSS_HOSTS)
def test_a_topology_numbers_the_processes_as_the_grid_does(across: AcrossHosts) -> None:
    topology, grid = insides.topology(across, 3, 4, 2), Grid(3, 4, across, (0,) * 24, 2)
    for rank in range(24):
        coordinates = topology.get_coord(rank)
        assert (coordinates.pipe, coordinates.data, coordinates.model) == grid.coordinates(rank)
    pipelines, replicas = topology.get_axis_comm_lists("pipe"), topology.get_axis_comm_lists("data")
    places = [(first, part) for first in range(4) for part in range(2)]
    assert pipelines == [[grid.rank(stage, replica, part) for stage in range(3)] for replica, part in places]
    assert replicas == [
        [grid.rank(stage, *place) for place in places[part::2]] for stage in range(3) for part in (0, 1)
    ]
    assert topology.get_axis_comm_lists("model") == [[first, first + 1] for first in range(0, 24, 2)]


def test_a_new_engine_copies_the_first_replicas_weights_to_the_others() -> None:
    """In their order the groups of replicas begin with replica 0, by the test above."""
    assert "_broadcast_model" in names_in(DeepSpeedEngine._configure_distributed_model)
    copied = {"named_parameters", "broadcast", "_get_broadcast_src_rank", "seq_data_parallel_group"}
    assert copied <= names_in(DeepSpeedEngine._broadcast_model)
    first = names_in(deepspeed_groups._get_broadcast_src_rank)
    assert {"get_global_rank", "_get_sequence_data_parallel_group"} <= first
    assert "get_data_parallel_id" in vars(PipelineParallelGrid)


def test_groups_that_are_made_without_a_timeout_have_the_one_that_is_set() -> None:
    """DeepSpeed's among them; without it they have their backend's, whatever the default group has."""

    def timeout(group: Any) -> timedelta:
        found = group._get_backend(torch.device("cpu")).options._timeout
        assert isinstance(found, timedelta)
        return found

    def new_group() -> Any:
        return TorchBackend.new_group(None, [0])

    set_to, own = timedelta(seconds=77), timedelta(seconds=5)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=own)
    try:
        assert timeout(torch.distributed.group.WORLD) == own and timeout(new_group()) not in (own, set_to)
        with insides.group_timeout(set_to):
            assert timeout(new_group()) == set_to
        assert timeout(new_group()) != set_to
    finally:
        torch.distributed.destroy_process_group()
    for make in (distributed_c10d.init_process_group, distributed_c10d.split_group):
        assert "_get_default_timeout" in names_in(make)


def test_initialize_looks_up_the_pipeline_engine_where_it_is_swapped() -> None:
    assert {"PipelineEngine", "DualPipeVEngine", "DualPipeVModule"} <= names_in(deepspeed.initialize)
    before = deepspeed.PipelineEngine, deepspeed.DualPipeVEngine, pipe_engine.ZeroStageEnum
    with insides.pipeline_engine(UnetPipelineEngine):
        assert deepspeed.PipelineEngine is deepspeed.DualPipeVEngine is UnetPipelineEngine
    assert (deepspeed.PipelineEngine, deepspeed.DualPipeVEngine, pipe_engine.ZeroStageEnum) == before


def test_each_replica_sums_scalars_in_a_group_of_its_own() -> None:
    topology, make = insides.topology("stages", 2, 2, 2), Mock(side_effect=list)
    grid: Any = Mock(global_rank=5, data_parallel_size=2, topology=lambda: topology)
    insides.sum_scalars_in(grid, make)
    assert make.call_args_list == [call([0, 1, 4, 5]), call([2, 3, 6, 7])]
    assert grid.ds_model_proc_group == [0, 1, 4, 5]
    assert "ds_model_proc_group" in names_in(PipelineParallelGrid.get_model_parallel_group)
    assert source(PipelineEngine.__init__).count("get_model_parallel_group") == 1  # for a count of parameters


WORDS: list[tuple[object, tuple[str, ...]]] = [
    # a step counts, prints and advances the scheduler beside the optimizer's own
    (
        DeepSpeedEngine._take_model_step,
        (
            "if overflow: self.skipped_steps += 1 else: if self.lr_scheduler is not None:",
            "(self.global_steps + 1) % self.steps_per_print() == 0: self._report_progress(self.global_steps + 1)",
            "self.global_steps += 1",
            "self.global_samples += self.train_batch_size()",
            "self._step_applied = not overflow",
        ),
    ),
    # only ZeRO's optimizer works on the host, and it asks for free memory
    (DeepSpeedZeroOptimizer.__init__, ("self.cpu_offload = True", ".available_memory()")),
    # the unfused optimizer steps once to make its state
    (FP16_UnfusedOptimizer.initialize_optimizer_states, ("self.optimizer.step()",)),
    # ranks and places are looked up in the topology
    (PipelineParallelGrid.stage_to_global, ("self._topo.get_rank(**transform)",)),
    (deepspeed.pipe.PipelineModule.__init__, ("self._topo = topology", "self._topo.get_coord(self.global_rank).pipe")),
    (ProcessTopology.__init__, ("product",)),
    (DeepSpeedEngine.__init__, ("module_forward_pre_hook",)),
    # optimizers with flat weights keep all their hooks in one list, and own equal partitions
    (DeepSpeedZeroOptimizer.create_gradient_handling_hooks, ("self._grad_acc_hooks.append(register_grad_hook(",)),
    (BF16_Optimizer.create_grad_acc_hooks, ("self._grad_acc_hooks.append(register_grad_hook(",)),
    (
        DeepSpeedZeroOptimizer,
        (
            "partition_size = len(self.bit16_groups_flat[i]) //",
            # a master is a copy, in the type that is asked for
            "weights_partition = self.parallel_partitioned_bit16_groups[i][partition_id].detach().clone().to(",
            "dtype=self.master_weights_and_grads_dtype",
            # all that is trained has a name
            "lp_name = self.param_names[lp]",
        ),
    ),
    (BF16_Optimizer, ("partition_size = self.bf16_groups_flat[i].numel() //",)),
]
"""Words that DeepSpeed's sources must have."""


@pytest.mark.parametrize(("thing", "words"), WORDS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_deepspeeds_sources_have_the_words_that_we_rely_on(thing: object, words: tuple[str, ...]) -> None:
    text = " ".join(source(thing).split())
    assert [one for one in words if one not in text] == []


def test_deepspeeds_sources_have_nothing_else_of_their_kind() -> None:
    assert deepspeed.__version__.startswith("0.19."), "read DeepSpeed's changes, then widen this"
    assert source(DeepSpeedEngine._take_model_step).count("self.optimizer.step()") == 1
    for optimizer in (DeepSpeedZeroOptimizer, BF16_Optimizer):
        assert source(optimizer).count("register_grad_hook(") == 1
        refresh = names_in(optimizer.update_lp_params)  # weights stay the views that they are
        assert "copy_" in refresh and not {"_update_model_bit16_weights", "unflatten"} & refresh
    assert "offload" not in source(FP16_UnfusedOptimizer).lower() and "self.cpu_offload" not in source(BF16_Optimizer)
    assert callable(FP16_UnfusedOptimizer.refresh_fp32_params)
    # neighbours, groups and this process's place are looked up in the topology, not computed
    assert {"get_axis_comm_lists", "get_axis_list", "get_coord", "get_rank"} <= names_in(PipelineParallelGrid)
    assert not {"data_parallel_size", "pipe_parallel_size"} & names_in(PipelineParallelGrid.stage_to_global)
    # the stage limit is used once, to refuse ZeRO-2: the import and the assertion
    text = Path(inspect.getfile(pipe_engine)).read_text()
    assert text.count("ZeroStageEnum") == 2 and "< ZeroStageEnum.gradients" in text
    # forward hooks do nothing that training needs
    needed = {"clear_backward_seen_flag", "enter_backward", "zero_grad", "step"}
    for hook, what in (("pre_hook", "_forward_prologue"), ("post_hook", "_forward_epilogue")):
        assert what in source(getattr(DeepSpeedEngine, f"_create_module_forward_{hook}"))
        assert not needed & names_in(getattr(DeepSpeedEngine, what))
    assert EngineTimers(False, False).active_timers() == []
    # the stock backward scales the loss for ZeRO's optimizers only
    text = Path(inspect.getfile(deepspeed_engine)).read_text()  # the method itself is wrapped
    backward = text[text.index("    def backward(self, loss") : text.index("    def is_gradient_accumulation_boundary")]
    assert "isinstance(self.optimizer, ZeROOptimizer)" in backward and "scale_if_loss" in backward
    assert "FP16_UnfusedOptimizer" not in backward and isinstance(FP16_UnfusedOptimizer.loss_scale, property)


@pytest.mark.parametrize("kind", ["1f1b", "folded"])
def test_a_schedule_of_deepspeeds_meets_the_micro_batches_in_order(kind: Schedule) -> None:
    """The n-th pass of a kind in a phase is that of micro-batch n, which its buffers' numbers hide."""
    counted: Counter[tuple[str, int]] = Counter()
    stream = (DualPipeVSchedule if kind == "folded" else TrainSchedule)(micro_batches=8, stages=4, stage_id=1)
    buffers = 8 if kind == "folded" else stream.num_pipe_buffers()
    for command in (command for commands in stream.steps() for command in commands):
        if isinstance(command, ForwardPass | BackwardPass):
            phase = command.kwargs.get("phase", 0)
            assert command.kwargs["buffer_id"] == counted[command.name, phase] % buffers + phase * buffers
            counted[command.name, phase] += 1
    assert set(counted.values()) == {8}


def test_zero_asks_for_free_memory_in_numbers_and_ours_in_any_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8d1f")
    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=lambda number: number))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 10))
    with pytest.raises(ValueError, match="GPU-8d1f"):
        cuda_accelerator.CUDA_Accelerator().available_memory()
    used: list[Any] = []
    monkeypatch.setattr(build, "get_accelerator", cuda_accelerator.CUDA_Accelerator)
    monkeypatch.setattr(build, "set_accelerator", used.append)
    build.use_host_accelerator()
    assert used[0].available_memory() == 5


class Extension(OpBuilder):
    """An extension that no compiler is needed for, since it is never compiled."""

    def __init__(self, source: Path) -> None:
        super().__init__("tiny")
        self.source = source

    def absolute_name(self) -> str:
        return "nowhere.tiny"

    def sources(self) -> list[str]:
        return [str(self.source)]


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extension:
    """An extension to be built in ``tmp_path/tiny``."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(insides, "BUILD_SECONDS", 0.2)
    (tmp_path / "tiny.cpp").touch()
    return Extension(tmp_path / "tiny.cpp")


LOCKED = "a build of DeepSpeed's tiny has had {} for 0.2 s; if none is running, delete that file and start again"


def refused_build(extension: Extension) -> str:
    """The error of a build that waits for another one, while it is shown."""
    shown: list[str] = []

    @contextlib.contextmanager
    def doing(what: str) -> Iterator[None]:
        shown.append(what)
        yield

    with insides.named_builds(doing), pytest.raises(HostError) as error:
        extension.load()
    assert shown == [f"compiling or loading DeepSpeed's tiny in {extension.source.with_suffix('')}"]
    return str(error.value)


def test_a_build_that_another_process_locks_is_named_and_not_waited_for_without_end(extension: Extension) -> None:
    lock = extension.source.with_suffix("") / "lock"
    lock.parent.mkdir()
    with FileLock(lock):
        assert refused_build(extension) == LOCKED.format(lock)


def test_a_compiler_that_hangs_is_ended_and_named(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = extension.source.with_name("hung-c++")
    compiler.write_text("#!/bin/sh\nexec sleep 1000\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(insides, "BUILD_SECONDS", 1.0)
    before = set(psutil.Process().children(recursive=True))
    message, typed = refused_build(extension).split(": ", 1)
    folder = extension.source.with_suffix("")
    assert message == f"DeepSpeed's tiny was not compiled within 1 s; to see what hangs, type in {folder}"
    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(f"exec {typed}", shell=True, cwd=folder, timeout=0.5)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_lock_that_a_killed_build_left_under_an_older_pytorch_is_named(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, waits = extension.source.with_suffix("") / "lock", threading.Event()

    def load_before_2_14(**_: Any) -> str:
        baton = cpp_extension.FileBaton(str(lock))
        if baton.try_acquire():
            return "built"
        waits.set()
        baton.wait()
        return "loaded"

    monkeypatch.delattr(cpp_extension, "FileLock", raising=False)
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton, raising=False)
    monkeypatch.setattr(cpp_extension, "load", load_before_2_14)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    lock.parent.mkdir()
    lock.touch()
    assert refused_build(extension) == LOCKED.format(lock)
    monkeypatch.setattr(insides, "BUILD_SECONDS", 1e9)
    waits.clear()

    def end_the_other_build() -> None:
        if waits.wait(PATIENCE_SECONDS):
            lock.unlink()

    threading.Thread(target=end_the_other_build).start()
    with insides.named_builds(contextlib.nullcontext):
        assert extension.load() == "loaded"


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.ERROR), (True, logging.INFO)])
def test_deepspeed_logs_its_errors_alone_unless_it_is_verbose(
    verbose: bool, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    for _ in range(2):
        with build.quiet_deepspeed(verbose):
            assert logger.level == level
        assert logger.level == level, "while training, too"

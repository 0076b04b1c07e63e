"""No order of messages locks: the model's sweep, the locks it must find, and that the engines post what it says."""

import contextlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from ddpm_ds.pipeline import messages
from ddpm_ds.pipeline.messages import Channel, Edge, Posted, StageChannels, pipeline_edges
from ddpm_ds.pipeline.schedule import posted_before, program
from ddpm_ds.pipeline.staged import ForwardPipeline
from ddpm_ds.planning.simulate import PhaseCosts, RankCosts, simulate
from ddpm_ds.schema.layout import Schedule, SpaceSplit
from ddpm_ds.unet.blocks import Upsample
from ddpm_ds.unet.shards import row_layers
from ddpm_ds.unet.space import Band, SpaceGroup
from ddpm_ds.unet.weight_gradients import WaitingGradients
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, report_cases, run_cases, spec_of
from tests.pipeline.order_model import (
    LockError,
    Operation,
    RecordedChannel,
    RecordedWork,
    all_at_once,
    execute,
    swaps_of_passes,
    training_order,
    where_used,
)
from tests.pipeline.random_programs import random_programs
from tests.unet.test_space import banded, inputs_of, whole_of

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "folded")
RANKS = (2, 3, 4, 5, 8)
BOTH = ("ForwardPass", "BackwardPass")


def counts(schedule: Schedule, ranks: int) -> list[int]:
    """From the fewest that a schedule can have to four for each rank."""
    if schedule == "folded":
        return [2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks]
    return sorted({1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks, 4 * ranks})


every_step = pytest.mark.parametrize(("schedule", "ranks"), list(itertools.product(SCHEDULES, RANKS)))


def step(
    schedule: Schedule,
    count: int,
    ranks: int,
    communicator: Callable[[Edge], Hashable] = lambda edge: edge,
    **ways: Any,
) -> float:
    """Seconds of a training step in the model."""
    programs = [program(schedule, count, ranks, rank) for rank in range(ranks)]
    return execute([training_order(schedule, programs, rank, **ways) for rank in range(ranks)], communicator)


def one_for_each_direction(edge: Edge) -> Hashable:
    """Two communicators for a whole pipeline, one for each direction."""
    return edge.phase, edge.kind


@every_step
@pytest.mark.parametrize("posted", [posted_before, where_used, all_at_once])
def test_no_step_locks(schedule: Schedule, ranks: int, posted: Any) -> None:
    for count in counts(schedule, ranks):
        step(schedule, count, ranks, posted=posted)


@every_step
def test_a_rank_computes_beside_one_posted_receive_at_most(schedule: Schedule, ranks: int) -> None:
    """Each holds multiprocessors of a GPU; random orders of passes neither lock nor hold more."""
    count = 2 * ranks
    orders = [random_programs(schedule, count, ranks, seed) for seed in range(3)]
    for programs in (*orders, [program(schedule, count, ranks, rank) for rank in range(ranks)]):
        operations = [training_order(schedule, programs, rank) for rank in range(ranks)]
        execute(operations)
        for own in operations:
            posted = set[tuple[Edge | None, int]]()
            for one in own:
                message = one.edge, one.number
                if one.does == "receive":
                    posted.add(message)
                posted -= {message} if one.does == "wait" else set()
                assert one.does != "pass" or len(posted) <= 1


SUMS = {name: [Operation("sum", name=name)] * 2 for name in BOTH}
"""Two sums over a tensor group in each pass; weight gradients have none."""


@every_step
def test_no_step_with_sums_over_tensor_groups_locks(schedule: Schedule, ranks: int) -> None:
    """Two pipelines whose stages sum in each pass; sums have a communicator of their own."""
    for count in counts(schedule, ranks):
        programs = [program(schedule, count, ranks, rank) for rank in range(ranks)]
        orders = [training_order(schedule, programs, rank, inside=SUMS) for _ in range(2) for rank in range(ranks)]
        execute(orders, group=2)


def test_the_ranks_of_a_tensor_group_follow_one_program() -> None:
    """Two orders of passes, each of which is right on all ranks, lock beside each other."""
    programs = {seed: random_programs("folded", 4, 2, seed) for seed in range(9)}
    by_seed = {
        seed: [training_order("folded", own, rank, inside=SUMS) for rank in range(2)] for seed, own in programs.items()
    }
    for orders in by_seed.values():
        execute([*orders, *orders], group=2)
    different = next(orders for orders in by_seed.values() if orders != by_seed[0])
    with pytest.raises(LockError, match="waits for a sum in "):
        execute([*by_seed[0], *different], group=2)


def swapping(space: SpaceSplit, fault: Callable[[nn.ModuleList], object] = lambda modules: None) -> Any:
    """What each rank of a space group does in its passes, noted from real layers that have a ``fault``."""
    name = "heads" if space.size == 4 else "levels"
    layers = whole_of(name, (24, 8))
    x_t, *others = inputs_of(name, layers)

    def make(group: SpaceGroup) -> nn.ModuleList:
        modules = banded(layers, space, group)
        fault(modules)
        return modules

    bands = [Band(SpaceGroup(rank), row_layers(layers, space)[0].rows.arriving) for rank in range(space.size)]
    return [swaps_of_passes(make, (one.cut(x_t), *others), one.group.rank, space.size) for one in bands]


def shared_step(passes: Any, schedule: Schedule = "folded", ranks: int = 2) -> None:
    """Play a step of stages, each of which does the same ``passes`` by rank of its space group."""
    programs = [program(schedule, 2 * ranks, ranks, rank) for rank in range(ranks)]
    orders = [training_order(schedule, programs, rank, inside=own) for own in passes for rank in range(ranks)]
    execute(orders, group=len(passes))


@pytest.mark.parametrize("space", [SpaceSplit(2), SpaceSplit(4, (0, 1)), SpaceSplit(3, (0,))], ids=str)
def test_no_step_with_swaps_of_a_space_group_locks(space: SpaceSplit) -> None:
    """Swaps have a communicator of their own; the third group computes levels whole."""
    passes = swapping(space)
    assert {"swap", "swapped", "put", "compute"} == {one.does for one in passes[0]["BackwardPass"]}
    for schedule, ranks in itertools.product(SCHEDULES, (1, 2, 3)):
        shared_step(passes, schedule, ranks)


def test_a_weight_gradient_beside_a_swap_that_never_comes_is_found() -> None:
    """A doubling whose input each rank has whole swaps nothing in its backward."""

    def wait_for_nothing(modules: nn.ModuleList) -> None:
        doubling = next(one for one in modules if isinstance(one, Upsample) and one.arriving is None)
        doubling.conv.beside = WaitingGradients(())

    with pytest.raises(LockError, match=r"rank 0 never computes the weight gradients of \['\d+\.conv'\]"):
        shared_step(swapping(SpaceSplit(3, (0,)), wait_for_nothing))


@pytest.mark.parametrize("name", BOTH)
def test_swaps_in_another_order_on_one_rank_are_found(name: str) -> None:
    passes = swapping(SpaceSplit(2))
    own = passes[1][name]
    first, second, *_ = [place for place, one in enumerate(own) if one.does == "swap" and place > 3]
    own[first], own[second] = own[second], own[first]
    with pytest.raises(LockError, match=r"rank \d swaps \d+ for \d+ bytes with rank \d, which swaps"):
        shared_step(passes)


@every_step
def test_two_communicators_for_a_pipeline_lock_in_some_orders(schedule: Schedule, ranks: int) -> None:
    """The named schedules lock on them from three ranks on if receives are posted early, random orders anyway."""
    for count in counts(schedule, ranks):
        step(schedule, count, ranks, one_for_each_direction)
    if ranks > 2:
        with pytest.raises(LockError, match=r"rank \d+ waits for .* behind "):
            step(schedule, 4 * ranks, ranks, one_for_each_direction, posted=all_at_once)
    if ranks == 8:
        with pytest.raises(LockError):
            for seed in range(10):
                programs = random_programs(schedule, 2 * ranks, ranks, seed)
                orders = [training_order(schedule, programs, rank) for rank in range(ranks)]
                execute(orders, one_for_each_direction)


@every_step
@pytest.mark.parametrize("passes", [("ForwardPass",), ("BackwardPass",), BOTH])
def test_a_wait_for_the_device_locks_unless_messages_go_by_the_hosts(
    schedule: Schedule, ranks: int, passes: tuple[str, ...]
) -> None:
    for count in counts(schedule, ranks):
        step(schedule, count, ranks, device_waits=passes, by_host=True)
    if passes == BOTH or (schedule == "folded" and ranks > 2):
        with pytest.raises(LockError, match="waits for the device"):
            step(schedule, 2 * ranks, ranks, device_waits=passes)


def test_a_wait_for_the_device_locks_a_fold_even_if_receives_are_posted_where_they_are_used() -> None:
    """Neighbours wait for the sends that each has posted; so messages have to leave the device altogether."""
    with pytest.raises(LockError):
        step("folded", 8, 4, device_waits=BOTH, posted=where_used)


@every_step
def test_a_step_takes_as_long_as_the_simulator_says(schedule: Schedule, ranks: int) -> None:
    """On links that cost nothing: a message that is taken late, or posted late, delays nobody."""
    seconds = {"ForwardPass": 1.0, "BackwardPass": 2.0}
    costs = [RankCosts((PhaseCosts(1.0, 2.0),) * (2 if schedule == "folded" else 1))] * ranks
    for count in counts(schedule, ranks):
        found = step(schedule, count, ranks, seconds=lambda instruction, phase: seconds[instruction])
        assert found == pytest.approx(simulate(schedule, count, costs).step_seconds)


@pytest.mark.parametrize(
    ("ranks", "phases", "most", "all_edges"), [(1, 1, 0, 0), (2, 1, 3, 3), (8, 1, 4, 15), (8, 2, 8, 28)]
)
def test_communicators_of_a_rank(ranks: int, phases: int, most: int, all_edges: int) -> None:
    edges = pipeline_edges(ranks, phases)
    assert len(edges) == len(set(edges)) == all_edges
    assert max(sum(rank in edge[2:] for edge in edges) for rank in range(ranks)) == most


def test_edges_inside_a_host_have_fewer_thread_blocks_than_edges_across(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks, seen by rank 1."""
    found: dict[tuple[int, ...], set[int]] = defaultdict(set)

    def group(ranks: tuple[int, ...], device: torch.device, blocks: int) -> None:
        found[tuple(sorted(ranks))].add(blocks)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(messages, "edge_group", group)
    fakes: dict[str, Any] = {"get_rank": lambda: 1, "get_world_size": lambda: 4, "send": Mock(), "recv": Mock()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.distributed, name, fake)
    messages.open_p2p_groups([[0, 1, 2, 3]], 1, torch.device("cpu"))
    assert found == {(0, 1): {2}, (1, 2): {8}, (2, 3): {2}, (0, 3): {8}}


class RecordedEngine:
    """Stand-in for one rank's engine in the forward pipeline, which notes all operations.

    If it says that its layers are warmed up for the first time, messages go by the hosts.
    """

    def __init__(self, schedule: Schedule, ranks: int, rank: int, *, device_waits: bool, by_host: bool) -> None:
        self.num_stages, self.stage_id, self.phases = ranks, rank, 2 if schedule == "folded" else 1
        self.loss_stage = 0 if schedule == "folded" else ranks - 1
        self.operations: list[Operation] = []
        self.module, self._device_waits, self._by_host = self, device_waits, by_host
        self.sized_layers = [[type("Layer", (), {"output_shape": (1,)})]]
        self.most = 2 * ranks + 1 if schedule == "folded" else ranks + 1
        self.readers: list[Any] = []
        self.unpacked = lambda phase, received, kept: (*received, *kept)
        self.own_rows = self.whole = lambda images: images

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def channel(self, edge: Edge, *_: Any) -> RecordedChannel:
        return RecordedChannel(self.operations, edge, self.most)

    def stage_channels(self, phase: int, images: int) -> StageChannels:
        own: dict[tuple[str, bool], Any] = {}
        for edge in pipeline_edges(self.num_stages, self.phases):
            if edge.phase == phase and self.stage_id in edge[2:] and edge.kind != "predictions":
                own[edge.kind, edge.source == self.stage_id] = self.channel(edge)
        ends = itertools.product(("activations", "gradients"), (False, True))
        return StageChannels(*(own.get(end) for end in ends))

    def packed(self, phase: int, carry: Any) -> Any:
        return carry[:1], carry[1:] if self.phases == 2 and phase == 0 else ()

    def walk(self, phase: int, carry: Any) -> Any:
        self.operations.append(Operation("pass", name="ForwardPass"))
        if self._device_waits:
            self.operations.append(Operation("device"))
        last = self.phases - 1 == phase and self.stage_id == self.loss_stage
        return torch.zeros(1) if last else (torch.zeros(1),) * 3

    def forward_only(self, images: int, sizes: set[int]) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(self._by_host)


def forward_order(schedule: Schedule, ranks: int, rank: int, calls: int, depth: int, **ways: bool) -> list[Operation]:
    """Operations that a rank posts and waits for in the forward pipeline."""
    engine: Any = RecordedEngine(schedule, ranks, rank, **ways)
    ForwardPipeline(engine, 1).run(calls, lambda number: (torch.zeros(1),), lambda number, found: None, depth=depth)
    return list(engine.operations)


def depths(ranks: int) -> Iterator[tuple[int, int]]:
    """Calls, and how many of them are under way at a time."""
    for calls in (1, 2, ranks, 3 * ranks):
        for depth in sorted({1, 2, ranks - 1, ranks, 2 * ranks, 3 * ranks}):
            yield calls, depth


@every_step
def test_no_forward_pipeline_locks(schedule: Schedule, ranks: int) -> None:
    for (calls, depth), by_host in itertools.product(depths(ranks), (False, True)):
        ways = {"device_waits": by_host, "by_host": by_host}
        execute([forward_order(schedule, ranks, rank, calls, depth, **ways) for rank in range(ranks)])


def test_the_forward_pipeline_locked_on_two_communicators() -> None:
    ways = {"device_waits": False, "by_host": False}
    with pytest.raises(LockError):
        orders = [forward_order("1f1b", 4, rank, 8, 2, **ways) for rank in range(4)]
        execute(orders, lambda edge: "gradients" if edge.kind == "predictions" else "activations")


COUNT = 8
"""Micro-batches of the engines' step."""


@pytest.mark.launch
def test_the_engines_post_what_the_model_posts(tmp_path: Path) -> None:
    """Sends, receives and waits of a step, in their order, on each of four ranks."""
    reports = run_cases(4, Path(__file__), list(SCHEDULES), tmp_path)
    for (number, schedule), rank in itertools.product(enumerate(SCHEDULES), range(4)):
        programs = [program(schedule, COUNT, 4, rank) for rank in range(4)]
        expected = [operation[:3] for operation in training_order(schedule, programs, rank) if operation.edge]
        assert reports[rank][number] == json.loads(json.dumps(expected))


@contextlib.contextmanager
def noted_operations() -> Iterator[list[Operation]]:
    """Note the operations that the channels of this process post and wait for."""
    operations: list[Operation] = []
    numbers: Counter[tuple[str, Edge]] = Counter()

    def noted(does: Literal["send", "receive"]) -> Callable[..., Posted]:
        post = getattr(Channel, f"post_{does}")

        def posted(channel: Channel, *message: Tensor) -> Posted:
            edge = channel.p2p.edge
            number = numbers[does, edge]
            numbers[does, edge] += 1
            operations.append(Operation(does, edge, number))
            work, kept = post(channel, *message)
            return Posted(RecordedWork(operations, edge, number, work), kept)

        return posted

    with patch.multiple(Channel, post_send=noted("send"), post_receive=noted("receive")):
        yield operations


def posted(schedule: Schedule) -> list[Any]:
    """Operations that this rank's engine posts and waits for in a step."""
    case, spec = Case(4, 1, 0, "fp32", 0, micro_batches=COUNT, schedule=schedule), spec_of(compiled=False)
    engine = case.engine(spec)
    with noted_operations() as operations:
        engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
    return [operation[:3] for operation in operations]


if __name__ == "__main__":
    report_cases(posted)

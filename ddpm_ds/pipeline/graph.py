"""A rank's step as one CUDA graph, so that the host launches it once instead of operator by operator.

A graph replays the operations of a step at the same addresses and with the same numbers of the host. So it needs a step
that is a function of tensors: micro-batches are copied into the captured ones, and all other numbers that change from
step to step are on the device (:mod:`ddpm_ds.pipeline.own_step`). Reductions among replicas and sums of tensor groups
are in the graph too. Messages between stages are not: in a graph the driver would choose when each starts, and no order
could be proved free of deadlocks (:mod:`ddpm_ds.pipeline.messages`). So a step of a pipeline is several graphs, between
which the host sends and receives (:class:`ddpm_ds.ground.cuda_graphs.Graphs`)::

    step   1  2     3                    4       5       ...  a step that is watched   next
           eager    trial, capture,      replay  replay       eager, without a graph   capture, replay
                    replay

In the trial an eager step and a replay on the same micro-batches give the same loss and gradients, and change nothing.
Images of several sizes have a graph for each order of sizes in a step, captured when it first comes, after a trial of
its own. All graphs share one pool of memory, as large as the largest needs: one is replayed at a time, and results that
a step leaves to the host are outside of the pool. Rare work is not captured: steps that an observer watches, steps
whose messages go by the hosts, and drawing. It needs the memory of the graphs, which is given back before.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ddpm_ds.ground.cuda_graphs import Graphs
from ddpm_ds.ground.device import wait_for_device
from ddpm_ds.ground.errors import DsConfigError
from ddpm_ds.pipeline.gradients import FlatGradients
from ddpm_ds.pipeline.messages import Start, Work, all_gather_objects, at_once

if TYPE_CHECKING:
    from ddpm_ds.pipeline.engine import UnetPipelineEngine

STEPS_AHEAD = 2
"""Maximum number of steps that the host queues beyond the one that a device computes."""
SPREADS = 4
"""A replay may differ from an eager step by this many times the difference of two eager steps, whose sums differ in
order, or by a rounding of the gradients' precision."""
PIECE = 2**24
"""Number of gradients that are compared at a time, in twice to four times their memory."""
MOST_ORDERS = 16
"""Orders of sizes in a step with a graph each, unless graphs are demanded: a graph of a large step takes a device some
hundred MB beside its pool, and as long as some steps to capture."""


class Pace:
    """Limit on how far the host runs ahead of the device, so that a stop or a rank that hangs is seen in time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Wait until the device is near enough."""
        while len(self._ended) >= STEPS_AHEAD:
            self._ended.popleft().synchronize()

    def mark(self) -> None:
        """Mark the end of a step."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self._device))
            self._ended.append(event)


class _BetweenGraphs:
    """Send or receive that each replay starts and waits for anew."""

    def __init__(self, graphs: Graphs, operation: Callable[[], Work]) -> None:
        self._graphs, self._operation = graphs, operation
        graphs.cut(self._begin)

    def _begin(self) -> None:
        self._work = self._operation()

    def wait(self) -> None:
        self._graphs.cut(lambda: self._work.wait())


@dataclass
class _Captured:
    """Graphs of a step whose micro-batches have some order of sizes."""

    inputs: list[Any] = field(default_factory=list)
    """Micro-batches that they read."""
    graphs: Graphs | None = None
    """None until they are captured."""
    loss: Tensor | None = None
    """Loss that they give."""


class StepGraph:
    """Graphs of an engine's step, captured when they are first wanted.

    Args:
        engine: engine whose gradients are set.
        asked: "auto" takes a graph where each process has the whole U-Net; True takes graphs, or raises an error.
    """

    def __init__(self, engine: "UnetPipelineEngine", asked: Literal["auto"] | bool) -> None:
        self._engine, self._asked = engine, asked
        self.log: Callable[[str], None] = lambda line: None
        """Function that shows a line to the user."""
        self.why_eager = why_eager(engine, asked)
        """Reason why steps are not captured, or nothing."""
        self._stream = None if self.why_eager else torch.cuda.Stream(engine.device)
        self._pool: Any = None
        self._of_sizes: dict[tuple[int, ...], _Captured] = {}
        self._now = _Captured()  # the step that is captured or tried
        self._proven: set[tuple[int, ...]] = set()

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Queue all steps on one stream: autograd stays on the stream of a parameter's first gradient."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._engine.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    def step(self, sizes: Sequence[int] | None) -> Tensor | None:
        """Replay the step on the next micro-batches and return its loss; None if the step has to be eager.

        ``sizes`` numbers the size of each micro-batch's images; None makes the step eager. All ranks call this alike,
        and all raise DsConfigError if a graph was demanded and can't be captured.
        """
        if self.why_eager:
            return None
        if sizes is None:
            self.drop()
            return None
        if (sizes := tuple(sizes)) not in self._proven:
            self.drop()  # its trial needs their memory
            if self._asked is not True and len(self._proven) == MOST_ORDERS:
                self.why_eager = f"images come in more than {MOST_ORDERS} orders of sizes"
                self.log_why_eager()
                return None
        self._now = self._of_sizes.setdefault(sizes, _Captured())
        engine = self._engine
        batches = [next(engine.data_iterator) for _ in range(engine.micro_batches)] if engine.data_iterator else []
        if not self._now.inputs:
            self._now.inputs = [self._place_for(number, batch) for number, batch in enumerate(batches)]
        for kept, batch in zip(self._now.inputs, batches, strict=True):
            pairs = [(own, new) for own, new in zip(kept, batch, strict=True) if own is not None]
            torch._foreach_copy_([own for own, _ in pairs], [new for _, new in pairs])
        if self._now.graphs is None and not self._begin(sizes):
            return None
        assert self._now.graphs is not None
        self._now.graphs.replay()
        return self._now.loss

    def drop(self) -> None:
        """Give the memory of all graphs back; the next step that may be replayed captures its own again."""
        if self.why_eager:
            return
        for captured in self._of_sizes.values():
            if captured.graphs is not None:
                captured.graphs.reset()
        self._pool, self._of_sizes, self._now = None, {}, _Captured()
        self._gradients().keep_memory(False)

    def forget(self) -> None:
        """Drop all graphs; the next ones are proved anew."""
        self.drop()
        self._proven.clear()

    def _gradients(self) -> FlatGradients:
        gradients = self._engine.gradients
        assert isinstance(gradients, FlatGradients)
        return gradients

    def _place_for(self, number: int, batch: Any) -> Any:
        """Return memory for a step's micro-batch ``number``, shared with other graphs if shapes are equal."""
        others = [captured.inputs[number] for captured in self._of_sizes.values() if captured.inputs]

        def place(at: int) -> Tensor | None:
            alike = (other[at] for other in others if batch[at] is not None and other[at].shape == batch[at].shape)
            return next(alike, None if batch[at] is None else torch.empty_like(batch[at]))

        return type(batch)(*map(place, range(len(batch))))

    def _begin(self, sizes: tuple[int, ...]) -> bool:
        """Capture the step, and prove the graph if that was not done; return whether all ranks may replay it."""
        self._gradients().keep_memory(True)
        trial = None
        if sizes not in self._proven:
            first = [value.clone() for value in self._tried(self._eagerly)]
            trial = Trial(first, [norm(*pair) for pair in zip(first, self._tried(self._eagerly), strict=True)])
        why_not = self._agreed(self._capture())
        if trial is not None and not why_not:
            assert self._now.graphs is not None
            replayed = self._tried(self._now.graphs.replay)
            why_not = self._agreed(trial.differences(replayed, self._gradients().precision))
        del trial
        if not why_not:
            if not self._proven:
                several = self._engine.num_stages > 1
                self.log(f"each step is {'CUDA graphs with messages between them' if several else 'one CUDA graph'}")
            self._proven.add(sizes)
            return True
        self._engine.data_iterator = iter(self._now.inputs)  # the eager step has the micro-batches that were loaded
        self.drop()
        self.why_eager = why_not
        if self._asked is True:
            raise DsConfigError(f"graphs = true, but {why_not}; set graphs to false")
        self.log_why_eager()
        return False

    def log_why_eager(self) -> None:
        """Show the reason why steps are not captured, if there is one."""
        if self.why_eager:
            self.log(f"steps are launched operator by operator: {self.why_eager}")

    def _agreed(self, why_not: str) -> str:
        """Return the first rank's reason against a graph, or nothing; collective."""
        return next(filter(None, all_gather_objects(why_not, str)), "")

    def _eagerly(self, start: Start = at_once) -> None:
        self._engine.data_iterator = iter(self._now.inputs)
        self._now.loss = self._engine.execute_program(by_host=False, start=start)

    def _capture(self) -> str:
        """Capture the step; return why that failed, or nothing."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graphs = Graphs(self._engine.device, self._pool, self._gradients().join)
        self._now.graphs, groups = graphs, self._engine.basic_optimizer.param_groups
        for group in groups:
            group["capturable"] = True  # else PyTorch's optimizers refuse; fused Adam is the same with and without
        wait_for_device(self._engine.device)
        torch.cuda.empty_cache()
        try:
            graphs.capture(lambda: self._eagerly(partial(_BetweenGraphs, graphs)))
        except Exception as error:  # of any operator that can't be captured
            words = next(iter(str(error).splitlines()), type(error).__name__)
            return f"capturing a step as a CUDA graph failed ({words})"
        finally:
            for group in groups:
                group["capturable"] = False
        return ""

    def _tried(self, step: Callable[[], None]) -> list[Tensor]:
        """Return the loss and gradients of a step on the loaded micro-batches that changes nothing, where they lie."""
        with self._engine.step_withheld():
            step()
            assert self._now.loss is not None
            return [self._now.loss, self._gradients().own_sum]


@dataclass(frozen=True)
class Trial:
    """Loss and gradients of an eager step, and their differences from another eager step."""

    values: list[Tensor]
    spreads: list[float]

    def differences(self, replayed: list[Tensor], precision: torch.dtype) -> str:
        """Return how a replay's loss and gradients differ from the eager steps' beyond rounding, or nothing."""
        for what, first, spread, other in zip(("loss", "gradients"), self.values, self.spreads, replayed, strict=True):
            off, size = norm(first, other), norm(first)
            allowed = max(SPREADS * spread, torch.finfo(precision).eps * size)
            if not off <= allowed:  # NaN differs too
                by = f"{off:.2g} in {size:.2g}, where rounding is {allowed:.2g}"
                return f"its {what} differ from an eager step's by {by}"
        return ""


def norm(tensor: Tensor, less: Tensor | None = None) -> float:
    """Return the norm of a tensor, or of its difference from another, in double precision, a piece at a time."""
    squared = 0.0
    for first in range(0, tensor.numel(), PIECE):
        piece = tensor.view(-1)[first : first + PIECE].double()
        if less is not None:
            piece -= less.view(-1)[first : first + PIECE]
        squared += float(piece.square_().sum())
    return math.sqrt(squared)


def why_eager(engine: "UnetPipelineEngine", asked: Literal["auto"] | bool) -> str:
    """Return why the steps of an engine are never captured, or nothing."""
    if asked is False:
        return "graphs is false"
    if engine.device.type != "cuda":
        return "there is no GPU"
    if not isinstance(engine.gradients, FlatGradients):
        return "only flat gradients can be captured, which ZeRO-1, ZeRO-2 and bf16 have"
    if not engine.gradients.decides_itself:
        return "only PyTorch's fused Adam can be captured (optimizer.params.torch_adam and fused)"
    if engine.wall_clock_breakdown():
        return "wall_clock_breakdown times each instruction"
    if asked == "auto" and max(engine.num_stages, engine.module.tensor.size) > 1:
        return "graphs of stages and tensor groups are taken only if graphs is true"
    return ""

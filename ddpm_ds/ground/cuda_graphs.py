"""Steps as CUDA graphs: one graph, or several with calls of the host between them.

After a failed capture PyTorch's allocator frees no memory, and the device's random numbers are unusable.
:class:`Graphs` repairs both, so that the process can go on eagerly.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")
_capturing: list["Graphs"] = []


class Graphs:
    """Operations on the current stream, which must not be the default one, as one graph or several::

        graph   post receive   graph   wait for it   graph   send   graph   ...

    All graphs use one pool of memory, in the order of their capture. Messages between them keep their memory as long as
    the graphs. ``pool`` is the handle of a pool shared with other graphs: while those compute, only results are kept.
    ``join`` lets the current stream wait for work that was begun on others, as a graph must before it ends.
    """

    def __init__(self, device: torch.device, pool: Any = None, join: Callable[[], object] = lambda: None) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._pool = pool or torch.cuda.graph_pool_handle()
        self._join = join
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], object]] = []
        self.held: list[object] = []
        """Values of caches that the graphs read."""

    def capture(self, work: Callable[[], object]) -> None:
        """Capture ``work``, which may draw none of PyTorch's random numbers; free the memory if that fails."""
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # between two calls
        with _spare_generator(self._device):
            _capturing.append(self)
            try:
                self._begin()
                work()
                self._graphs[-1].capture_end()
            except Exception:
                try:
                    self._graphs[-1].capture_end()
                except RuntimeError:  # the same failure, before the allocator has learnt of the end
                    with contextlib.suppress(RuntimeError):
                        torch._C._cuda_endAllocateToPool(self._device, self._pool)
                    torch._C._cuda_releasePool(self._device, self._pool)
                self.reset()
                raise
            finally:
                _capturing.remove(self)

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        self._calls.append(graph.replay)
        # Threads of the loader and of NCCL query their events meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def cut(self, call: Callable[[], object]) -> None:
        """End a graph, call ``call`` after its replay, and begin the next graph."""
        self._join()
        self._graphs[-1].capture_end()
        self._calls.append(call)
        self._begin()

    def replay(self) -> None:
        for call in self._calls:
            call()

    def reset(self) -> None:
        self._calls.clear()
        self.held.clear()
        for graph in self._graphs:
            graph.reset()


def cached(make: Callable[..., Made]) -> Callable[..., Made]:
    """Cache the tensors that ``make`` returns for its arguments; graphs that read them hold them.

    A graph keeps addresses alone, so without it a tensor that a cache forgets would be freed under the graph.
    """
    remembered = functools.cache(make)

    @functools.wraps(make)
    def get(*key: Hashable) -> Made:
        found = remembered(*key)
        for graphs in _capturing:
            graphs.held.append(found)
        return found

    return get


@contextlib.contextmanager
def _spare_generator(device: int) -> Iterator[None]:
    """Let a capture use a spare generator of random numbers, since a failure spoils it."""
    generator = torch.cuda.default_generators[device]
    kept = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(f"cuda:{device}").graphsafe_get_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(kept)

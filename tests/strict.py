"""A transport on CPU that is as strict as NCCL: what locks on GPUs locks here.

    python tests/strict.py SCRIPT ARGUMENTS     # runs a script of ``launch/`` with it, as one rank

- Every process group executes its operations, messages and collectives, one after another in the order of posting.
- A send is complete only when its receiver takes it.
- The default process group has no communicator: an operation in it ends the rank.
- Waiting for the device (``device.wait_for_device``, and DeepSpeed's ``synchronize``) waits for everything
  that this rank has posted in any group.

The device counts as one that runs behind its host, so that the engines take the care that they take on CUDA. Gloo
carries the bytes. A rank in which nothing that was posted has ended for ``STRICT_SECONDS`` says what it waits for and
ends with the code :data:`LOCKED`. Other settings for tests: ``STRICT_FOLDERS``, the working folder of each rank, with
colons between them; ``STRICT_MUTANT``, one of :data:`MUTANTS`, what is broken on purpose.
"""

import contextlib
import dataclasses
import datetime
import os
import queue
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

LOCKED = 86
COLLECTIVES = (
    *("all_gather_single", "allgather", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("_reduce_scatter_base", "scatter", "barrier"),
)
"""Methods of a process group that ``torch.distributed`` calls, in one of the versions of PyTorch that are accepted."""


class Posted:
    """What this process has posted in all groups and what has not ended yet."""

    def __init__(self) -> None:
        self.outstanding: dict[Future[Any], str] = {}
        self.ended_at = time.monotonic()

    def wait(self) -> None:
        for future in list(self.outstanding):
            future.wait()

    def watch(self, seconds: float) -> None:
        while True:
            time.sleep(0.5)
            waiting = list(self.outstanding.values())
            if not waiting:
                self.ended_at = time.monotonic()
            if time.monotonic() - self.ended_at > seconds:
                print(f"strict: rank {os.environ['RANK']} waits for {', '.join(waiting)}", file=sys.stderr, flush=True)
                os._exit(LOCKED)


posted = Posted()


class StrictGroup(dist.ProcessGroup):
    """A process group whose operations a thread of its own executes in their order."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stub lacks this one
        self._inner = dist.ProcessGroup(store, rank, size)
        self._inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._own, self._size = rank, size
        self._operations: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._execute, daemon=True).start()

    def _execute(self) -> None:
        while True:
            operation, future = self._operations.get()
            try:
                with torch.no_grad():
                    operation()
            except Exception as error:
                posted.outstanding.pop(future)
                future.set_exception(error)
                continue
            posted.ended_at = time.monotonic()
            posted.outstanding.pop(future)
            future.set_result(None)

    def post(self, what: str, operation: Callable[[], None]) -> Any:
        if self is dist.group.WORLD:  # NCCL would need a communicator of all ranks
            print(f"strict: {what} of rank {self._own} in the default process group", file=sys.stderr, flush=True)
            os._exit(LOCKED)
        future: Future[Any] = Future()
        posted.outstanding[future] = f"{what} of rank {self._own} of {self._size}"
        self._operations.put((operation, future))
        return _create_work_from_future(future)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Any:
        taken = torch.zeros(1)

        def operation() -> None:
            self._inner.send(list(tensors), to, 0).wait()
            self._inner.recv([taken], to, 1).wait()

        return self.post(f"send to {to}", operation)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        def operation() -> None:
            self._inner.recv(list(tensors), source, 0).wait()
            self._inner.send([torch.zeros(1)], source, 1).wait()

        return self.post(f"receive from {source}", operation)

    def getBackendName(self) -> str:
        return "strict"


def _collective(name: str) -> Callable[..., Any]:
    def method(self: StrictGroup, *args: Any, **kwargs: Any) -> Any:
        return self.post(name, lambda: getattr(self._inner, name)(*args, **kwargs).wait())

    return method


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(StrictGroup, _name, _collective(_name))


def replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(("ddpm_ds", "rivals")) and getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, by)


def install() -> None:
    """Let this process use the transport; before its process group is made."""

    import ddpm_ds.training.session  # noqa: F401  # with all in which functions are replaced
    from ddpm_ds.ground import device
    from ddpm_ds.pipeline import messages
    from ddpm_ds.pipeline.build import HostAccelerator

    dist.Backend.register_backend("strict", StrictGroup, devices=["cpu"])
    HostAccelerator.communication_backend_name = lambda accelerator: "strict"
    HostAccelerator.synchronize = lambda accelerator, device_index=None: posted.wait()
    replace_everywhere(messages.runs_behind, lambda device: True)
    replace_everywhere(messages.edge_group, lambda ranks, device, blocks: dist.new_group(ranks, backend="strict"))
    replace_everywhere(device.wait_for_device, lambda device: posted.wait())
    seconds = float(os.environ.get("STRICT_SECONDS", "120"))
    threading.Thread(target=posted.watch, args=(seconds,), daemon=True).start()


def share_communicators() -> None:
    """Two communicators for each phase of a pipeline, for all of its activations and for all of its gradients, and all
    receives of a step posted before it begins."""
    from ddpm_ds.pipeline import messages, schedule
    from ddpm_ds.pipeline.messages import Edge
    from tests.pipeline.order_model import all_at_once

    connect = messages.open_p2p_groups

    def shared(pipelines: Sequence[Sequence[int]], phases: int, device: torch.device) -> dict[Edge, messages.P2PGroup]:
        own = connect(pipelines, phases, device)
        groups: dict[Any, Any] = {
            (kind, phase): dist.new_group() for phase in range(phases) for kind in ("activations", "gradients")
        }
        return {
            edge: dataclasses.replace(p2p, group=groups.get((edge.kind, edge.phase), p2p.group))
            for edge, p2p in own.items()
        }

    replace_everywhere(connect, shared)
    replace_everywhere(schedule.posted_before, all_at_once)


def wait_in_a_forward() -> None:
    """Each layer waits for the device, as code does that is compiled or loaded when it first runs."""
    torch.nn.modules.module.register_module_forward_hook(lambda *_: posted.wait())


def watch_without_saying_so() -> None:
    """What watches a step lets its messages go from device to device."""
    from ddpm_ds.pipeline.engine import UnetPipelineEngine

    setattr(UnetPipelineEngine, "watched", lambda engine: contextlib.nullcontext())  # noqa: B010


def barrier_of_the_world() -> None:
    """Ranks wait for each other in the default process group, for which NCCL needs a communicator of all ranks."""
    from ddpm_ds.pipeline import messages

    replace_everywhere(messages.barrier, dist.barrier)


MUTANTS = {
    "shared communicators": share_communicators,
    "a wait in a forward": wait_in_a_forward,
    "a careless profile": watch_without_saying_so,
    "a barrier of the world": barrier_of_the_world,
}


if __name__ == "__main__":
    from tests import strict  # the module that others import, not this script

    strict.install()
    if "STRICT_MUTANT" in os.environ:
        strict.MUTANTS[os.environ["STRICT_MUTANT"]]()
    if "STRICT_FOLDERS" in os.environ:
        os.chdir(os.environ["STRICT_FOLDERS"].split(":")[int(os.environ["RANK"])])
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # else `rivals` would be the folder of its tests
    runpy.run_path(sys.argv[0], run_name="__main__")

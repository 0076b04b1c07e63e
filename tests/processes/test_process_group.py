"""The process group of a program: who waits for how long, and what is said where it can't be made."""

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator

from ddpm_ds.ground.errors import DsConfigError, HostError, LayoutError
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.processes import process_group as process_group_module
from ddpm_ds.processes.process_group import decided_by_rank_0, group_timeout, process_group


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a rank that starts; DeepSpeed forgets it afterwards."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in (world | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    before = get_accelerator()
    use_host_accelerator()
    yield
    set_accelerator(before)


@pytest.mark.parametrize("seconds", [1e12, float("inf")])
def test_a_watchdog_that_never_speaks_overflows_no_clock(seconds: float) -> None:
    with process_group(group_timeout(seconds)):
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.new_group([0])


def test_every_group_of_a_program_has_its_timeout_and_nccls_watchdog_is_no_quicker() -> None:
    with process_group(timedelta(seconds=4321)):
        groups: list[Any] = [dist.group.WORLD, dist.new_group([0]), deepspeed.comm.new_group([0])]
        for group in groups:
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=4321)
        assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "4321"
    assert not dist.is_initialized()


def test_a_port_that_is_taken_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(LayoutError, match=r"port \d+ is taken"), process_group():
            pass


@pytest.mark.parametrize(
    ("several", "error", "raised"),
    [
        (True, "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting", HostError),
        (True, "[enforce fail at gloo/transport/tcp/device.cc] connection refused", HostError),
        (True, "CUDA error: an illegal memory access was encountered", RuntimeError),
        (False, "Gloo connectFullMesh failed", RuntimeError),
    ],
)
def test_ranks_that_can_not_connect_are_one_line_whatever_pytorch_raises(
    several: bool, error: str, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(process_group_module, "on_several_hosts", lambda: several)
    with pytest.raises(raised) as found, process_group():
        pass
    assert type(found.value) is raised and error in str(found.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_keeps_rank_0_from_deciding_is_raised_by_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide() -> int:
        raise DsConfigError("kernels = fused needs Triton")

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    said = (None, "DsConfigError", "kernels = fused needs Triton")
    monkeypatch.setattr(process_group_module, "broadcast_object", lambda value, kind: value if rank == 0 else said)
    with pytest.raises(DsConfigError, match="needs Triton"):
        decided_by_rank_0(decide, int)

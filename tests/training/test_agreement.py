"""Ranks whose GPUs or versions differ are named. ``tests/processes`` tests that all get the message."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpm_ds.ground.errors import HostError
from ddpm_ds.processes.rendezvous import Rendezvous
from ddpm_ds.training import start


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for no other."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


SETTINGS = {"NCCL_MAX_P2P_NCHANNELS": "8", "NCCL_GRAPH_REGISTER": "0", "NCCL_RUNTIME_CONNECT": "0"}
H100 = {"id": "GPU-a", "model": "H100 80.00 GiB", "settings": SETTINGS}


def gpus_of(others: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The remark of rank 0, which has an H100, on the GPUs of ``others``, each on a host of its own."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    properties = SimpleNamespace(uuid="GPU-a", name="H100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    together = Rendezvous(1.0)
    together.hosts = tuple(f"worker-{rank}" for rank in range(1 + len(others)))
    monkeypatch.setattr(together, "agree", lambda topic, facts: [facts, *others])
    return start.check_gpus(together, torch.device("cuda", 0))


def test_two_ranks_on_one_gpu_are_named_unless_nccl_may_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(start.SHARED_GPU, raising=False)
    others = [{**H100, "id": "GPU-b"}, {**H100, "id": "GPU-a"}]
    said = r"host worker-0 \(rank 0\) and host worker-2 \(rank 2\) share one GPU \(H100 80.00 GiB, GPU-a\)"
    with pytest.raises(HostError, match=said):
        gpus_of(others, monkeypatch)
    monkeypatch.setenv(start.SHARED_GPU, "1")
    assert gpus_of(others, monkeypatch) is None


def test_gpus_of_several_models_are_a_remark_and_settings_that_differ_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [{**H100, "id": "GPU-b"}, {**H100, "id": "GPU-c", "model": "A100 40.00 GiB"}]
    said = gpus_of(others, monkeypatch)
    assert said is not None and said.startswith("GPUs of several models (2 x H100 80.00 GiB, 1 x A100 40.00 GiB): ")
    others[0]["settings"] = {**SETTINGS, "NCCL_MAX_P2P_NCHANNELS": "16"}
    said = r"worker-1 \(rank 1\) differs from .*: NCCL_MAX_P2P_NCHANNELS is 16, not 8; set it alike"
    with pytest.raises(HostError, match=said):
        gpus_of(others, monkeypatch)


def test_on_a_cpu_nobody_asks_for_gpus_and_a_version_that_differs_is_named() -> None:
    alone = Rendezvous(1.0)
    assert start.check_gpus(alone, torch.device("cpu")) is None
    alone.hosts = ("worker-1", "worker-2")
    for said, expected in (({"torch": "2.11.0"}, "2.11.0"), ({}, "unset")):
        with pytest.raises(HostError, match=f"version of torch is {expected}, not 2.14.1; install the same"):
            start._check(alone, "version of ", [{"torch": "2.14.1"}, said], "install the same versions")

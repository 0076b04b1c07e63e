"""Which device a process gets, what CUDA's environment then holds, and what is wrong with a GPU that can't be used."""

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import psutil
import pynvml
import pytest
import torch

from ddpm_ds.ground import device
from ddpm_ds.ground import host as host_facts
from ddpm_ds.ground.device import LOCKING_ENVIRONMENT, MESSAGE_ENVIRONMENT, choose_device
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.ground.host import processors
from tests.forking import ONE_THREAD, REPOSITORY
from tests.launching import error_of

TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading it. (Triggered internally)"
)
Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Makes this process one of some on a host with GPUs; its environment is a copy."""

    def make(gpus: int = 2, shown: int | None = None, starts: bool = True, processes: int = 2, **changes: str) -> None:
        """``gpus`` are the host's, ``shown`` those that PyTorch counts; ``changes`` are of the environment."""
        place = {"RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(processes)}
        ours = {*MESSAGE_ENVIRONMENT, *LOCKING_ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"}
        rest = {name: value for name, value in os.environ.items() if name not in ours}
        monkeypatch.setattr(os, "environ", {**rest, **place, **changes})
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus if shown is None else shown)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: starts)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: gpus)
        monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "470.82.01")
        monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 11040)

    return make


def refused(wanted: str = "auto", stages: int = 1) -> str:
    return error_of(LayoutError, choose_device, wanted, stages)


ALL = 2**50  # bytes of the host's memory


@pytest.mark.parametrize(
    ("count", "groups", "limits", "left"),
    [
        (device.host_memory, "0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "4096"}, 4096),
        (
            device.host_memory,
            "5:cpu:/a\n4:memory:/x\n",
            {"cpu/memory.max": "1", "memory/memory.limit_in_bytes": "6"},
            6,
        ),
        (device.host_memory, "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, ALL),
        (device.host_memory, None, {}, ALL),
        (processors, "0::/job/step\n", {"job/step/cpu.max": "max 100000", "job/cpu.max": "250000 100000"}, 3),
        (processors, "5:cpu,x:/a\n", {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        (processors, "5:cpu,x:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        (processors, "0::/\n", {}, 64),
    ],
)
def test_memory_and_processors_are_the_hosts_or_what_control_groups_leave_of_them(
    count: Callable[[], int],
    groups: str | None,
    limits: dict[str, str],
    left: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_facts, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_facts, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Mock(total=ALL))
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    for name, limit in limits.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    assert count() == left


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "sm_90a"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((6, 1), ["sm_75", "compute_75"], False),
        ((10, 3), ["sm_100a", "sm_120"], False),
        ((10, 3), ["sm_100f"], True),
        ((9, 0), [], True),  # nothing is known
    ],
)
def test_a_gpu_without_kernels_is_refused_before_anything_is_started(
    capability: tuple[int, int], built: list[str], runs: bool, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host()
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    for choose in (lambda: choose_device("auto"), lambda: device.usable_device("cuda:0")):
        with contextlib.nullcontext() if runs else pytest.raises(LayoutError, match="or use --device cpu") as refused:
            choose()
        if refused is not None:
            said = f"Some GPU has compute capability {capability[0]}.{capability[1]}, and this PyTorch"
            assert str(refused.value).startswith(said) and f"kernels for {', '.join(built)} only" in str(refused.value)


def test_messages_get_their_environment_before_cuda_is_first_called_and_rank_0_says_so_once(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host()
    at_first_call: list[dict[str, str]] = []

    def device_count() -> int:
        at_first_call.append(dict(os.environ))
        return 2

    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    assert choose_device("auto", 2) == choose_device("cuda", 2) == torch.device("cuda", 0)
    assert MESSAGE_ENVIRONMENT.items() <= at_first_call[0].items()
    said = ", ".join(f"{name}={value}" for name, value in MESSAGE_ENVIRONMENT.items())
    assert capsys.readouterr().out == f"set for messages between GPUs (docs/gpu.md): {said}\n"


def test_a_process_that_only_plans_a_run_holds_no_device(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: pytest.fail("this makes a context on the device"))
    assert choose_device("auto").type == "cuda" and not MESSAGE_ENVIRONMENT.keys() & os.environ.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "1"},
        {"processes": 1},
        {"DS_ACCELERATOR": "cpu"},
        {"gpus": 0},
        dict.fromkeys(MESSAGE_ENVIRONMENT, "16"),  # what the user has set stays
    ],
    ids=str,
)
def test_other_ranks_one_process_a_cpu_and_a_users_own_choice_print_nothing(
    changes: dict[str, object], host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host(**changes)
    choose_device("auto")
    assert capsys.readouterr().out == ""
    assert (MESSAGE_ENVIRONMENT.keys() <= os.environ.keys()) == ("RANK" in changes or "16" in changes.values())
    assert "16" not in changes.values() or {os.environ[name] for name in MESSAGE_ENVIRONMENT} == {"16"}


@pytest.mark.parametrize("name", LOCKING_ENVIRONMENT)
def test_what_would_stop_a_pipeline_is_refused_where_there_is_one(name: str, host: Host) -> None:
    host(**{name: "1"})
    assert refused(stages=4).startswith(f"{name} = 1 would stop a pipeline of 4 stages for ever: ")
    choose_device("auto", 1)
    host(**{name: "0"})
    choose_device("auto", 4)
    host(gpus=0, **{name: "1"})
    assert choose_device("auto", 4).type == "cpu"


@pytest.mark.parametrize(("shown", "wanted"), [(1, "auto"), (0, "auto"), (1, "cuda")])  # counted by PyTorch or not
def test_a_driver_that_is_too_old_is_named_with_both_versions(
    shown: int, wanted: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(gpus=1, shown=shown, processes=1)

    def is_available() -> bool:
        warnings.warn(TOO_OLD, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert refused(wanted) == (
        "this host has a GPU, but CUDA does not start (The NVIDIA driver on your system is too old (found version "
        "11040)); driver 470.82.01 serves CUDA up to 11.4, and this PyTorch is built for CUDA 13.0: update the driver, "
        "install a PyTorch for its CUDA, or use --device cpu"
    )


def test_a_driver_that_does_not_answer_is_no_reason_for_the_cpu(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(shown=0, starts=False)

    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    monkeypatch.setattr(device.Path, "glob", lambda path, pattern: iter([path / "nvidia0"]))
    assert "its driver does not answer (RM has detected an NVML/RM version mismatch.)" in refused()
    monkeypatch.setattr(device.Path, "glob", lambda path, pattern: iter([]))
    assert choose_device("auto").type == "cpu"


def test_gpus_that_cuda_does_not_show_are_named_with_their_variable(host: Host) -> None:
    host(shown=0, starts=False, CUDA_VISIBLE_DEVICES="7")
    assert "has a GPU and CUDA_VISIBLE_DEVICES = 7, but CUDA does not start (no device)" in refused()


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_leave_the_cpu(visible: str, host: Host) -> None:
    host(shown=0, starts=False, CUDA_VISIBLE_DEVICES=visible)
    assert choose_device("auto").type == "cpu" and os.environ["DS_ACCELERATOR"] == "cpu"
    host(shown=0, starts=False, CUDA_VISIBLE_DEVICES=visible)
    assert "--device = cuda, but CUDA_VISIBLE_DEVICES hides every GPU; use --device cpu" in refused("cuda")


def test_a_pytorch_without_cuda_trains_on_the_cpu_unless_cuda_is_asked_for(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(shown=0, starts=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "--device = cuda, but this PyTorch is built without CUDA" in refused("cuda")
    assert choose_device("auto").type == "cpu"
    host(shown=1, CUDA_VISIBLE_DEVICES="3")
    fewer = "2 processes were started on a host with 1 CUDA devices (CUDA_VISIBLE_DEVICES = 3); start 1 (deepspeed "
    assert refused().startswith(fewer)


def test_a_gpu_that_is_busy_is_one_line(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host()

    def set_device(index: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    assert refused().startswith("CUDA device 0 can't be used (CUDA error: CUDA-capable device(s) is/are busy or unav")


def test_the_table_of_the_docs_has_these_variables_and_values() -> None:
    table = (REPOSITORY / "docs" / "gpu.md").read_text()
    assert all(f"| `{name}` | {value} |" in table for name, value in MESSAGE_ENVIRONMENT.items())
    assert all(f"| `{name}` | refused " in table for name in LOCKING_ENVIRONMENT)


def test_a_rank_starts_without_mlflow_and_the_compiler_which_can_still_be_imported_and_needs_no_triton(
    tmp_path: Path,
) -> None:
    (tmp_path / "mlflow.py").touch()  # MLflow's own import takes as long as PyTorch's
    program = """
import sys
sys.modules["triton"] = None
import ddpm_ds.unet.fused_norm, ddpm_ds.unet.model
del sys.modules["triton"]
from ddpm_ds.pipeline import import_deepspeed
import_deepspeed()
import ddpm_ds.training.session
assert not {"mlflow", "torch._inductor.compile_fx"} & set(sys.modules)
from deepspeed.runtime import compiler
assert compiler.compile().__name__ == "compile"
import mlflow
"""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, env=environment)

"""This process's device and its data types; the device and CUDA's environment are set before DeepSpeed is imported."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import warnings
from pathlib import Path

import psutil
import pynvml
import torch

from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.ground.host import control_groups, processes_on_host, processors
from ddpm_ds.ground.units import Precision

DTYPES: dict[Precision, tuple[str, torch.dtype]] = {
    "fp32": ("F32", torch.float32),
    "fp16": ("F16", torch.float16),
    "bf16": ("BF16", torch.bfloat16),
}
"""Data types by name: the name in safetensors files and the PyTorch type."""
MESSAGE_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_MAX_P2P_NCHANNELS": "8",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Default environment for several processes on CUDA; docs/gpu.md gives the reasons."""
LOCKING_ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": "the host would wait for each receive before it sends the message that another rank needs",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "messages to different ranks would wait for each other, each rank's in another order",
}
"""Variables that deadlock a pipeline of several stages unless they are 0, with the reason."""

KEPT_MEMORY = {"MMAP_THRESHOLD": (-3, 2**31 - 1), "TRIM_THRESHOLD": (-1, -1), "TOP_PAD": (-2, 64 * 2**20)}
"""(parameter, value) of glibc's malloc by environment name, to keep blocks for the next pass (docs/performance.md)."""


def choose_device(wanted: str, stages: int = 1) -> torch.device:
    """Choose this process's device for a pipeline of ``stages`` and set its environment.

    ``wanted`` is ``auto``, ``cpu`` or ``cuda``; auto obeys ``DS_ACCELERATOR``, else takes CUDA if available. Sets
    ``DS_ACCELERATOR``, which DeepSpeed reads when it is imported, and for several processes on CUDA
    :data:`MESSAGE_ENVIRONMENT`. CUDA gets cuDNN's benchmark mode, since shapes stay the same from step to step.

    Raises LayoutError if CUDA can't be used as ``wanted``, by so many local processes, or without a deadlock.
    """
    asked_by = "--device" if wanted != "auto" else "DS_ACCELERATOR"
    wanted = wanted if wanted != "auto" else os.environ.get("DS_ACCELERATOR", "auto")
    if wanted not in ("auto", "cpu", "cuda"):
        raise LayoutError(f"{asked_by} = {wanted} has not been tried with this project; use cpu or cuda")
    chosen, devices = dict[str, str](), 0
    if wanted != "cpu":
        # NVIDIA's driver reads its environment once, at the first CUDA call, even one that only counts devices.
        if os.environ.get("WORLD_SIZE", "1") != "1" and not _hidden() and _gpus():
            chosen = {name: value for name, value in MESSAGE_ENVIRONMENT.items() if name not in os.environ}
            os.environ.update(chosen)
        devices = torch.cuda.device_count()
        check_cuda(devices)
    if wanted == "cuda" and not devices:
        why = "PyTorch finds no CUDA device; use --device cpu, or fix the driver"
        if torch.version.cuda is None:
            why = "this PyTorch is built without CUDA; use --device cpu, or install one that is built with it"
        elif _hidden():
            why = "CUDA_VISIBLE_DEVICES hides every GPU; use --device cpu, or unset it"
        raise LayoutError(f"{asked_by} = cuda, but {why}")
    if not devices:
        os.environ["DS_ACCELERATOR"] = "cpu"
        with contextlib.suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            for name, setting in KEPT_MEMORY.items():
                if f"MALLOC_{name}_" not in os.environ:
                    mallopt(*setting)
        return torch.device("cpu")
    if (local_size := processes_on_host()) > devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES = {visible})"
        raise LayoutError(
            f"{local_size} processes were started on a host with {devices} CUDA devices{shown}; start {devices} "
            f"(deepspeed --num_gpus {devices}) or use --device cpu"
        )
    for name, why in LOCKING_ENVIRONMENT.items():
        if stages > 1 and (value := os.environ.get(name, "0")) not in ("", "0"):
            raise LayoutError(f"{name} = {value} would stop a pipeline of {stages} stages for ever: {why}; unset it")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    try:
        if "LOCAL_RANK" in os.environ:  # a process that only plans a run takes no memory of a device
            _check_architecture(device)
            torch.cuda.set_device(device)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise LayoutError(f"CUDA device {device.index} can't be used ({why}); see nvidia-smi") from None
    if chosen and os.environ.get("RANK") == "0":
        settings = ", ".join(f"{name}={value}" for name, value in chosen.items())
        print(f"set for messages between GPUs (docs/gpu.md): {settings}", flush=True)
    os.environ["DS_ACCELERATOR"] = "cuda"
    torch.backends.cudnn.benchmark = True
    return device


def usable_device(device: torch.device | str) -> torch.device:
    """Return a device by name, such as ``cuda:1``; raises LayoutError unless it is a CPU or a GPU of this host."""
    try:
        found = torch.device(device)
    except (RuntimeError, UnicodeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise LayoutError(f"device = {device} is unknown; use cpu, cuda or a numbered one such as cuda:0")
    if found.type == "cuda":
        check_cuda(devices := torch.cuda.device_count())
        if (found.index or 0) >= devices:
            raise LayoutError(f"device = {device}, but this process has {devices} CUDA devices; use another, or cpu")
        _check_architecture(found)
    return found


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels can run on a device: CUDA, with Triton installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def memory_bytes(device: torch.device, sharing: int | None = None) -> int:
    """Return a device's memory in bytes. A CPU's is shared by ``sharing`` processes (default: the run's here)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory() // (sharing or processes_on_host())


def described(sharing: int) -> tuple[str, int]:
    """Return the name of this process's GPU, or ``cpu``, and its :func:`memory_bytes`."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return "cpu", memory_bytes(torch.device("cpu"), sharing)
    return torch.cuda.get_device_name(), memory_bytes(torch.device("cuda"))


def share_threads(device: torch.device, sharing: int | None = None) -> None:
    """Give each of ``sharing`` processes (default: the run's on this host) its share of the cores, unless the
    environment sets the number of threads.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        threads = min(torch.get_num_threads(), processors())
        torch.set_num_threads(max(1, threads // (sharing or processes_on_host())))


def host_memory() -> int:
    """Return the bytes of memory that this process may use: the host's, or less if a control group limits it."""
    most = int(psutil.virtual_memory().total)
    for folder in control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                most = min(most, int((folder / name).read_text()))
    return most


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has finished all its work, on every stream, posted receives included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_cuda(devices: int) -> None:
    """Raise LayoutError if this host has a GPU that CUDA can't use; ``devices`` is PyTorch's count of CUDA devices."""
    if torch.version.cuda is None or _hidden() or not (devices or _gpus()):
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    why = str(caught[-1].message).removeprefix("CUDA initialization: ").split(". ")[0] if caught else "no device"
    try:
        pynvml.nvmlInit()
        driver, newest = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
        serves = f"driver {driver} serves CUDA up to {newest // 1000}.{newest % 1000 // 10}"
    except pynvml.NVMLError as error:
        serves = f"its driver does not answer ({error})"
    raise LayoutError(
        f"this host has a GPU{f' and CUDA_VISIBLE_DEVICES = {visible}' if visible else ''}, but CUDA does not start "
        f"({why}); {serves}, and this PyTorch is built for CUDA {torch.version.cuda}: update the driver, install a "
        "PyTorch for its CUDA, or use --device cpu"
    )


def _check_architecture(device: torch.device) -> None:
    name, capability, built = (
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        torch.cuda.get_arch_list(),
    )
    # Kernels run on later architectures of their major number, and code for compute_XY on all later ones.
    for kind, major, minor, suffix in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(built)):
        made_for = (int(major), int(minor))
        later = made_for < capability and (kind == "compute" or made_for[0] == capability[0])
        if made_for == capability or (later and suffix != "a"):
            return
    if torch.version.cuda is not None and built:
        raise LayoutError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and this PyTorch {torch.__version__} has "
            f"kernels for {', '.join(built)} only; install one that is built for it, or use --device cpu"
        )


def _hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs: it is empty or begins with an invalid number."""
    return not re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


def _gpus() -> int:
    """Return the number of this host's GPUs, from NVIDIA's driver or its device files."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))

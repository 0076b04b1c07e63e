"""The kernel profile: all time is shared out once, and each kind of work is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpm_ds.observe.kernels import GROUPS, KernelProfile, group_of, shares
from tests.observe.observed_worker import Told

NODE = "autograd::engine::evaluate_function: "


def event(name: str, start: float = 0, end: float = 1e6, kind: str = "CPU", **values: Any) -> SimpleNamespace:
    """As PyTorch's profiler has it, times in microseconds."""
    seconds = {"self_cpu_time_total": end - start, "self_device_time_total": end - start if kind != "CPU" else 0.0}
    flags: dict[str, Any] = {"is_async": False, "is_user_annotation": False, "cpu_parent": None, "kernels": []}
    return SimpleNamespace(**{"name": name, "device_type": SimpleNamespace(name=kind), **flags, **seconds, **values})


NAMES = {
    "convolution_forward": "aten::conv2d | aten::mkldnn_convolution | aten::cudnn_convolution | "
    "aten::_conv_depthwise2d",
    "convolution_backward": "aten::convolution_backward | aten::_slow_conv2d_backward | "
    "aten::mkldnn_convolution_backward | ddpm_ds::convolution_weight_backward",
    "attention": "aten::_scaled_dot_product_flash_attention_for_cpu_backward | aten::_flash_attention_forward",
    "normalisation": "aten::native_group_norm_backward | ddpm_ds::norm_silu | ddpm_ds::norm_silu_backward",
    "copies": "aten::_to_copy | aten::cat | Memcpy DtoD (Device -> Device)",
    "optimizer": "Optimizer.step#AdamW.step | instruction OptimizerStep",
    "communication": "c10d::allreduce_ | gloo:all_reduce | ncclDevKernel_AllReduce_Sum_f16_RING_LL",
    "launch_overhead": "cudaLaunchKernel | cuLaunchKernelEx | cudaMemcpyAsync",
    "synchronisation": "cudaStreamSynchronize | cudaDeviceSynchronize | wait for other ranks",
    "other": f"aten::addmm | ProfilerStep* | instruction ForwardPass |  {NODE}ConvolutionBackward0",
}
"""Names of events by group."""


@pytest.mark.parametrize("group", NAMES)
def test_a_name_has_its_group(group: str) -> None:
    for name in NAMES[group].split(" | "):
        assert group_of(name) == group, name


def test_an_event_belongs_to_the_work_that_it_is_done_within() -> None:
    expected = [
        ("instruction OptimizerStep", None, "optimizer"),
        ("aten::copy_", 0, "optimizer"),
        ("c10d::allgather_", 0, "communication"),  # but messages and waits are what they are
        ("wait for other ranks", 0, "synchronisation"),
        ("instruction LoadMicroBatch", None, "loader"),
        ("aten::to", 4, "loader"),
        ("aten::conv2d", None, "convolution_forward"),
        ("aten::copy_", 6, "convolution_forward"),
        ("cudaLaunchKernel", 7, "launch_overhead"),
        ("aten::to", None, "copies"),
        ("aten::empty_strided", 9, "copies"),
        ("aten::scaled_dot_product_attention", None, "attention"),
        ("aten::softmax", 11, "attention"),
        (NODE + "ConvolutionBackward0", None, "other"),
        ("aten::convolution_backward", 13, "convolution_backward"),
        ("aten::native_group_norm", 13, "normalisation"),  # as a checkpoint recomputes it
        ("between steps: sampling", None, None),
        ("aten::conv2d", 16, None),
        ("aten::empty", 7, "convolution_forward"),
    ]
    events: list[Any] = []
    for number, (name, parent, _) in enumerate(expected):
        above = None if parent is None else events[parent]
        events.append(event(name, cpu_parent=above, self_cpu_time_total=2.0**number * 1e6))
    found, wanted = shares(events, on_device=False), dict.fromkeys([*GROUPS][1:], 0.0)
    for number, (_, _, group) in enumerate(expected):
        if group is not None:
            wanted[group] += 2.0**number
    assert found == wanted


def test_on_a_device_kernels_count_and_of_the_host_its_calls_and_waits() -> None:
    convolution = event("aten::cudnn_convolution", 0, 100, self_cpu_time_total=90)
    convolution.kernels = [SimpleNamespace(name="implicit_gemm", duration=400.0)]
    label = event("ProfilerStep#1", 0, 2000, is_user_annotation=True)
    label.kernels = [SimpleNamespace(name="ProfilerStep#1", duration=2000.0)]  # a range has a shadow on the device
    found = shares(
        [
            label,
            convolution,
            event("cudaLaunchKernel", 10, 20, cpu_parent=convolution),
            event("cudaDeviceSynchronize", 200, 900),
            event("aten::add", 100, 150),
            event("implicit_gemm", 50, 450, "CUDA"),
            event("ncclDevKernel_SendRecv", 450, 650, "CUDA"),  # launched by nobody that was recorded
            event("ProfilerStep#1", 0, 2000, "CUDA", is_user_annotation=True),
        ],
        on_device=True,
    )
    expected = {"convolution_forward": 400, "launch_overhead": 10, "synchronisation": 700, "communication": 200}
    assert {group: round(seconds * 1e6) for group, seconds in found.items() if seconds} == expected


def test_a_run_that_was_resumed_after_the_steps_says_so(tmp_path: Path) -> None:
    engine: Any = None
    told = Told()
    profile = KernelProfile(engine, range(3, 5), tmp_path / "late", told)
    profile.begin_step(8)
    profile.finish()
    assert told.logged == ["--profile-kernels 3-4: none of these steps was taken since the run was started or resumed"]
    assert not told.metrics and not (tmp_path / "late").exists()

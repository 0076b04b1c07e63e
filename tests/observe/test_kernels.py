"""The kernel profile: all time is shared out once, and what every rank saw is in the run's folder."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from ddpm_ds.observe.kernels import (
    GROUPS,
    KernelProfile,
    ProfiledOperation,
    bounded,
    group_of_each,
    operations_of,
    shares,
)
from tests.observe.observed_worker import Told

NODE = "autograd::engine::evaluate_function: "


def groups_of(*names_and_parents: tuple[str, int | None]) -> list[str | None]:
    return list(group_of_each([ProfiledOperation(name, 1.0, parent) for name, parent in names_and_parents]))


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
    "other": f"aten::addmm | ProfilerStep* | instruction ForwardPass | {NODE}ConvolutionBackward0",
}
"""Names of events by group."""


@pytest.mark.parametrize("group", NAMES)
def test_a_name_has_its_group(group: str) -> None:
    for name in NAMES[group].split(" | "):
        assert groups_of((name, None)) == [group], name


def test_an_operation_belongs_to_what_it_ran_within() -> None:
    expected = [
        ("instruction OptimizerStep", None, "optimizer"),
        ("aten::copy_", 0, "optimizer"),  # a copy of the optimizer's
        ("c10d::allgather_", 0, "communication"),  # but messages and waits are what they are
        ("wait for other ranks", 0, "synchronisation"),
        ("aten::conv2d", None, "convolution_forward"),
        ("aten::copy_", 4, "convolution_forward"),
        ("cudaLaunchKernel", 5, "launch_overhead"),
        ("aten::to", None, "copies"),
        ("aten::empty_strided", 7, "copies"),
        ("aten::scaled_dot_product_attention", None, "attention"),
        ("aten::softmax", 9, "attention"),
        ("aten::bmm", 9, "attention"),
        ("aten::bmm", None, "other"),
    ]
    assert groups_of(*((name, parent) for name, parent, _ in expected)) == [group for *_, group in expected]


def test_what_a_checkpoint_recomputes_within_a_node_of_the_backward_keeps_its_group() -> None:
    assert groups_of(
        (NODE + "ConvolutionBackward0", None),
        ("ConvolutionBackward0", 0),
        ("aten::native_group_norm", 1),
        ("aten::mul", 1),
        ("aten::convolution_backward", 1),
        ("aten::empty", 4),
    ) == ["other", "other", "normalisation", "other", "convolution_backward", "convolution_backward"]


def test_the_backward_of_an_operator_of_attention_is_attention() -> None:
    groups = group_of_each(
        [
            ProfiledOperation("aten::scaled_dot_product_attention", 1.0),
            ProfiledOperation("aten::bmm", 1.0, parent=0),
            ProfiledOperation("aten::bmm", 1.0),
            ProfiledOperation(NODE + "BmmBackward0", 1.0, forward=1),
            ProfiledOperation("aten::bmm", 1.0, parent=3),
            ProfiledOperation(NODE + "BmmBackward0", 1.0, forward=2),
            ProfiledOperation("aten::bmm", 1.0, parent=5),
        ]
    )
    assert groups == ["attention", "attention", "other", "attention", "attention", "other", "other"]


def test_samplings_and_checkpoints_are_left_out_with_all_below_them() -> None:
    found = shares(
        [
            ProfiledOperation("ProfilerStep*", 0.5),
            ProfiledOperation("between steps: sampling", 1.0, parent=0),
            ProfiledOperation("aten::conv2d", 2.0, parent=1),
            ProfiledOperation("between steps: checkpoint", 4.0, parent=0),
            ProfiledOperation("aten::conv2d", 8.0, parent=0),
        ]
    )
    assert {group: names for group, names in found.items() if names} == {
        "convolution_forward": {"aten::conv2d": 8.0},
        "other": {"ProfilerStep*": 0.5},
    }


def tiny_step() -> None:
    """One training step of a convolution, a normalisation and an attention that PyTorch composes of its parts."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1))
    optimizer = torch.optim.AdamW(layers.parameters())
    h = layers(torch.randn(2, 3, 8, 8))
    pixels = h.flatten(2).transpose(1, 2).unsqueeze(1)
    with sdpa_kernel(SDPBackend.MATH):
        composed = scaled_dot_product_attention(pixels, pixels, pixels)
    pixels = pixels.contiguous()
    fused = scaled_dot_product_attention(pixels, pixels, pixels)
    torch.bmm(composed.squeeze(1) + fused.squeeze(1), torch.randn(2, 8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_real_step_is_shared_out_without_rest() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        tiny_step()
    events = profiler.events()
    assert events is not None
    found = shares(operations_of(events, on_device=False))
    seconds = {group: sum(names.values()) for group, names in found.items()}
    assert sum(seconds.values()) == pytest.approx(events.self_cpu_time_total * 1e-6)
    assert set(seconds) == set(GROUPS) and min(seconds.values()) >= 0
    for group in ("convolution_forward", "convolution_backward", "attention", "normalisation", "optimizer", "copies"):
        assert seconds[group] > 0, group
    assert "aten::native_group_norm_backward" in found["normalisation"]
    assert {"aten::_softmax", "aten::_softmax_backward_data"} <= found["attention"].keys()
    assert any("flash_attention_for_cpu_backward" in name for name in found["attention"])
    assert {"aten::_softmax", "aten::_softmax_backward_data"}.isdisjoint(found["other"])
    operations = operations_of(events, on_device=False)
    groups = zip(operations, group_of_each(operations), strict=True)
    products = Counter(group for operation, group in groups if operation.name == "aten::bmm")
    assert products == {"attention": 6, "other": 2}  # 2 and 1 forward, 4 and 1 backward: one factor needs no gradient
    assert any(name.startswith("Optimizer.step#AdamW") for name in found["optimizer"])


def event(name: str, start: float, end: float, kind: str = "CPU", **values: Any) -> SimpleNamespace:
    """As PyTorch's profiler has it, times in microseconds."""
    known: dict[str, Any] = {
        "name": name,
        "device_type": SimpleNamespace(name=kind),
        "is_async": False,
        "is_user_annotation": False,
        "time_range": SimpleNamespace(start=start, end=end),
        "cpu_parent": None,
        "kernels": [],
        "sequence_nr": -1,
        "thread": 1,
        "fwd_thread": 0,
        "self_cpu_time_total": end - start,
        "self_device_time_total": end - start if kind != "CPU" else 0.0,
    }
    return SimpleNamespace(**{**known, **values})


def test_on_a_device_kernels_count_and_of_the_host_its_calls_and_waits() -> None:
    convolution = event("aten::cudnn_convolution", 0, 100, self_cpu_time_total=90)
    convolution.kernels = [SimpleNamespace(name="implicit_gemm", duration=400.0)]
    label = event("ProfilerStep#1", 0, 2000, is_user_annotation=True)
    label.kernels = [SimpleNamespace(name="ProfilerStep#1", duration=2000.0)]  # a range has a shadow on the device
    found = shares(
        operations_of(
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
    )
    microseconds = {group: round(sum(names.values()) * 1e6) for group, names in found.items() if any(names.values())}
    assert microseconds == {
        "convolution_forward": 400,
        "launch_overhead": 10,
        "synchronisation": 700,
        "communication": 200,
    }


def trace_of(events: int) -> bytes:
    draw = random.Random(0)
    made = [{"ph": "X", "name": f"{draw.random()}", "ts": float(number), "dur": 1} for number in range(events)]
    draw.shuffle(made)
    return json.dumps({"schema": 1, "traceEvents": [*made, {"ph": "M", "name": "process_name"}]}).encode()


def test_a_trace_that_is_too_large_keeps_its_beginning() -> None:
    whole = trace_of(4000)
    packed, kept = bounded(whole, 10**9)
    assert kept == 1.0 and gzip.decompress(packed) == whole
    packed, kept = bounded(whole, 20_000)
    assert len(packed) <= 20_000 and 0.2 < kept < 0.6
    cut = json.loads(gzip.decompress(packed))
    assert cut["schema"] == 1 and cut["traceEvents"][0]["ph"] == "M"
    times = [one["ts"] for one in cut["traceEvents"][1:]]
    assert times == [float(number) for number in range(len(times))] and len(times) == pytest.approx(4000 * kept, abs=2)


def test_a_run_that_was_resumed_after_the_steps_says_so(tmp_path: Path) -> None:
    engine: Any = None
    told = Told()
    profile = KernelProfile(engine, range(3, 5), tmp_path / "late", told)
    profile.begin_step(8)
    profile.finish()
    assert told.logged == ["--profile-kernels 3-4: none of these steps was taken since the run was started or resumed"]
    assert not told.metrics and not (tmp_path / "late").exists()

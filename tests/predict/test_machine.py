"""Devices to plan for."""

from __future__ import annotations

import pytest

from ddpm_ds.predict.machine import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind

"""Bytes that replicas on two hosts send over a slow link."""

from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.slow_link import ACKNOWLEDGEMENT, FRAME, PAYLOAD, Setting, measured, slow

OTHER_BYTES = 2**16
"""Most bytes of a step that are neither gradients nor weights: norms, barriers and their acknowledgements."""


@pytest.mark.parametrize(("zero", "micro_batches"), [(1, 2), (2, 2)])
def test_gradients_and_weights_cross_a_slow_link_once(
    zero: int, micro_batches: int, can_make_hosts: None, tmp_path: Path
) -> None:
    """Of two replicas each sends half of the gradients, under ZeRO-2 for each micro-batch, and half of the weights."""
    setting = Setting(zero, micro_batches, images=2, steps=3)
    with Hosts(tmp_path / "made", visible=tmp_path) as hosts:
        for host in hosts:
            slow(host, "200mbit")
        found = measured(hosts, tmp_path, setting, replicas=2)
    for one in found:
        reductions = micro_batches if zero == 2 else 1
        data = (reductions + 1) * one.parameters * 4 / 2
        # frames with headers, fewer where the host sends them together, and an acknowledgement of each received
        assert data <= one.sent <= data * (FRAME + ACKNOWLEDGEMENT) / PAYLOAD + OTHER_BYTES, one

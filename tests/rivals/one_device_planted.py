"""The benchmark on one device twice in a process: with a row that has begun with another weight, then as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rivals import command, one_device_build
from rivals.abilities import Abilities
from rivals.one_device_build import OneDeviceRow
from rivals.rows_one_device import OurLoop, Start


def with_a_wrong_weight(name: str, start: Start, able: Abilities) -> OneDeviceRow:
    row = build(name, start, able)
    if name == "fused-adamw":
        assert isinstance(row, OurLoop)
        with torch.no_grad():
            next(row.model.parameters()).view(-1)[0] += 0.1
    return row


arguments, file = sys.argv[1:-1], Path(sys.argv[-1])
build, one_device_build.build_one_device_row = one_device_build.build_one_device_row, with_a_wrong_weight
code = command.main([*arguments, "--rows", "plain,channels-last,fused-adamw"])
one_device_build.build_one_device_row = build
assert code == 3, code
rows = "plain,channels-last,fused-kernels,fused-adamw,diffusers,bare,engine,lucidrains"
sys.exit(command.main([*arguments, "--rows", rows, "--json", str(file)]))

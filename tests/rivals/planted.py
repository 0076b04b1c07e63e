"""The benchmark with a wrong row: DDP begins with other weights. Started as ``launch/bench.py`` is."""

from __future__ import annotations

import sys
from dataclasses import replace

from rivals import command, session
from rivals.rows import Row

from ddpm_ds.train.setting import Setting


def with_a_wrong_row(name: str, setting: Setting) -> Row:
    plan = setting.plan
    if name == "ddp":
        other = plan.spec.model_copy(update={"train": plan.spec.train.model_copy(update={"seed": 99})})
        setting = replace(setting, plan=replace(plan, spec=other))
    return build_row(name, setting)


build_row, session.build_row = session.build_row, with_a_wrong_row
sys.exit(command.main())

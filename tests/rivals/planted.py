"""``launch/bench.py`` twice in a process: with the rows of WRONG, the last of which begins with other weights; and as
it was asked."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from rivals import benchmark, command
from rivals.rows import Row, Setting

build_row = benchmark.build_row


def with_a_wrong_row(name: str, setting: Setting) -> Row:
    plan = setting.plan
    if name == os.environ["WRONG"].split(",")[-1]:
        other = plan.spec.model_copy(update={"train": plan.spec.train.model_copy(update={"seed": 99})})
        setting = replace(setting, plan=replace(plan, spec=other))
    return build_row(name, setting)


benchmark.build_row = with_a_wrong_row
code = command.main([*sys.argv[1:], "--rows", os.environ["WRONG"]])
assert code == 3, code
benchmark.build_row = build_row
sys.exit(command.main())

"""``launch/bench.py`` twice in a process: with the rows of WRONG, the last of which begins with other weights; and as
it was asked."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from rivals import command, layout, one_device
from rivals.rows import Setting

module: Any = one_device if "--one-device" in sys.argv else layout
build_row = module.build_row


def with_a_wrong_row(name: str, setting: Setting, *others: Any) -> Any:
    plan = setting.plan
    if name == os.environ["WRONG"].split(",")[-1]:
        other = plan.spec.model_copy(update={"train": plan.spec.train.model_copy(update={"seed": 99})})
        setting = replace(setting, plan=replace(plan, spec=other))
    return build_row(name, setting, *others)


module.build_row = with_a_wrong_row
code = command.main([*sys.argv[1:], "--rows", os.environ["WRONG"]])
assert code == 3, code
module.build_row = build_row
sys.exit(command.main())

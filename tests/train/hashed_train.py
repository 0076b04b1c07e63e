"""launch/train.py whose ranks tell, at the end, their place and a hash of the weights that they hold whole.

RUN_DIR/whole{rank}.json: the stage, and the hashes by name of the parameters and their averages.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch.distributed as dist

from ddpm_ds.cli import train as command
from ddpm_ds.train.saving import Saver
from ddpm_ds.unet.tensor_group import shard_of

check_saved = Saver.check_saved


def check_and_hash(self: Saver) -> None:
    check_saved(self)
    engine: Any = self._engine
    hashes: dict[str, list[str]] = {}
    for applied in (False, True):
        if applied:
            with self._ema.applied():
                add(engine, hashes)
        else:
            add(engine, hashes)
    found = {"stage": engine.stage_id, "hashes": hashes}
    (self._folder.parent / f"whole{dist.get_rank()}.json").write_text(json.dumps(found))


def add(engine: Any, hashes: dict[str, list[str]]) -> None:
    for name, parameter in engine.module.named_parameters():
        if shard_of(parameter) is None:
            bits = parameter.detach().cpu().numpy().tobytes()
            hashes.setdefault(name, []).append(hashlib.sha256(bits).hexdigest())


Saver.check_saved = check_and_hash  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(command.main())

"""What all ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

Value = TypeVar("Value")


def decided_by_rank_0(decide: Callable[[], Value]) -> Value:
    """What rank 0 decides, on every rank; collective."""
    decided: list[Any] = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(decided, src=0)
    return cast(Value, decided[0])

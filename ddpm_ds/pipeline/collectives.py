"""What all ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ddpm_ds.errors import UserError

Value = TypeVar("Value")


def decided_by_rank_0(decide: Callable[[], Value]) -> Value:
    """What rank 0 decides, on every rank; collective.

    Raises:
        UserError: what keeps rank 0 from deciding; on every rank, since none may go on and wait for it.
    """
    decided: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            decided = [decide()]
        except UserError as error:
            decided = [error]
    dist.broadcast_object_list(decided, src=0)
    if isinstance(decided[0], UserError):
        raise decided[0]
    return cast(Value, decided[0])

"""What all ranks must agree on."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

Value = TypeVar("Value")
_numbers = itertools.count()


def decided_by_rank_0(decide: Callable[[], Value]) -> Value:
    """What rank 0 decides, on every rank; collective."""
    decided: list[Any] = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(decided, src=0)
    return cast(Value, decided[0])


def said_by_all(value: Value) -> list[Value]:
    """What every rank says, by rank; collective.

    It goes through the store at which the ranks met: no device takes part, so a rank whose GPU is broken can say so.
    """
    assert dist.group.WORLD is not None
    store = dist.PrefixStore(f"ddpm_ds/said/{next(_numbers)}", dist.group.WORLD.get_group_store())
    store.set(str(dist.get_rank()), pickle.dumps(value))  # type: ignore[arg-type]  # its stub wants str
    return [pickle.loads(said) for said in store.multi_get([str(rank) for rank in range(dist.get_world_size())])]

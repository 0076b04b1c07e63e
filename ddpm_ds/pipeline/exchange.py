"""Exchange of values between ranks as JSON, since unpickling could run code from the sender.

Every function takes the type of the value, by which the receiver rebuilds and checks it: numbers, texts, tuples, lists,
mappings, dataclasses and named tuples of these. All functions are collective.
"""

import itertools
import json
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

_numbers = itertools.count()


def all_gather_objects(value: Any, kind: Any) -> list[Any]:
    """Return all ranks' values of type ``kind``, by rank; one rank waits for nothing."""
    if dist.get_world_size() == 1:
        return [value]
    own = _of_one_length(_packed(value, kind))
    messages = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(messages, own)
    return [_unpacked(message, kind) for message in messages]


def gather_objects(value: Any, kind: Any) -> list[Any] | None:
    """Return all ranks' values of type ``kind``, by rank, on rank 0; None on the others."""
    own = _of_one_length(_packed(value, kind))
    messages = [torch.empty_like(own) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(own, messages, dst=0)
    return None if messages is None else [_unpacked(message, kind) for message in messages]


def broadcast_object(value: Any, kind: Any) -> Any:
    """Return rank 0's value of type ``kind``; the others' values are ignored."""
    first = dist.get_rank() == 0
    message = _packed(value, kind) if first else torch.empty(0, dtype=torch.uint8, device=_device())
    length = _length(message)
    dist.broadcast(length, src=0)
    message = message if first else message.new_empty(int(length))
    dist.broadcast(message, src=0)
    return _unpacked(message, kind)


def all_gather_objects_by_store(value: Any, kind: Any) -> list[Any]:
    """Return all ranks' values of type ``kind``, by rank, through the process group's store, so that a rank with a
    broken GPU can report it.
    """
    assert dist.group.WORLD is not None
    store = dist.PrefixStore(f"ddpm_ds/said/{next(_numbers)}", dist.group.WORLD.get_group_store())
    store.set(str(dist.get_rank()), _text(value, kind))
    said = store.multi_get([str(rank) for rank in range(dist.get_world_size())])
    return [TypeAdapter(kind).validate_python(json.loads(text)) for text in said]


def _text(value: Any, kind: Any) -> str:
    return json.dumps(TypeAdapter(kind).dump_python(value, mode="json"))


def _packed(value: Any, kind: Any) -> Tensor:
    return torch.frombuffer(bytearray(_text(value, kind).encode()), dtype=torch.uint8).to(_device())


def _unpacked(message: Tensor, kind: Any) -> Any:
    return TypeAdapter(kind).validate_python(json.loads(message.cpu().numpy().tobytes()))


def _of_one_length(message: Tensor) -> Tensor:
    """Pad a message with spaces, which JSON allows, to the length of the longest of all ranks."""
    longest = _length(message)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return torch.nn.functional.pad(message, (0, int(longest) - len(message)), value=ord(" "))


def _length(message: Tensor) -> Tensor:
    return torch.tensor([len(message)], dtype=torch.int64, device=message.device)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")

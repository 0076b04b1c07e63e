"""Checks that all ranks of a run have the same software, files and images, and a GPU each."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddpm_ds.command_line import gib
from ddpm_ds.device import MESSAGE_ENVIRONMENT
from ddpm_ds.errors import HostError
from ddpm_ds.planning import RunPlan
from ddpm_ds.processes.hosts import sources, versions
from ddpm_ds.processes.rendezvous import Rendezvous
from ddpm_ds.tracking.tracker import flatten

SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable that lets ranks share a GPU, experimentally, in NCCL 2.30 and later."""
MOST_NAMED = 3
"""Maximum number of differences that a message names."""


def check_alike(rendezvous: Rendezvous, plan: RunPlan, device: str) -> None:
    """Check that all ranks would run the same; collective. ``device`` is the type of this rank's device.

    Raises:
        HostError: a rank differs from rank 0; the message says how, and the fix.
        PeerLostError: a rank did not join.
    """
    software = {"python": ".".join(map(str, sys.version_info[:2])), **versions()}
    checksum = hashlib.sha256(json.dumps(sources()).encode()).hexdigest()
    about = {
        "version of ": (software, "install the same versions on all hosts"),
        "": ({"ddpm_ds/*.py": checksum}, "bring all hosts to one commit, with the same changes"),
        f"{plan.spec_path}: ": (plan.spec.model_dump(mode="json"), "give all hosts the same file and --set"),
        f"{plan.ds_path}: ": (plan.ds.as_json(), "give all hosts the same file and -p"),
        "chosen ": (
            {"cuts": list(plan.bounds[1:-1]), "device": device},
            "give -p and --device, so that no host has to choose",
        ),
    }
    said = rendezvous.agree("start", {title: values for title, (values, _) in about.items()})
    for title, (_, remedy) in about.items():
        _check(rendezvous, title, [one.get(title, {}) for one in said], remedy)


def check_gpus(rendezvous: Rendezvous, device: torch.device) -> str | None:
    """Check that each rank has its own GPU; collective. Does nothing on a CPU.

    Returns:
        A line for the user if the ranks' GPUs are of different models, else None.

    Raises:
        HostError: ranks share a GPU, or their settings of NCCL differ; the message says which, and the fix.
        PeerLostError: a rank is lost.
    """
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    settings = {name: os.environ.get(name) for name in MESSAGE_ENVIRONMENT if name.startswith("NCCL_")}
    said = rendezvous.agree(
        "gpus", {"id": str(gpu.uuid), "model": f"{gpu.name} {gib(gpu.total_memory)}", "settings": settings}
    )
    _check(rendezvous, "", [one["settings"] for one in said], "set it alike everywhere, in .deepspeed_env for example")
    owners: dict[str, int] = {}
    for rank, one in enumerate(said):
        if (owner := owners.setdefault(one["id"], rank)) != rank and os.environ.get(SHARED_GPU, "0") == "0":
            raise HostError(
                f"{rendezvous.host_of(owner)} and {rendezvous.host_of(rank)} share one GPU "
                f"({one['model']}, {one['id']}), and NCCL needs one for each rank; start a host once, with as many "
                "processes as GPUs"
            )
    models = Counter(one["model"] for one in said)
    if len(models) == 1:
        return None
    named = ", ".join(f"{count} x {model}" for model, count in models.items())
    return f"GPUs of several models ({named}): each step waits for the slowest, and the smallest has to hold its stage"


def check_same_images(rendezvous: Rendezvous, sha256: Mapping[str, str]) -> None:
    """Check that all hosts have prepared the same images.

    Raises:
        HostError: a host's data-set cache has other checksums than rank 0's.
        PeerLostError: a rank is lost.
    """
    remedy = "give all hosts the same images, or a data.store_root that all of them see"
    _check(rendezvous, "prepared images: ", rendezvous.agree("images", dict(sha256)), remedy)


def _check(rendezvous: Rendezvous, title: str, said: Sequence[Mapping[str, Any]], remedy: str) -> None:
    first = flatten(said[0])
    for rank, other in enumerate(map(flatten, said)):
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if differing:
            named = "; ".join(
                f"{title}{key} is {_short(other.get(key))}, not {_short(first.get(key))}"
                for key in differing[:MOST_NAMED]
            )
            more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
            raise HostError(f"{rendezvous.host_of(rank)} differs from {rendezvous.host_of(0)}: {named}{more}; {remedy}")


def _short(value: str | None) -> str:
    """Return a value for a message; a checksum is cut to its first digits."""
    return "unset" if value is None else value[:12] if len(value) == 64 else value

"""What shows that a run loses time to something, in plain words and with its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from ddpm_ds.verdict.facts import Facts
from ddpm_ds.verdict.whatif import Model, mean, recomputation_seconds


def evidence(facts: Facts, model: Model, loss: str, share: float) -> str:
    """A clause about a loss that takes ``share`` of all devices' time."""
    return _CLAUSES[loss](facts, model, share)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("h") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _bubble(facts: Facts, model: Model, share: float) -> str:
    return (
        f"with {_count(facts.micro_batches, 'micro-batch')} on {_count(facts.stages, 'rank')} ({facts.schedule}) each "
        f"rank has nothing to do for {_ms(share * facts.step_seconds)} of a {_ms(facts.step_seconds)} step, while the "
        "pipeline fills and drains"
    )


def _imbalance(facts: Facts, model: Model, share: float) -> str:
    busy = [
        facts.micro_batches * sum(phase.forward_seconds + phase.backward_seconds for phase in rank.phases)
        for rank in facts.ranks
    ]
    slowest = max(range(facts.stages), key=lambda rank: busy[rank])
    return (
        f"the layers of rank {slowest} take {_ms(busy[slowest])} of a {_ms(facts.step_seconds)} step, those of a rank "
        f"{_ms(mean(busy))} in the mean, and the others wait for it"
    )


def _communication(facts: Facts, model: Model, share: float) -> str:
    messages = sum(phase.activation_bytes + phase.gradient_bytes for rank in facts.ranks for phase in rank.phases)
    size = facts.micro_batches * messages
    reduce = mean([rank.reduce for rank in facts.ranks])
    clause = f"{_ms(share * facts.step_seconds)} of a {_ms(facts.step_seconds)} step go to messages and gradients"
    if facts.stages > 1:
        rate = "" if math.isinf(model.bytes_per_second) else f", as over links of {_rate(model.bytes_per_second)}"
        clause += f": the schedule does not explain that waiting, and {size / 1e6:,.3g} MB cross between stages{rate}"
    if facts.replicas > 1:
        clause += f"; {_ms(reduce)} to the gradients of {facts.replicas} replicas"
    return clause


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:,.3g} MB/s"


def _data_wait(facts: Facts, model: Model, share: float) -> str:
    longest = max(range(facts.stages), key=lambda rank: facts.ranks[rank].data_wait)
    return (
        f"rank {longest} waits {_ms(facts.ranks[longest].data_wait)} of a {_ms(facts.step_seconds)} step for the next "
        f"images, with data.workers = {facts.spec.data.workers}, and the others wait for it"
    )


def _transfers(facts: Facts, model: Model, share: float) -> str:
    longest = max(range(facts.stages), key=lambda rank: facts.ranks[rank].load)
    return (
        f"rank {longest} takes {_ms(facts.ranks[longest].load)} of a {_ms(facts.step_seconds)} step to bring images to "
        "its device and to noise them"
    )


def _overflows(facts: Facts, model: Model, share: float) -> str:
    found = facts.overflows
    return (
        f"fp16 overflowed in {found.skipped:,} of {_count(found.steps, 'step')}, which were thrown away; the loss "
        f"scale began at {found.first_scale:,.0f} and is {found.last_scale:,.0f}"
    )


def _optimizer(facts: Facts, model: Model, share: float) -> str:
    optimizer, ema = (max(getattr(rank, name) for rank in facts.ranks) for name in ("optimizer", "ema"))
    return (
        f"of a {_ms(facts.step_seconds)} step of {_count(facts.step_images, 'image')} the optimizer takes "
        f"{_ms(optimizer)} and the averaged weights {_ms(ema)}, however few the images"
    )


def _checkpoints(facts: Facts, model: Model, share: float) -> str:
    pauses = facts.pauses
    return f"checkpoints held training up for {pauses.checkpoint_seconds:,.3g} s of {pauses.seconds:,.3g} s"


def _sampling(facts: Facts, model: Model, share: float) -> str:
    pauses, losses = facts.pauses, min(facts.evaluation_seconds, facts.pauses.inspection_seconds)
    return (
        f"training stood still for {pauses.inspection_seconds:,.3g} s of {pauses.seconds:,.3g} s: "
        f"{pauses.inspection_seconds - losses:,.3g} s for samples, {losses:,.3g} s for held-out losses"
    )


def _recomputation(facts: Facts, model: Model, share: float) -> str:
    memory = facts.device.memory_bytes
    has = "" if memory is None else f" of the {_mib(memory)} that its device has"
    return (
        f"activation_checkpoint_interval = {facts.checkpoint_interval} computes activations a second time, "
        f"{_ms(recomputation_seconds(facts))} of a {_ms(facts.step_seconds)} step; to keep them would take "
        f"{_mib(model.activation_bytes(model.now))}{has}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.3g} MiB" if size < 2**30 else f"{size / 2**30:,.3g} GiB"


def _low_utilisation(facts: Facts, model: Model, share: float) -> str:
    starting = sum(layer.start.forward + layer.start.backward for layer in model.layers) / facts.stages
    passes = mean(
        [sum(phase.forward_seconds + phase.backward_seconds for phase in rank.phases) for rank in facts.ranks]
    )
    reached = "" if facts.mfu is None else f"; the devices reach {facts.mfu:.1%} of their flops"
    return (
        f"of {_ms(passes)} that a micro-batch of {_count(facts.micro_batch_images, 'image')} takes a rank, "
        f"{_ms(starting)} are what its layers take before they compute, however few the images{reached}"
    )


def _other(facts: Facts, model: Model, share: float) -> str:
    return (
        f"{_ms(mean([rank.other for rank in facts.ranks]))} of a {_ms(facts.step_seconds)} step are in no instruction: "
        "Python between them, logging, the delivery of the last messages; --profile-kernels FIRST-LAST shows more"
    )


_CLAUSES: dict[str, Callable[[Facts, Model, float], str]] = {
    "bubble": _bubble,
    "imbalance": _imbalance,
    "communication": _communication,
    "data wait": _data_wait,
    "transfers": _transfers,
    "overflow steps": _overflows,
    "optimizer": _optimizer,
    "checkpoint pauses": _checkpoints,
    "sampling pauses": _sampling,
    "recomputation": _recomputation,
    "low utilisation": _low_utilisation,
    "other": _other,
}

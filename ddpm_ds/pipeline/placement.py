"""Placement of stages and replicas on processes and hosts, and the bytes of a step that leave each host.

Hosts fill up with consecutive global ranks, so the numbering of ranks decides which axis is split over hosts.
Two hosts of two processes, 2 stages x 2 replicas::

    across hosts     global rank           host a                 host b              between the hosts
    stages           stage 2 + replica     stage 0: r0 r1         stage 1: r0 r1      activations and their gradients
    replicas         replica 2 + stage     replica 0: s0 s1       replica 1: s0 s1    sums of gradients, new weights
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.config.ds_model import DsConfig
from ddpm_ds.pipeline.cuts import folds, segments, sent_elements
from ddpm_ds.schema.layout import ELEMENT_BYTES, AcrossHosts, Schedule
from ddpm_ds.unet.layers import Layer
from ddpm_ds.unet.shards import agreed_elements, sums_of

ACROSS_HOSTS: tuple[AcrossHosts, ...] = ("stages", "replicas")


class Edges(Counter[tuple[Hashable, Hashable]]):
    """Number of directed connections from process to process, by the hosts that they go from and to."""

    @cached_property
    def crossing(self) -> int:
        """Number of connections from one host to another."""
        return sum(count for (here, there), count in self.items() if here != there)


@dataclass(frozen=True)
class Grid:
    """Grid of ``stages`` pipeline ranks x ``replicas`` x ``tensor``, the ranks of a tensor group, which are neighbours
    and have the same stage of the same replica; and the host of each global rank.
    """

    stages: int
    replicas: int
    across: AcrossHosts
    hosts: tuple[Hashable, ...]
    tensor: int = 1

    def rank(self, stage: int, replica: int, part: int = 0) -> int:
        """Return the global rank of a rank of the pipeline in a replica, of this place in its tensor group."""
        group = stage * self.replicas + replica if self.across == "stages" else replica * self.stages + stage
        return group * self.tensor + part

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the rank in its pipeline, the replica and the place in the tensor group of a global rank."""
        group, part = divmod(rank, self.tensor)
        if self.across == "stages":
            return *divmod(group, self.replicas), part
        replica, stage = divmod(group, self.stages)
        return stage, replica, part

    def hosts_of(self, stage: int) -> list[Hashable]:
        """Return the host of each replica of a rank of the pipeline, of the first of its tensor group."""
        return self._members(stage)[0]

    @property
    def several_hosts(self) -> bool:
        """Whether processes are known to be on more than one host."""
        return len(set(self.hosts)) > 1

    @property
    def split_groups(self) -> int:
        """Number of tensor groups whose ranks are not all on one host."""
        starts = range(0, len(self.hosts), self.tensor)
        return sum(len(set(self.hosts[start : start + self.tensor])) > 1 for start in starts)

    @cached_property
    def boundaries(self) -> tuple[Edges, ...]:
        """Return the connections between each rank of the pipeline and the next, there and back, in all replicas."""
        pairs = itertools.pairwise([*itertools.chain(*self._members(stage))] for stage in range(self.stages))
        return tuple(Edges([*zip(here, there, strict=True), *zip(there, here, strict=True)]) for here, there in pairs)

    @cached_property
    def rings(self) -> tuple[Edges, ...]:
        """Return the rings through the replicas of each rank of the pipeline, which collectives use.

        Gloo takes them in the order of ranks, NCCL through each host once.
        """
        return tuple(_ring_edges(self._members(stage)) for stage in range(self.stages))

    @cached_property
    def groups(self) -> tuple[Edges, ...]:
        """Return the rings through the tensor groups of each rank of the pipeline."""
        return tuple(_ring_edges([*zip(*self._members(stage), strict=True)]) for stage in range(self.stages))

    def _members(self, stage: int) -> list[list[Hashable]]:
        """Return the host of each replica of a rank of the pipeline, by the place in its tensor group."""
        return [
            [self.hosts[self.rank(stage, replica, part)] for replica in range(self.replicas)]
            for part in range(self.tensor)
        ]


def _ring_edges(rings: Iterable[Sequence[Hashable]]) -> Edges:
    """Return the connections around some rings, of which the hosts of the members are given."""
    return Edges(pair for hosts in rings if hosts[1:] for pair in zip(hosts, [*hosts[1:], hosts[0]], strict=True))


@dataclass(frozen=True)
class Sharing:
    """Communication of gradients and weights among replicas in a step: reductions, bytes, gathering of weights."""

    reductions: int
    """Reductions of each gradient in a step: one, or one for each micro-batch under ZeRO-2."""
    passes: int
    """Passes around the ring in a reduction: two if all replicas get the sum, one if only its owner does."""
    gradient_bytes: int
    """Bytes of an element while it is reduced."""
    weight_bytes: int
    """Bytes of a gathered element; 0 if every replica steps all weights itself."""
    replicas: int = 1


def sharing(config: DsConfig, *, zero_stage: int, micro_batches: int, replicas: int = 1) -> Sharing:
    """Return how replicas of this project's engines share gradients and weights under a DeepSpeed JSON.

    Without ZeRO gradients are all-reduced once, as by DeepSpeed's optimizer for bf16, which ZeRO-1 has that adds bf16
    gradients up in fp32. ZeRO all-reduces too, although only the owner of a gradient needs it, unless
    ``use_multi_rank_bucket_allreduce`` is off; under ZeRO-1 gradients are scattered. ZeRO gathers the weights
    that each replica has stepped, as the optimizer for bf16 does without it.
    """
    zero, precision = config.zero_optimization, config.precision
    to_owner = zero_stage == 1 or not zero.use_multi_rank_bucket_allreduce
    everywhere = zero_stage == 0 or (zero_stage == 1 and precision == "bf16" and config.adds_in_fp32)
    return Sharing(
        reductions=micro_batches if zero_stage == 2 else 1,
        passes=1 if not everywhere and to_owner and zero.reduce_scatter else 2,
        gradient_bytes=ELEMENT_BYTES[config.communication_data_type or precision],
        weight_bytes=ELEMENT_BYTES[precision] if zero_stage or precision == "bf16" else 0,
        replicas=replicas,
    )


@dataclass(frozen=True)
class Grouping:
    """Settings that decide the bytes that a tensor group sends."""

    size: int = 1
    element_bytes: int = 4
    """Bytes of an element in the layers' arithmetic, in which activations are summed."""
    interval: int = 0
    """Number of layers per activation checkpoint; 0 recomputes nothing."""
    reentrant: bool = False
    """Whether checkpoints are reentrant."""
    gives_gradients: bool = False
    """Whether the first rank gives the others the gradients that all have computed, as on GPUs."""


@dataclass(frozen=True)
class Exchange:
    """Bytes that a step sends, by rank of the pipeline, wherever the processes are."""

    messages: tuple[int, ...]
    """Bytes between a rank and the next one, each way, in one replica: activations one way and gradients the other."""
    gradients: tuple[float, ...]
    """Bytes of gradients over each edge of the ring through a rank's replicas."""
    weights: tuple[float, ...]
    """Bytes of weights over each edge of that ring, when weights are gathered."""
    sums: tuple[float, ...]
    """Bytes over each edge of the ring through a rank's tensor group: sums of activations and of gradients."""


def exchange(
    layers: Sequence[Layer],
    bounds: Sequence[int],
    schedule: Schedule,
    *,
    images: int,
    precision: Literal["fp32", "fp16", "bf16"],
    shared: Sharing,
    reductions: Sequence[Sequence[float]] | None = None,
    grouping: Grouping = Grouping(),
) -> Exchange:
    """Return the bytes sent by a step of ``images`` images for each replica.

    ``reductions`` says by rank and phase how often ZeRO-2 reduces weight gradients, if they have passes of their
    own; all other gradients are reduced after each micro-batch.
    """
    ranks = (len(bounds) - 1) // (2 if folds(schedule) else 1)
    width, ring = images * ELEMENT_BYTES[precision], (shared.replicas - 1) / shared.replicas

    messages = []
    for rank in range(ranks - 1):
        (_, down), *up = segments(bounds, schedule, rank)
        cuts = [(down, 0), *((start, 1) for start, _ in up)]
        messages.append(width * sum(sent_elements(layers, *cut, schedule) for cut in cuts))
    parameters = [
        sum(layer.parameters for start, stop in segments(bounds, schedule, rank) for layer in layers[start:stop])
        for rank in range(ranks)
    ]
    reduced: list[float] = [shared.reductions * count for count in parameters]
    if reductions is not None and shared.reductions > 1:
        reduced = [
            sum(
                count * layer.weights + shared.reductions * (layer.parameters - layer.weights)
                for count, (start, stop) in zip(counts, segments(bounds, schedule, rank), strict=True)
                for layer in layers[start:stop]
            )
            for rank, counts in enumerate(reductions)
        ]
    gradient = shared.passes * shared.gradient_bytes * ring
    owned = 1 / shared.replicas if shared.weight_bytes else 1.0
    return Exchange(
        messages=tuple(messages),
        gradients=tuple(gradient * count for count in reduced),
        weights=tuple(shared.weight_bytes * ring * count for count in parameters),
        sums=tuple(
            sum(
                _group_bytes(layers[start:stop], grouping, images, owned * shared.gradient_bytes)
                for start, stop in segments(bounds, schedule, rank)
            )
            for rank in range(ranks)
        ),
    )


def _group_bytes(own: Sequence[Layer], grouping: Grouping, images: float, gradient_bytes: float) -> float:
    """Return the bytes of a step of a stage with these layers over each edge of the ring through its tensor group."""
    size, passes = grouping.size, sums_of(own, grouping.interval, reentrant=grouping.reentrant)
    elements = images * sum(one.elements for one in passes)
    agreed = agreed_elements(own, given=grouping.gives_gradients)
    return (2 * elements * grouping.element_bytes + agreed * gradient_bytes) * (size - 1) / size


def run_exchange(
    ds: ResolvedDsConfig,
    layers: Sequence[Layer],
    bounds: Sequence[int],
    reductions: Sequence[Sequence[float]] | None = None,
    *,
    arithmetic_bytes: int | None = None,
    gives_gradients: bool = True,
) -> Exchange:
    """Return the bytes sent by a step of a run; ``reductions`` as in :func:`exchange`, and ``layers`` split.

    ``arithmetic_bytes`` and ``gives_gradients`` are those of :class:`Grouping`, by default a GPU's.

    While the reductions are unknown, a weight-gradient pass is assumed to take half of the micro-batches in flight.
    """
    layout = ds.layout
    if reductions is None and layout.schedule == "planned":
        passes = math.ceil(layout.micro_batches / max(1, layout.most_kept // 2))
        reductions = [[passes, passes]] * layout.stages
    return exchange(
        layers,
        bounds,
        layout.schedule,
        images=layout.batch_images // layout.replicas,
        precision=ds.precision,
        shared=sharing(
            ds.config, zero_stage=layout.zero_stage, micro_batches=layout.micro_batches, replicas=layout.replicas
        ),
        reductions=reductions,
        grouping=Grouping(
            layout.tensor.size,
            arithmetic_bytes or ELEMENT_BYTES[ds.precision],
            0 if layout.checkpoint_interval == "auto" else layout.checkpoint_interval,
            ds.config.pipeline.use_reentrant,
            gives_gradients,
        ),
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step on all connections, without the headers that a network adds to each packet."""

    activations: int
    """Bytes between hosts of activations and their gradients, between stages."""
    gradients: int
    """Bytes between hosts of gradients, among replicas."""
    weights: int
    """Bytes between hosts of stepped weights, among replicas."""
    sums: int
    """Bytes between hosts of the sums of tensor groups."""
    within_hosts: int
    sent: Mapping[Hashable, int]
    """Bytes sent to other hosts, by the host that sends."""

    @property
    def between_hosts(self) -> int:
        """Bytes that go from one host to another."""
        return self.activations + self.gradients + self.weights + self.sums

    @property
    def busiest(self) -> int:
        """Bytes sent to other hosts by the host that sends most."""
        return max(self.sent.values())


def traffic(grid: Grid, sent: Exchange) -> Traffic:
    """Return the bytes of a step by connection."""
    reducing, gathering, summing = (grid.rings, sent.gradients), (grid.rings, sent.weights), (grid.groups, sent.sums)
    kinds = ((grid.boundaries, sent.messages), reducing, gathering, summing)
    crossing, within = [], 0.0
    by_host: dict[Hashable, float] = dict.fromkeys(grid.hosts, 0.0)
    for wires, sizes in kinds:
        crossing.append(sum(edges.crossing * size for edges, size in zip(wires, sizes, strict=True)))
        for edges, size in zip(wires, sizes, strict=True):
            within += (edges.total() - edges.crossing) * size
            for (here, there), count in edges.items():
                by_host[here] += count * size * (here != there)
    activations, gradients, weights, sums = map(round, crossing)
    leaving = {host: round(size) for host, size in by_host.items()}
    return Traffic(activations, gradients, weights, sums, round(within), leaving)


def across_hosts(
    ds: ResolvedDsConfig, layers: Sequence[Layer], bounds: Sequence[int], hosts: Sequence[Hashable]
) -> AcrossHosts:
    """Return the axis of a run that is split over ``hosts``, one for each global rank.

    It is the JSON's choice, else the axis with which the busiest host sends less, and stages if both are equal. A
    single stage allows only replicas, and a single replica only stages.
    """
    stages, replicas = ds.layout.stages, ds.layout.replicas
    if len(set(hosts)) < 2 or min(stages, replicas) == 1:
        return "replicas" if len(set(hosts)) > 1 and stages == 1 else "stages"
    if ds.layout.across_hosts != "auto":
        return ds.layout.across_hosts
    sent = run_exchange(ds, layers, bounds)
    by_stages, by_replicas = (
        traffic(Grid(stages, replicas, across, tuple(hosts), ds.layout.tensor.size), sent).busiest
        for across in ACROSS_HOSTS
    )
    return "replicas" if by_replicas < by_stages else "stages"


def launched_hosts(world_size: int) -> tuple[str, ...]:
    """Return the host number of each global rank from the launcher's environment, before the rendezvous.

    A process knows the number of processes on its host. If hosts differ in that, the result is empty, and only the
    rendezvous knows the ranks' hosts.
    """
    on_a_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    count = os.environ.get("CROSS_SIZE") or os.environ.get("GROUP_WORLD_SIZE")  # DeepSpeed's name, torchrun's
    hosts = int(count) if count else -(-world_size // on_a_host)
    if hosts * on_a_host != world_size:
        return ()
    return tuple(str(rank // on_a_host) for rank in range(world_size))

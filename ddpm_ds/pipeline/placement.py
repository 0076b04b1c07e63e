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

from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.config.ds_model import DsConfig
from ddpm_ds.ground.host import processes_on_host
from ddpm_ds.pipeline.cuts import segments, sent_elements
from ddpm_ds.schema.layout import ELEMENT_BYTES, AcrossHosts, Layout
from ddpm_ds.unet.layers import Layer
from ddpm_ds.unet.shards import Swaps, agreed_elements, sums_of, swaps_of

ACROSS_HOSTS: tuple[AcrossHosts, ...] = ("stages", "replicas")


class Edges(Counter[tuple[Hashable, Hashable]]):
    """Number of directed connections from process to process, by the hosts that they go from and to."""

    @cached_property
    def crossing(self) -> int:
        """Number of connections from one host to another."""
        return sum(count for (here, there), count in self.items() if here != there)


@dataclass(frozen=True)
class Grid:
    """Grid of pipeline ranks x replicas x neighbouring ranks of a tensor group, and each global rank's host.

    The ranks of a space group, which have the same weights, count as replicas.
    """

    stages: int
    replicas: int
    across: AcrossHosts
    hosts: tuple[Hashable, ...]
    tensor: int = 1
    space: int = 1
    """Number of neighbouring replicas that share each image."""

    def rank(self, stage: int, replica: int, part: int = 0) -> int:
        """Return the global rank at a rank of the pipeline, a replica and a place in the tensor group."""
        group = stage * self.replicas + replica if self.across == "stages" else replica * self.stages + stage
        return group * self.tensor + part

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return a global rank's pipeline rank, replica and place in the tensor group."""
        group, part = divmod(rank, self.tensor)
        if self.across == "stages":
            return *divmod(group, self.replicas), part
        replica, stage = divmod(group, self.stages)
        return stage, replica, part

    def hosts_of(self, stage: int) -> list[Hashable]:
        """Return the first host of each replica's tensor group at a rank of the pipeline."""
        return self._members(stage)[0]

    @property
    def several_hosts(self) -> bool:
        """Whether processes are known to be on more than one host."""
        return len(set(self.hosts)) > 1

    @cached_property
    def split_groups(self) -> int:
        """Number of tensor or space groups whose ranks are not all on one host."""
        if not self.hosts:
            return 0
        stages = range(self.stages)
        groups = [hosts for stage in stages for hosts in zip(*self._members(stage), strict=True)]
        groups += [hosts for stage in stages for hosts in self._space_groups(stage)]
        return sum(len(set(hosts)) > 1 for hosts in groups)

    @cached_property
    def boundaries(self) -> tuple[Edges, ...]:
        """Connections between each rank of the pipeline and the next, there and back, in all replicas."""
        pairs = itertools.pairwise([*itertools.chain(*self._members(stage))] for stage in range(self.stages))
        return tuple(Edges([*zip(here, there, strict=True), *zip(there, here, strict=True)]) for here, there in pairs)

    @cached_property
    def rings(self) -> tuple[Edges, ...]:
        """Rings through replicas, which gloo takes in the order of ranks, NCCL through each host once."""
        return tuple(_ring_edges(self._members(stage)) for stage in range(self.stages))

    @cached_property
    def groups(self) -> tuple[Edges, ...]:
        """Rings through the tensor groups of each rank of the pipeline."""
        return tuple(_ring_edges([*zip(*self._members(stage), strict=True)]) for stage in range(self.stages))

    @cached_property
    def swaps(self) -> tuple[tuple[Edges, Edges], ...]:
        """Connections between neighbours in the space groups of each rank of the pipeline, and between all members."""
        found = []
        for stage in range(self.stages):
            groups = self._space_groups(stage)
            near = [pair for group in groups for one in itertools.pairwise(group) for pair in (one, one[::-1])]
            found.append((Edges(near), Edges(pair for group in groups for pair in itertools.permutations(group, 2))))
        return tuple(found)

    def _members(self, stage: int) -> list[list[Hashable]]:
        """Return each replica's host at a rank of the pipeline, by the place in its tensor group."""
        return [
            [self.hosts[self.rank(stage, replica, part)] for replica in range(self.replicas)]
            for part in range(self.tensor)
        ]

    def _space_groups(self, stage: int) -> list[tuple[Hashable, ...]]:
        """Return the hosts of the members of each space group at a rank of the pipeline."""
        starts = range(0, self.replicas, self.space)
        return [tuple(part[start : start + self.space]) for part in self._members(stage) for start in starts]


def _ring_edges(rings: Iterable[Sequence[Hashable]]) -> Edges:
    """Return the connections around rings, each given as the hosts of its members."""
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


def sharing(config: DsConfig, layout: Layout) -> Sharing:
    """Return how replicas of this project's engines share gradients and weights under a DeepSpeed JSON.

    Flat gradients, of ZeRO and bf16, are scattered, and the weights that each replica has stepped are gathered. Others
    are all-reduced.
    """
    precision, stage = config.precision, layout.zero_stage
    flat = stage > 0 or precision == "bf16"
    return Sharing(
        reductions=layout.micro_batches if stage == 2 else 1,
        passes=1 if flat else 2,
        gradient_bytes=ELEMENT_BYTES[config.communication_data_type or precision],
        weight_bytes=ELEMENT_BYTES[precision] if flat else 0,
    )


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
    swaps: tuple[float, ...]
    """Bytes that a rank sends to others of its space group."""
    rows: tuple[float, ...]
    """Part of them that goes to its neighbours only."""


def run_exchange(
    ds: ResolvedDsConfig,
    layers: Sequence[Layer],
    bounds: Sequence[int],
    reductions: Sequence[Sequence[float]] | None = None,
    *,
    images: int | None = None,
    arithmetic_bytes: int | None = None,
    gives_gradients: bool = True,
) -> Exchange:
    """Return the bytes sent by a step of a run with these ``layers``, split as its tensor groups do.

    ``reductions`` says by rank and phase how often ZeRO-2 reduces weight gradients, if they have passes of their
    own; all other gradients are reduced after each micro-batch. While it is unknown, a weight-gradient pass is assumed
    to take half of the micro-batches in flight.

    ``images`` are a replica's in a step, counted in images of full size; by default it has its share of the batch. A
    tensor group sums activations in ``arithmetic_bytes`` for an element, by default the precision's;
    ``gives_gradients`` says whether its first rank gives the others the gradients that all have computed, as on GPUs.
    """
    config, layout, shared = ds.config, ds.layout, sharing(ds.config, ds.layout)
    if reductions is None and layout.schedule == "planned":
        passes = math.ceil(layout.micro_batches / max(1, layout.most_kept // 2))
        reductions = [[passes, passes]] * layout.stages
    images = layout.batch_images // layout.replicas if images is None else images
    width, ring = images * ELEMENT_BYTES[ds.precision], (layout.data_ranks - 1) / layout.data_ranks
    group, summed_bytes = layout.tensor.size, arithmetic_bytes or ELEMENT_BYTES[ds.precision]
    gradient_bytes = shared.gradient_bytes / (layout.data_ranks if shared.weight_bytes else 1)  # of the own partition

    def summed(own: Sequence[Layer]) -> float:
        """Bytes of a stage over each edge of the ring through its tensor group."""
        passes = sums_of(own, layout.interval_so_far, reentrant=config.pipeline.use_reentrant)
        elements = images * sum(one.elements for one in passes)
        agreed = agreed_elements(own, given=gives_gradients)
        return (2 * elements * summed_bytes + agreed * gradient_bytes) * (group - 1) / group

    messages, parameters, reduced, sums, swaps = [], list[int](), list[float](), list[float](), list[Swaps]()
    for rank in range(layout.stages):
        ends = segments(bounds, layout.schedule, rank)
        stages = [layers[start:stop] for start, stop in ends]
        parameters.append(sum(layer.trained for own in stages for layer in own))
        reduced.append(shared.reductions * parameters[-1])
        if reductions is not None and shared.reductions > 1:
            weights = [sum(layer.weights for layer in own) for own in stages]
            fewer = (shared.reductions - count for count in reductions[rank])
            reduced[-1] -= sum(less * own for less, own in zip(fewer, weights, strict=True))
        sums.append(sum(map(summed, stages)))
        swaps.append(sum((one for own in stages for one in swaps_of(own, layout.interval_so_far)), Swaps()))
        if rank < layout.stages - 1:
            cuts = [(ends[0][1], 0), *((start, 1) for start, _ in ends[1:])]
            messages.append(width * sum(sent_elements(layers, *cut, layout.schedule) for cut in cuts))
    return Exchange(
        messages=tuple(messages),
        gradients=tuple(shared.passes * shared.gradient_bytes * ring * count for count in reduced),
        weights=tuple(shared.weight_bytes * ring * count for count in parameters),
        sums=tuple(sums),
        swaps=tuple(images * one.size(summed_bytes) for one in swaps),
        rows=tuple(images * one.rows * summed_bytes for one in swaps),
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
    swaps: int
    """Bytes between hosts of the swaps of space groups."""
    within_hosts: int
    sent: Mapping[Hashable, int]
    """Bytes sent to other hosts, by the host that sends."""

    @property
    def between_hosts(self) -> int:
        """Bytes that go from one host to another."""
        return self.activations + self.gradients + self.weights + self.sums + self.swaps

    @property
    def busiest(self) -> int:
        """Bytes sent to other hosts by the host that sends most."""
        return max(self.sent.values())


def traffic(grid: Grid, sent: Exchange) -> Traffic:
    """Return the bytes of a step by connection."""
    reducing, gathering, summing = (grid.rings, sent.gradients), (grid.rings, sent.weights), (grid.groups, sent.sums)
    near, everyone = zip(*grid.swaps, strict=True)
    rows = [size / min(2, max(1, grid.space - 1)) for size in sent.rows]  # to each neighbour
    rest = [(size - own) / max(1, grid.space - 1) for size, own in zip(sent.swaps, sent.rows, strict=True)]
    kinds = ((grid.boundaries, sent.messages), reducing, gathering, summing, (near, rows), (everyone, rest))
    crossing, within = [], 0.0
    by_host: dict[Hashable, float] = dict.fromkeys(grid.hosts, 0.0)
    for wires, sizes in kinds:
        crossing.append(sum(edges.crossing * size for edges, size in zip(wires, sizes, strict=True)))
        for edges, size in zip(wires, sizes, strict=True):
            within += (edges.total() - edges.crossing) * size
            for (here, there), count in edges.items():
                by_host[here] += count * size * (here != there)
    leaving = {host: round(size) for host, size in by_host.items()}
    activations, gradients, weights, sums, swaps = map(round, (*crossing[:4], sum(crossing[4:])))
    return Traffic(activations, gradients, weights, sums, swaps, round(within), leaving)


def across_hosts(
    ds: ResolvedDsConfig, layers: Sequence[Layer], bounds: Sequence[int], hosts: Sequence[Hashable]
) -> AcrossHosts:
    """Return the axis of a run that is split over ``hosts``, one for each global rank.

    It is the JSON's choice, else the axis with which the busiest host sends less, and stages if both are equal. A
    single stage allows only replicas, and a single replica only stages.
    """
    stages, replicas = ds.layout.stages, ds.layout.data_ranks
    if len(set(hosts)) < 2 or min(stages, replicas) == 1:
        return "replicas" if len(set(hosts)) > 1 and stages == 1 else "stages"
    if ds.layout.across_hosts != "auto":
        return ds.layout.across_hosts
    sent = run_exchange(ds, layers, bounds)
    by_stages, by_replicas = (
        traffic(Grid(stages, replicas, across, tuple(hosts), *(one.size for one in ds.layout.split)), sent).busiest
        for across in ACROSS_HOSTS
    )
    return "replicas" if by_replicas < by_stages else "stages"


def launched_hosts(world_size: int) -> tuple[str, ...]:
    """Return the host number of each global rank from the launcher's environment, before the rendezvous.

    A process knows the number of processes on its host. If hosts differ in that, the result is empty, and only the
    rendezvous knows the ranks' hosts.
    """
    on_a_host = processes_on_host(world_size)
    count = os.environ.get("CROSS_SIZE") or os.environ.get("GROUP_WORLD_SIZE")  # DeepSpeed's name, torchrun's
    hosts = int(count) if count else -(-world_size // on_a_host)
    if hosts * on_a_host != world_size:
        return ()
    return tuple(str(rank // on_a_host) for rank in range(world_size))

"""Random programs that the format allows."""

import random
from collections import defaultdict

from ddpm_ds.pipeline.schedule import Instruction, Program, completed, neighbours, phases_of
from ddpm_ds.schema.layout import Schedule


def random_programs(schedule: Schedule, micro_batches: int, ranks: int, seed: int) -> tuple[Program, ...]:
    """Programs of all ranks: at each moment a random rank takes a random pass whose input is there, and weight
    gradients of any micro-batches, in any order, if they have a pass of their own."""
    rng = random.Random(seed)
    last = phases_of(schedule) - 1
    forwards: dict[tuple[int, int], int] = defaultdict(int)  # by rank and phase, how many are done
    backwards: dict[tuple[int, int], int] = defaultdict(int)
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
    orders: list[list[Instruction]] = [[] for _ in range(ranks)]

    def possible(rank: int, phase: int) -> list[Instruction]:
        before, after = neighbours(schedule, ranks, rank, phase)
        number, back = forwards[rank, phase], backwards[rank, phase]
        given = forwards[before, phase] if before is not None else forwards[rank, 0] if phase else micro_batches
        if after is not None:
            returned = backwards[after, phase]
        else:
            returned = forwards[rank, phase] if phase == last else backwards[rank, last]
        found = []
        if number < min(given, micro_batches):
            found.append(Instruction("ForwardPass", phase, (number,)))
        if back < returned:
            found.append(Instruction(rng.choice(["BackwardPass", "InputGradients"]), phase, (back,)))
        if waits := waiting[rank, phase]:
            some = tuple(rng.sample(waits, rng.randint(1, len(waits))))
            found.append(Instruction("WeightGradients", phase, some))
        return found

    places = [(rank, phase) for rank in range(ranks) for phase in range(last + 1)]
    while choices := [(place, one) for place in places for one in possible(*place)]:
        rarely = [0.1 if one.name == "WeightGradients" else 1.0 for _, one in choices]  # so that several are waiting
        (((rank, phase), chosen),) = rng.choices(choices, rarely)
        orders[rank].append(chosen)
        if chosen.name == "ForwardPass":
            forwards[rank, phase] += 1
        elif chosen.name == "WeightGradients":
            waiting[rank, phase] = [one for one in waiting[rank, phase] if one not in chosen.micro_batches]
        else:
            backwards[rank, phase] += 1
            waiting[rank, phase] += chosen.micro_batches * (chosen.name == "InputGradients")
    assert all(backwards[place] == micro_batches for place in places)
    return tuple(completed(own, schedule, ranks, rank) for rank, own in enumerate(orders))

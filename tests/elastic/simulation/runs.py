"""Random runs of the protocol, larger than a search can be: ``python -m tests.elastic.simulation.runs``.

A cell is a run whose sizes, faults and speeds follow from its seed; a cell that breaks is shown move by move, and runs
again with ``1 --seed SEED``.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from random import Random
from time import process_time

from tests.support.elastic_model import FAULTS, Bounds, BrokenError, Model, Move, Rules, World

_MOST = 20_000  # moves of a cell; the largest has some thousands


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a cell ended."""

    how: str
    moves: int
    faults: Counter[str]


def bounds_of(random: Random) -> Bounds:
    """Sizes and faults of a cell: one in three has deaths alone."""
    members = random.randint(2, 8)
    slow = random.random() < 0.67
    return Bounds(
        members=members,
        newcomers=random.choice([0, 0, 1, 2, 4]),
        windows=random.randint(1, 6),
        blocks=random.choice([1, 2, 3, 5, 8, 13, 16]),
        deaths=random.randint(0, members),
        slips=random.randint(0, 3) if slow else 0,
        expulsions=random.randint(0, 2) if slow else 0,
        lies=random.randint(0, 1) if slow else 0,
        least=random.randint(1, min(3, members)),
        stages=random.random() < 0.5,
    )


def simulate(seed: int, *, rules: Rules | None = None) -> Ended:
    """Runs a cell to its end.

    Raises:
        BrokenError: if something that has to hold does not; with the moves that led there.
    """
    random = Random(seed)
    model = Model(bounds_of(random), rules)
    fault = random.choice([0.003, 0.01, 0.03, 0.1, 0.3])  # how likely the next move is one, where it may be
    speeds = [random.choice([1, 1, 1, 0.3, 0.03]) for _ in model.names]
    world, made, faults = model.start(), list[Move](), Counter[str]()
    try:
        while len(made) < _MOST:
            steps, befalls = _moves(model, world)
            if not steps:
                how = model.check_last(world)
                comes = [move for move in befalls if move[0] == "comes"]
                if how != "too few" or not comes:
                    return Ended(how=how, moves=len(made), faults=faults)
                befalls = comes
            if befalls and (not steps or random.random() < fault):
                move = random.choice(befalls)
                faults[move[0]] += 1
            else:
                (move,) = random.choices(steps, [speeds[number] for _, number in steps])
            made.append(move)
            world = model.after(world, move)
    except BrokenError as error:
        raise BrokenError("\n".join([str(error), f"seed {seed}: {model.bounds}", *map(model.say, made)])) from None
    raise BrokenError(f"seed {seed}: no end after {_MOST} moves, {model.show(world)}")


def _moves(model: Model, world: World) -> tuple[list[Move], list[Move]]:
    """What members do, and what befalls them."""
    steps: list[Move] = []
    befalls: list[Move] = []
    for number in range(len(world.members)):
        for move in model.moves(world, number):
            (befalls if move[0] in FAULTS else steps).append(move)
    return steps, befalls


def run(cells: int, seed: int, *, rules: Rules | None = None) -> Counter[str]:
    """So many cells from a seed on: how they ended, and what befell them."""
    seen: Counter[str] = Counter()
    for number in range(seed, seed + cells):
        ended = simulate(number, rules=rules)
        seen[ended.how] += 1
        seen["moves"] += ended.moves
        seen.update(ended.faults)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=int, nargs="?", default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = process_time()
    seen = run(arguments.cells, arguments.seed)
    print(f"{arguments.cells} cells in {process_time() - began:.0f} s of one core: {dict(seen)}")


if __name__ == "__main__":
    main()

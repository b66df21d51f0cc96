"""What the ranks agree on before the first window: the division of the data, and the data themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from distaccum.data.sketch import Sketch, is_telling, same
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError, PeerError, shorten

_DIVIDED = "divide it by rank, as in itertools.islice(items, rank, None, world_size)"


def raise_on_all(world: World, error: Exception | None, where: str) -> NoReturn:
    """Raises ``error`` on the ranks that have one, and PeerError with the first of them on the others; a collective."""
    reasons = world.all_gather_object(_reason(world, error))
    if error is not None:
        raise error
    raise PeerError(next(reason for reason in reasons if reason is not None), where)


def tell_of_failure(world: World, error: Exception) -> None:
    """Answers the other ranks, which are about to compare their loaders, with the reason why this one has none."""
    if world.size > 1:
        world.all_gather_object((_reason(world, error), {}, []))


def _reason(world: World, error: Exception | None) -> str | None:
    return None if error is None else f"rank {world.rank}: {type(error).__name__}: {error}"


class Agreement:
    """Compares what the ranks are about to train on, before the first window of a loader: one host collective.

    Args:
        world: this rank.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.reached = world.size == 1

    def on(self, facts: Mapping[str, Any], sketches: Sequence[Sketch | None], error: Exception | None) -> list[Any]:
        """Compares ``facts``, which must be the same on every rank, and gathers the sketches of every rank's items.

        Args:
            facts: the numbers that give a window's index its meaning, by the names that the user knows.
            sketches: of this rank's items.
            error: why this rank cannot go on, which is raised on every rank.

        Returns:
            The sketches of each rank.

        Raises:
            ConfigError: a fact differs; the same message on every rank.
            PeerError: another rank has an ``error``.
        """
        given = self._world.all_gather_object((_reason(self._world, error), dict(facts), list(sketches)))
        self.reached = True
        if error is not None:
            raise error
        for reason, _, _ in given:
            if reason is not None:
                raise PeerError(reason, "before the first window")
        every = [others for _, others, _ in given]
        for name in every[0] | facts:
            values = [others.get(name) for others in every]
            if any(value != values[0] for value in values):
                said = shorten(f"{value} on rank {rank}" for rank, value in enumerate(values))
                problem = f"differs between the ranks: {said}"
                remedy = "Give every rank the same: each one divides the same data in the same way"
                raise ConfigError(name, None, problem, remedy)
        return [others for _, _, others in given]


def differing_item(gathered: Sequence[Sequence[Sketch | None]]) -> tuple[int, int] | None:
    """The first item that a rank has otherwise than rank 0, and that rank; None where all are alike."""
    first, *others = gathered
    for rank, items in enumerate(others, 1):
        for number, (own, item) in enumerate(zip(items, first, strict=True)):
            if same(own, item) is False:
                return number, rank
    return None


def refuse_other_data(sample: int, rank: int) -> NoReturn:
    """Raises DataError: ``sample`` is not the same on ``rank`` as on rank 0."""
    problem = f"the ranks were given different data: sample {sample} of rank 0 is not that of rank {rank}"
    remedy = "Give every rank the whole dataset in the same order, as the ranks' shares are made from it"
    hints = (
        "a random_split, a shuffle or random data need a generator with a seed, a listing of files has to be sorted, "
        "and nothing may be divided by rank before"
    )
    raise DataError(f"{problem}. {remedy}: {hints}")


def refuse_equal_streams(gathered: Sequence[Sequence[Sketch | None]]) -> None:
    """Raises DataError if two ranks' streams begin with the same items, as a stream does that is not divided."""
    for rank, items in enumerate(gathered):
        for other in range(rank):
            pairs = list(zip(items, gathered[other], strict=False))
            if pairs and is_telling([own for own, _ in pairs]) and all(same(a, b, exactly=True) for a, b in pairs):
                raise DataError(
                    f"the streams of ranks {other} and {rank} begin with the same items: every rank would train on the "
                    f"whole stream. Each rank takes its own part: {_DIVIDED}. Data that repeat on purpose: "
                    "DataSpec(train=stream, may_repeat=True)"
                )


def refuse_equal_workers(sketches: Sequence[Sketch | None], workers: int) -> None:
    """Raises DataError if the first items of a rank's ``workers`` loading processes are the same."""
    if is_telling(sketches[:1]) and all(same(sketches[0], other, exactly=True) for other in sketches[1:]):
        raise DataError(
            f"the {workers} workers of the DataLoader begin with the same batch: each of them yields the whole stream, "
            "which is trained on as often. Let the dataset's __iter__ divide by torch.utils.data.get_worker_info() "
            "(its id and num_workers). Data that repeat on purpose: DataSpec(train=loader, may_repeat=True)"
        )

"""Which fault comes when: arithmetic of a seed, and nothing else.

Faults come in rounds. A round is a run of one course (its engine, its data, its loggers) and the faults that happen to
it, one after the other. Kinds and courses are dealt from shuffled decks, so that each comes up again and again; what a
fault draws besides (the rank, the offset of a bit, a delay) comes from a number of its own, so that one fault can be
replayed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

TRAINING, SAVE, EVALUATION, STARTUP, DOWN = "training", "save", "evaluation", "startup", "down"
ANYWHERE = (TRAINING, SAVE, EVALUATION, STARTUP, STARTUP)
ROUND = 8  # faults
GAP = (3, 10)  # updates between training again and the next fault


@dataclass(frozen=True, kw_only=True)
class Course:
    """The settings of a run, and what can happen to it besides what can happen to all.

    ``bare``: a torchrun of the user's own starts it, and not ``launch/train.sh``.
    """

    name: str
    overrides: tuple[str, ...] = ()
    has: frozenset[str] = frozenset()
    worlds: tuple[int, ...] = (2,)
    bare: bool = False

    def takes(self, kind: Kind) -> bool:
        """Whether that can happen to it."""
        return (not kind.needs or kind.needs in self.has) and not (kind.relayed and self.bare)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault: the moments at which it may come, what a course must have, how many cards of the deck it is.

    ``relayed``: whether it takes a launcher that hands signals on, where these would end torchrun.
    """

    name: str
    moments: tuple[str, ...] = (TRAINING,)
    needs: str = ""
    cards: int = 1
    relayed: bool = False


LOADERS, WANDB, WORLDS = "loaders", "wandb", "worlds"
_LOADERS = ("trainer.num_workers=1",)
_WANDB = ("metrics=wandb",)
_SGD = (
    "optim=sgd",
    "optim.lr=0.1",
)  # Adam turns the rounding of small gradients, which world sizes differ by, into steps
COURSES = {
    course.name: course
    for course in (
        Course(name="ddp", overrides=("engine=ddp", *_LOADERS, *_WANDB), has=frozenset({LOADERS, WANDB})),
        Course(name="worlds", overrides=("engine=ddp", *_SGD), has=frozenset({WORLDS}), worlds=(2, 1, 3)),
        Course(name="zero1", overrides=("engine=zero1", *_LOADERS), has=frozenset({LOADERS})),
        Course(name="fsdp2", overrides=("engine=fsdp2", "model.dropout=0.1", *_WANDB), has=frozenset({WANDB})),
        Course(name="fsdp2-worlds", overrides=("engine=fsdp2", *_SGD), has=frozenset({WORLDS}), worlds=(2, 1, 3)),
        Course(name="deepspeed", overrides=("engine=deepspeed", "engine.stage=1")),
        Course(name="torchrun", overrides=("engine=ddp", *_LOADERS), has=frozenset({LOADERS}), bare=True),
        Course(name="stream", overrides=("engine=ddp", "data._target_=launch.soak.stream.documentation")),
    )
}
KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="kill a rank", moments=ANYWHERE, cards=4),
        Kind(name="kill the launcher", moments=ANYWHERE, cards=2),
        Kind(name="kill all processes", moments=ANYWHERE, cards=3),
        Kind(name="kill a loading process", needs=LOADERS, cards=2),
        Kind(name="stop a rank and let it go on", moments=(TRAINING, SAVE, EVALUATION), cards=2),
        Kind(name="stop a rank for good"),  # the first save and evaluation have ten times as long
        Kind(name="SIGTERM", moments=ANYWHERE),
        Kind(name="SIGUSR1", moments=(TRAINING, SAVE, EVALUATION), relayed=True),
        Kind(name="SIGINT", moments=ANYWHERE, relayed=True),
        Kind(name="SIGHUP", moments=(TRAINING, SAVE, EVALUATION), relayed=True),
        Kind(name="a signal to one rank", moments=(TRAINING, SAVE, EVALUATION)),
        Kind(name="Ctrl-C twice", moments=(TRAINING, SAVE), relayed=True),
        Kind(name="a full disk", moments=(TRAINING, SAVE), cards=2),
        Kind(name="a bit flipped in the newest checkpoint", moments=(DOWN,), cards=2),
        Kind(name="a bit flipped in an older checkpoint", moments=(DOWN,)),
        Kind(name="the newest checkpoint cut short", moments=(DOWN,)),
        Kind(name="a file of the newest checkpoint removed", moments=(DOWN,)),
        Kind(name="the newest checkpoint removed", moments=(DOWN,)),
        Kind(name="all checkpoints damaged", moments=(DOWN,)),
        Kind(name="a torn line of metrics", moments=(DOWN,), cards=2),
        Kind(name="W&B's process killed", needs=WANDB, cards=2),
        Kind(name="a second run in the folder"),
        Kind(name="another world size", needs=WORLDS, cards=3),
    )
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One line of the schedule; ``gap`` in updates after the run trains (again)."""

    number: int
    kind: str
    moment: str
    gap: int
    draw: int

    def random(self) -> Random:
        """What this fault draws, always the same."""
        return Random(self.draw)  # noqa: S311  replayable on purpose

    def __str__(self) -> str:
        """Such as ``kill a rank (save)``."""
        return f"{self.kind} ({self.moment})"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run, and its faults in their order."""

    number: int
    course: Course
    faults: tuple[Fault, ...]


def schedule(seed: int) -> Iterator[Round]:
    """Rounds without an end, the same for a seed."""
    random = Random(seed)  # noqa: S311  replayable on purpose
    kinds: list[Kind] = []
    courses: list[Course] = []
    number = rounds = 0
    while True:
        if not courses:
            courses = random.sample(list(COURSES.values()), len(COURSES))
        course, dealt = courses.pop(), []
        while len(dealt) < ROUND:
            at = next((i for i, kind in enumerate(kinds) if course.takes(kind)), None)
            if at is None:
                deck = [kind for kind in KINDS.values() for _ in range(kind.cards)]
                kinds += random.sample(deck, len(deck))
                continue
            kind = kinds.pop(at)
            number += 1
            fault = Fault(
                number=number,
                kind=kind.name,
                moment=random.choice(kind.moments),
                gap=random.randint(*GAP),
                draw=random.getrandbits(32),
            )
            dealt.append(fault)
        rounds += 1
        yield Round(number=rounds, course=course, faults=tuple(dealt))

"""The protocol of elastic runs as a state machine, and a search through all of its states.

What a member decides is decided by the functions of ``distaccum/elastic/group/views.py`` themselves; around them
the model has what they live in: a store, groups whose collectives may complete on some members only, deaths, words of
deaths that come later or are false, members that are too slow and are left out, newcomers.

The store has ``set``, ``get`` and an atomic ``compare_set``; what it holds only grows.

A collective is entered and then completes or fails, on each member by itself. It can complete on a member once every
member of the group has entered it, and fail there as soon as one of them is dead, said to be dead, or has left the
group. Where both are possible both are tried, so a member that dies while it sends may have reached any of the others.
A reduction is two collectives, the all-to-all and the all-gather; what a member gives is what it holds when it enters
the first. A number stands for a state: how many windows it has seen, for a commit that is not exactly each block once,
of gradients of the state that it is added to, ends the search. So two members with the same position have the same
history as long as no such commit is found.

What is left out of the search, and why nothing is lost:

- A member completes a collective, does what it does alone and enters the next collective in one move. The others see
  only what it has entered. A death in between looks to them like one before the completion; what it did is lost.
- It leaves a group and reports in one move: a member that has left and not reported makes the others fail, as what made
  it leave does, and is waited for or left out like one that is still in the group.
- It finds a decided view and joins its group in one move, for the same reason as the first.
- It reads words, reports and candidates for a proposal at once. They only grow, and reading one of them earlier gives
  the proposal of an earlier moment, or leaves out a member that died in between. Proposing and ``compare_set`` are two
  moves, so what is proposed may be old.
- Nothing depends on how large a generation is: they count from the oldest in which a live member is, and what the store
  holds of older ones is dropped; so is what the dead knew, and the word of a death that nobody's view or proposal can
  feel.
- A silent member that is dead is left out by the word of its death only: leaving it out because the time is over gives
  the same view, and the word changes nothing in it.

All come to the end if no state in which only faults are left is short of it, and no run without faults goes around in
circles. The first is asked of each such state; the second of the whole search, where it is not too large to keep all
moves, and of each run of the simulation.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from distaccum.data.plan.units import halves
from distaccum.elastic.group import views
from distaccum.elastic.group.views import NEWCOMER, Node, Report, Share, View


class BrokenError(AssertionError):
    """Something that has to hold did not."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How large a run is, and what may go wrong in it, each so often.

    Args:
        members: of the first view.
        newcomers: that may come, at any time.
        windows: that are to be stepped.
        blocks: of each window.
        deaths: of members and of newcomers, at any time.
        slips: collectives that fail on a member though nobody is gone: its time is over, or a connection is.
        expulsions: members that live and have not reported when another proposes; they go on later.
        lies: words of the death of a member that lives.
        least: members without which nobody goes on.
        stages: whether a window has a stage after its step, with a collective of its own.
    """

    members: int = 2
    newcomers: int = 0
    windows: int = 2
    blocks: int = 3
    deaths: int = 1
    slips: int = 0
    expulsions: int = 0
    lies: int = 0
    least: int = 1
    stages: bool = False


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What members do outside of views.py; each can be switched off, to show what it is for.

    Args:
        compares: a view is decided by ``compare_set``; else by ``set``.
        looks: a member looks for a newer view before it steps.
        ends_together: the end is a collective too; else a member ends after its last step.
        reads_the_end: a member that waits for a view ends if the store says that the run has.
        all_tell_the_end: every member that completes the end tells the store; else its first rank.
        stages_the_state: the state of another is taken over at once; else a hand-over that fails leaves none.
        reads_all_views: a newcomer goes through the views to the first that has it; else it looks at the newest.
        asks_once: another view is asked for only while somebody waits who was in none.
        newcomer: the position a newcomer begins with.
    """

    compares: bool = True
    looks: bool = True
    ends_together: bool = True
    reads_the_end: bool = True
    all_tell_the_end: bool = True
    stages_the_state: bool = True
    reads_all_views: bool = True
    asks_once: bool = True
    newcomer: int = NEWCOMER


# What a member is about.
UNBORN, WAITS, WORKS, COMPUTES, DECIDES, PROPOSES, ENDS, DEAD, OUT, DONE = range(10)
_ABOUT = ("unborn", "waits", "works", "computes", "decides", "proposes", "ends", "dead", "out", "done")
_GROUPED = (WORKS, COMPUTES, ENDS)
_OVER = (DEAD, OUT, DONE)
_ACTIVE = (WORKS, COMPUTES, DECIDES, PROPOSES, ENDS)

# The collectives of a group, in the order they are entered; those of a window are this plus eight times its number.
NOT_YET, FORM, HAND_OVER = -32, -24, -16
BOUNDARY, COUNT, SCATTER, GATHER, END = range(5)
_NAMES = {FORM: "forms", HAND_OVER: "hands over", BOUNDARY: "boundary", COUNT: "count", SCATTER: "all-to-all"}
_NAMES |= {GATHER: "all-gather", END: "end"}


class Member(NamedTuple):
    """One member. ``state``: the windows that its weights have seen, or -1; ``at``: how many blocks it has computed."""

    about: int
    generation: int = 0
    entered: int = NOT_YET
    position: int = NEWCOMER
    state: int = -1
    held: tuple[Node, ...] = ()
    at: int = 0
    proposal: tuple[int, ...] = ()


class Group(NamedTuple):
    """What the members of a view have sent each other."""

    entered: tuple[int, ...]
    wishes: tuple[int, ...] = ()  # counts that asked for another view
    given: tuple[tuple[tuple[Node, ...], int], ...] = ()  # to the last all-to-all: nodes, and the state they are of
    sent: tuple[int, int] = (NEWCOMER, -1)  # the source's position and state


Told = tuple[int, int, tuple[Node, ...]]


_NOBODYS = Group(entered=())


class World(NamedTuple):
    """Everything; generations count from ``0``, the oldest in which somebody lives."""

    members: tuple[Member, ...]
    views: tuple[tuple[int, ...], ...]
    reports: tuple[tuple[Told, ...], ...]  # of each view, those that it was to be made of; one more than views
    groups: tuple[Group, ...]
    came: tuple[int, ...] = ()  # the candidates in the order they came
    joined: int = 0  # as bits: those of them that were in a view
    words: int = 0  # as bits
    ended: bool = False
    deaths: int = 0
    slips: int = 0
    expulsions: int = 0
    lies: int = 0


Move = tuple[str, int]

# Moves that are nobody's to make.
FAULTS = frozenset({"dies", "comes", "slips", "expels", "lie"})


@lru_cache(maxsize=64)
def _tree(blocks: int) -> frozenset[Node]:
    found, left = set(), [(0, blocks)]
    while left:
        node = left.pop()
        found.add(node)
        if node[1] - node[0] > 1:
            left.extend(halves(node))
    return frozenset(found)


@lru_cache(maxsize=65536)
def _with(held: tuple[Node, ...], block: int, blocks: int) -> tuple[Node, ...]:
    """The nodes with a block more, in order, added up where the tree adds them."""
    nodes = sorted((*held, (block, block + 1)))
    at = 0
    while at + 1 < len(nodes):
        both = (nodes[at][0], nodes[at + 1][1])
        if nodes[at][1] == nodes[at + 1][0] and both in _tree(blocks):
            nodes[at : at + 2] = [both]
            at = max(0, at - 1)
        else:
            at += 1
    return tuple(nodes)


class Model:
    """The moves of a run of these bounds, under these rules."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds, self.rules = bounds, rules or Rules()
        self.names = [f"0.{index}.0" for index in range(bounds.members)]
        self.names += [f"0.{index}.1" for index in range(bounds.newcomers)]
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._known: dict[object, object] = {}

    def start(self) -> World:
        """All members are in a view; they have the same first state."""
        first = tuple(range(self.bounds.members))
        member = Member(WORKS, entered=FORM, position=0, state=0)
        return World(
            members=(member,) * len(first) + (Member(UNBORN),) * self.bounds.newcomers,
            views=(first,),
            reports=(tuple((number, 0, ()) for number in first), ()),
            groups=(Group(entered=(FORM,) * len(first), given=(((), -1),) * len(first)),),
        )

    # The real functions, of numbers.

    def _view(self, members: tuple[int, ...]) -> View:
        return View(generation=0, members=tuple(self.names[number] for number in members))

    def _told(self, reports: tuple[Told, ...]) -> dict[str, Report]:
        return {
            self.names[number]: Report(member=self.names[number], position=position, held=held)
            for number, position, held in reports
        }

    def _source(self, members: tuple[int, ...], reports: tuple[Told, ...]) -> tuple[int, frozenset[int]]:
        """Who hands its state over, and to whom."""
        key = ("source", members, reports)
        if key not in self._known:
            view, told = self._view(members), self._told(reports)
            taking = frozenset(self._numbers[name] for name in views.behind(view, told))
            self._known[key] = self._numbers[views.source_of(view, told)], taking
        return self._known[key]  # type: ignore[return-value]

    def _shares(self, members: tuple[int, ...], reports: tuple[Told, ...]) -> tuple[Share, ...]:
        key = ("shares", members, reports)
        if key not in self._known:
            shares = views.shares_of(self._view(members), self._told(reports), self.bounds.blocks)
            self._known[key] = shares
        return self._known[key]  # type: ignore[return-value]

    def _proposed(self, world: World, generation: int, *, expels: bool) -> tuple[int, ...] | None:
        members, reports = world.views[generation], world.reports[generation + 1]
        waiting = tuple(candidate for candidate in world.came if not world.joined >> candidate & 1)
        key = ("proposed", members, reports, waiting, world.words, expels)
        if key not in self._known:
            view = views.propose(
                self._view(members),
                self._told(reports),
                [self.names[number] for number in waiting],
                {name for number, name in enumerate(self.names) if world.words >> number & 1},
                expels=expels,
                least=self.bounds.least,
            )
            self._known[key] = view and tuple(self._numbers[name] for name in view.members)
        return self._known[key]  # type: ignore[return-value]

    # Which moves there are

    def moves(self, world: World, number: int) -> list[Move]:
        """The moves of a member, and those that befall it."""
        member, bounds = world.members[number], self.bounds
        if member.about in _OVER:
            return [] if world.words >> number & 1 else [("word", number)]
        if member.about == UNBORN:
            return [("comes", number)]
        found = self._of_a_group(world, number) if member.about in _GROUPED else self._between(world, number)
        if world.deaths < bounds.deaths:
            found.append(("dies", number))
        if world.lies < bounds.lies and not world.words >> number & 1:
            found.append(("lie", number))
        return found

    def _of_a_group(self, world: World, number: int) -> list[Move]:
        about, found = world.members[number].about, list[Move]()
        if about == ENDS:
            return [("ends", number)]
        if about == COMPUTES:
            found.append(("computes", number))
        elif self._all_entered(world, number):
            found.append(("completes", number))
        if self._somebody_left(world, number):
            found.append(("fails", number))
        elif world.slips < self.bounds.slips:
            found.append(("slips", number))
        return found

    def _between(self, world: World, number: int) -> list[Move]:
        about = world.members[number].about
        if about == DECIDES:
            return self._deciding(world, number)
        if about == PROPOSES:
            return [("decides", number)]
        if self._first_view_of(world, number) is not None:
            return [("joins", number)]
        return [("leaves", number)] if world.ended or world.words >> number & 1 else []

    def _deciding(self, world: World, number: int) -> list[Move]:
        generation = world.members[number].generation
        if (world.ended and self.rules.reads_the_end) or len(world.views) > generation + 1:
            return [("finds", number)]
        if world.words >> number & 1:
            return [("leaves", number)]
        found: list[Move] = []
        if self._proposed(world, generation, expels=False):
            found.append(("proposes", number))
        elif world.expulsions < self.bounds.expulsions and self._proposed(world, generation, expels=True):
            found.append(("expels", number))
        return found

    def _all_entered(self, world: World, number: int) -> bool:
        member = world.members[number]
        return min(world.groups[member.generation].entered) >= member.entered

    def _somebody_left(self, world: World, number: int) -> bool:
        generation = world.members[number].generation
        for other in world.views[generation]:
            found = world.members[other]
            if (
                world.words >> other & 1
                or found.about in _OVER
                or (found.about in _ACTIVE and found.generation > generation)
                or (found.about in (DECIDES, PROPOSES) and found.generation == generation)
            ):
                return True
        return False

    def _first_view_of(self, world: World, number: int) -> int | None:
        """The view that a newcomer comes to."""
        last = 0 if self.rules.reads_all_views else len(world.views) - 1
        found = (at for at, members in enumerate(world.views) if at >= last and number in members)
        return next(found, None)

    # What they do

    def after(self, world: World, move: Move) -> World:
        """The world after a move.

        Raises:
            BrokenError: if something that has to hold does not.
        """
        what, number = move
        world = getattr(self, f"_{what}")(world, number, world.members[number])
        self._check(world, number)
        return self._tidied(world)

    def _put(self, world: World, number: int, member: Member, **changes: object) -> World:
        members = (*world.members[:number], member, *world.members[number + 1 :])
        return world._replace(members=members, **changes)  # type: ignore[arg-type]

    def _enter(self, world: World, number: int, member: Member, label: int) -> World:
        """A member sends all that it owes to a collective."""
        group = world.groups[member.generation]
        rank = world.views[member.generation].index(number)
        entered = (*group.entered[:rank], label, *group.entered[rank + 1 :])
        group = group._replace(entered=entered)
        if label == HAND_OVER:
            source, _ = self._source(world.views[member.generation], world.reports[member.generation])
            if source == number:
                group = group._replace(sent=(member.position, member.state))
        elif label >= 0 and label % 8 == SCATTER:
            gift = (member.held, member.state)
            group = group._replace(given=(*group.given[:rank], gift, *group.given[rank + 1 :]))
        elif label >= 0 and label % 8 == COUNT and self._wishes(world):
            group = group._replace(wishes=(*(w for w in group.wishes if w >= label), label))
        at = member.generation
        groups = (*world.groups[:at], group, *world.groups[at + 1 :])
        member = member._replace(about=WORKS, entered=label, at=0)
        return self._put(world, number, member, groups=groups)

    def _wishes(self, world: World) -> bool:
        not_waiting = world.words | (world.joined if self.rules.asks_once else 0)
        return any(not not_waiting >> number & 1 for number in world.came)

    def _go_on(self, world: World, number: int, member: Member) -> World:
        """The next collective of a member that has a state."""
        if member.position == NEWCOMER:
            raise BrokenError(f"{self.names[number]} goes on without a state")
        window, stage = divmod(member.position, 2)
        if self.bounds.stages and not stage:
            return self._enter(world, number, member, 8 * window + BOUNDARY)
        if window < self.bounds.windows:
            return self._enter(world, number, member, 8 * window + COUNT)
        if not self.rules.ends_together:
            return self._put(world, number, member._replace(about=ENDS))
        return self._enter(world, number, member, 8 * window + END)

    def _completes(self, world: World, number: int, member: Member) -> World:
        if member.entered < 0:
            taking = self._source(world.views[member.generation], world.reports[member.generation])[1]
            if member.entered == FORM and taking:
                return self._enter(world, number, member, HAND_OVER)
            if member.entered == HAND_OVER and number in taking:
                member = self._takes_over(world, number, member)
            return self._go_on(world, number, member)
        return self._completes_of_a_window(world, number, member)

    def _completes_of_a_window(self, world: World, number: int, member: Member) -> World:
        kind = member.entered % 8
        if kind == BOUNDARY:
            return self._go_on(world, number, member._replace(position=member.position + 1))
        if kind == COUNT:
            wished = member.entered in world.groups[member.generation].wishes
            return (self._leave if wished else self._begin)(world, number, member)
        if kind == SCATTER:
            return self._enter(world, number, member, member.entered - SCATTER + GATHER)
        if kind == GATHER:
            over = self.rules.looks and len(world.views) > member.generation + 1
            return (self._leave if over else self._steps)(world, number, member)
        return self._put(world, number, member._replace(about=ENDS))

    def _steps(self, world: World, number: int, member: Member) -> World:
        self._commit(world, number, member, world.groups[member.generation])
        member = member._replace(position=member.position // 2 * 2 + 2, state=member.state + 1, held=())
        return self._go_on(world, number, member)

    def _takes_over(self, world: World, number: int, member: Member) -> Member:
        position, state = world.groups[member.generation].sent
        if position < member.position:
            raise BrokenError(f"{self.names[number]} goes back from {member.position} to {position}")
        return member._replace(position=position, state=state, held=())

    def _commit(self, world: World, number: int, member: Member, group: Group) -> None:
        """Asks whether what is summed is the window's gradient."""
        name = self.names[number]
        if len(world.views) > member.generation + 1:
            raise BrokenError(f"{name} commits in a view that is over")
        states = {state for nodes, state in group.given if nodes}
        if states != {member.state}:
            raise BrokenError(f"{name} adds gradients of the states {sorted(states)} to the state {member.state}")
        summed = sorted(block for nodes, _ in group.given for node in nodes for block in range(*node))
        if summed != list(range(self.bounds.blocks)):
            raise BrokenError(f"{name} commits the blocks {summed} of {self.bounds.blocks}")

    def _share(self, world: World, number: int, member: Member) -> Share:
        """What it has to do in its window: the view's first one goes on with what is held."""
        members, reports = world.views[member.generation], world.reports[member.generation]
        source, _ = self._source(members, reports)
        first = {told: position for told, position, _ in reports}.get(source, NEWCOMER) // 2
        first_window = member.position // 2 == first
        return self._shares(members, reports if first_window else ())[members.index(number)]

    def _begin(self, world: World, number: int, member: Member) -> World:
        share = self._share(world, number, member)
        if set(share.held) - set(member.held):
            raise BrokenError(f"{self.names[number]} does not hold {share.held}, but {member.held}")
        member = member._replace(held=share.held, at=0)
        if not share.blocks:
            return self._enter(world, number, member, member.entered - COUNT + SCATTER)
        return self._put(world, number, member._replace(about=COMPUTES))

    def _computes(self, world: World, number: int, member: Member) -> World:
        blocks = self._share(world, number, member).blocks
        held = _with(member.held, blocks[member.at], self.bounds.blocks)
        member = member._replace(held=held, at=member.at + 1)
        if member.at == len(blocks):
            return self._enter(world, number, member, member.entered - COUNT + SCATTER)
        return self._put(world, number, member)

    def _leave(self, world: World, number: int, member: Member) -> World:
        if member.entered == HAND_OVER and not self.rules.stages_the_state:
            taking = self._source(world.views[member.generation], world.reports[member.generation])[1]
            if number in taking:
                member = member._replace(position=NEWCOMER, state=-1, held=())
        told = (number, member.position, member.held)
        at = member.generation + 1
        reports = (*world.reports[:at], tuple(sorted((*world.reports[at], told))), *world.reports[at + 1 :])
        return self._put(world, number, member._replace(about=DECIDES, entered=NOT_YET, at=0), reports=reports)

    def _fails(self, world: World, number: int, member: Member) -> World:
        return self._leave(world, number, member)

    def _slips(self, world: World, number: int, member: Member) -> World:
        return self._leave(world._replace(slips=world.slips + 1), number, member)

    def _proposes(self, world: World, number: int, member: Member) -> World:
        proposal = self._proposed(world, member.generation, expels=False) or ()
        return self._put(world, number, member._replace(about=PROPOSES, proposal=proposal))

    def _expels(self, world: World, number: int, member: Member) -> World:
        proposal = self._proposed(world, member.generation, expels=True) or ()
        world = world._replace(expulsions=world.expulsions + 1)
        return self._put(world, number, member._replace(about=PROPOSES, proposal=proposal))

    def _decides(self, world: World, number: int, member: Member) -> World:
        """Sets the view unless there is one, and goes by what there is."""
        at = member.generation + 1
        if len(world.views) == at:
            world = self._set_view(world, member.proposal)
        elif not self.rules.compares and world.views[at] != member.proposal:
            raise BrokenError(f"two views of one generation: {world.views[at]} and {member.proposal}")
        return self._find(world, number, member._replace(about=DECIDES, proposal=()))

    @staticmethod
    def _set_view(world: World, members: tuple[int, ...]) -> World:
        joined = world.joined
        for number in set(members) & set(world.came):
            joined |= 1 << number
        size = len(members)
        group = Group(entered=(NOT_YET,) * size, given=(((), -1),) * size)
        return world._replace(
            views=(*world.views, members), reports=(*world.reports, ()), groups=(*world.groups, group), joined=joined
        )

    def _finds(self, world: World, number: int, member: Member) -> World:
        if world.ended and self.rules.reads_the_end:
            final = member.position // 2 == self.bounds.windows
            here = len(world.views) == member.generation + 1
            if here and not final and member.position != NEWCOMER and not world.words >> number & 1:
                raise BrokenError(f"the run has ended, and {self.names[number]} is at {member.position}")
            return self._put(world, number, Member(DONE if final else OUT))
        return self._find(world, number, member)

    def _find(self, world: World, number: int, member: Member) -> World:
        at = member.generation + 1
        if number not in world.views[at]:
            return self._put(world, number, Member(OUT))
        return self._enter(world, number, member._replace(generation=at), FORM)

    def _joins(self, world: World, number: int, member: Member) -> World:
        """A newcomer goes through the views, and comes to the first that has it."""
        generation = self._first_view_of(world, number)
        assert generation is not None
        return self._enter(world, number, member._replace(generation=generation), FORM)

    def _comes(self, world: World, number: int, member: Member) -> World:
        member = Member(WAITS, position=self.rules.newcomer)
        return self._put(world, number, member, came=(*world.came, number))

    def _leaves(self, world: World, number: int, member: Member) -> World:
        return self._put(world, number, Member(OUT))

    def _ends(self, world: World, number: int, member: Member) -> World:
        first = world.views[member.generation][0] == number
        return self._put(world, number, Member(DONE), ended=world.ended or first or self.rules.all_tell_the_end)

    def _dies(self, world: World, number: int, member: Member) -> World:
        return self._put(world, number, Member(DEAD), deaths=world.deaths + 1)

    def _word(self, world: World, number: int, member: Member) -> World:
        return world._replace(words=world.words | 1 << number)

    def _lie(self, world: World, number: int, member: Member) -> World:
        return world._replace(words=world.words | 1 << number, lies=world.lies + 1)

    # What has to hold

    def _check(self, world: World, number: int) -> None:
        """Asked of the member that moved, for nobody else has changed."""
        member = world.members[number]
        if member.about not in _ACTIVE or member.position == NEWCOMER:
            return
        if member.position // 2 != member.state:
            raise BrokenError(f"{self.names[number]} is at {member.position} with the state {member.state}")
        mine = {block for node in member.held for block in range(*node)}
        for other in world.views[member.generation]:
            peer = world.members[other]
            if other == number or peer.about not in _ACTIVE or peer.generation != member.generation:
                continue
            if peer.position == NEWCOMER:
                continue
            if abs(peer.position // 2 - member.position // 2) > 1:
                raise BrokenError(f"{member.position} and {peer.position} are more than a window apart")
            if peer.position == member.position and any(not mine.isdisjoint(range(*node)) for node in peer.held):
                raise BrokenError(f"{self.names[number]} and {self.names[other]} hold the same block")

    def check_last(self, world: World) -> str:
        """How a run ended in which nothing moves any more: "done", "too few", "no state" or "all gone".

        Raises:
            BrokenError: if members that could have gone on have not.
        """
        members, first = world.members, range(self.bounds.members)
        if not world.expulsions and not world.lies and any(members[number].about == OUT for number in first):
            raise BrokenError("a member was left out, and nobody has taken it for dead")
        waiting = [n for n, member in enumerate(members) if member.about in (*_ACTIVE, WAITS)]
        if world.ended:
            if waiting:
                raise BrokenError(f"the run has ended without {[self.names[number] for number in waiting]}")
            return "done"
        if any(member.about == DONE for member in members):
            raise BrokenError("a member is done, and nobody has told the store")
        if not waiting:
            return "all gone"
        if len([number for number in waiting if not world.words >> number & 1]) < self.bounds.least:
            return "too few"
        if all(members[number].about == WAITS or members[number].position == NEWCOMER for number in waiting):
            if any(number in first for number in waiting):
                raise BrokenError("a member had a state, and has none any more")
            return "no state"
        raise BrokenError(f"nothing moves: {self.show(world)}")

    def _tidied(self, world: World) -> World:
        """The same world without what nobody can read any more."""
        members = world.members
        used = [member.generation for member in members if member.about in _ACTIVE]
        waiting = [number for number, member in enumerate(members) if member.about == WAITS]
        listed = [at for number in waiting if (at := self._first_view_of(world, number)) is not None]
        base = min(used + listed, default=len(world.views) - 1)
        if base:
            members = tuple(
                member._replace(generation=member.generation - base) if member.about in _ACTIVE else member
                for member in members
            )
            world = world._replace(
                members=members, views=world.views[base:], reports=world.reports[base:], groups=world.groups[base:]
            )
        grouped = {member.generation for member in members if member.about in _GROUPED}
        grouped.update(at - base for at in listed)  # and those that are still to be found
        grouped.update(member.generation + 1 for member in members if member.about in (DECIDES, PROPOSES))
        last = len(world.views) - 1
        groups = tuple(group if at in grouped or at == last else _NOBODYS for at, group in enumerate(world.groups))
        if groups != world.groups:
            world = world._replace(groups=groups)
        words = world.words
        ends_by_itself = world.ended and self.rules.reads_the_end  # whoever decides, whatever the words
        for number, member in enumerate(members):
            if member.about in _OVER and not words >> number & 1:
                read = any(number in view for view in world.views) or (number in world.came and member.about == DEAD)
                words |= 0 if read and not ends_by_itself else 1 << number
        return world if words == world.words else world._replace(words=words)

    # For people

    def say(self, move: Move) -> str:
        return f"{self.names[move[1]]} {move[0]}"

    def show(self, world: World) -> str:
        return "; ".join(
            f"{name} {_ABOUT[member.about]} in {member.generation} at {member.position}"
            for name, member in zip(self.names, world.members, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search has seen."""

    states: int
    moves: int
    lasts: dict[str, int]  # how often runs ended, and how


def search(model: Model, *, circles: bool = True) -> Found:
    """Goes through all states, breadth first; they are told apart by 64 bits of their hash.

    Args:
        model: whose states.
        circles: whether to keep all moves and look for runs without an end.

    Raises:
        BrokenError: with the shortest run that comes to it.
    """
    first = model.start()
    came_from: dict[int, tuple[int, Move] | None] = {hash(first): None}
    further: dict[int, list[int]] = {}
    frontier, made, lasts = [first], 0, dict[str, int]()
    while frontier:
        new: list[World] = []
        for world in frontier:
            key = hash(world)
            moves = [move for number in range(len(world.members)) for move in model.moves(world, number)]
            last: list[Move] = []
            try:
                if all(what in FAULTS for what, _ in moves):
                    how = model.check_last(world)
                    lasts[how] = lasts.get(how, 0) + 1
                for move in moves:
                    last = [move]
                    found = model.after(world, move)
                    made += 1
                    reached = hash(found)
                    if circles and move[0] not in FAULTS:
                        further.setdefault(key, []).append(reached)
                    if reached not in came_from:
                        came_from[reached] = (key, move)
                        new.append(found)
            except BrokenError as error:
                trace = _trace(came_from, key) + last
                raise BrokenError("\n".join([str(error), *map(model.say, trace)])) from None
        frontier = new
    if (round_about := _on_a_circle(further)) is not None:
        trace = _trace(came_from, round_about)
        raise BrokenError("\n".join(["no end after", *map(model.say, trace)]))
    return Found(states=len(came_from), moves=made, lasts=lasts)


def _on_a_circle(further: dict[int, list[int]]) -> int | None:
    """A state that can be come back to, or None: those that nothing leads to are taken away until none is."""
    leading: dict[int, int] = {}
    for states in further.values():
        for state in states:
            leading[state] = leading.get(state, 0) + 1
    free = [state for state in further if state not in leading]
    while free:
        for state in further.pop(free.pop(), ()):
            leading[state] -= 1
            if not leading[state]:
                free.append(state)
    return next(iter(further), None)


def _trace(came_from: dict[int, tuple[int, Move] | None], key: int) -> list[Move]:
    trace: list[Move] = []
    while (step := came_from[key]) is not None:
        key, move = step
        trace.append(move)
    return trace[::-1]

"""Whole tensors of a sharded model, each on one rank, its owner: for rules and norms that a shard is not enough for.

A matrix's shards go to its owner, which steps it by the optimizer's own code and sends each rank its part of the new
value: bit for bit one process's step. Source: ZeRO's partition of whole parameters, as in ``engines/ddp/zero1.py``; J.
Liu et al., "Muon is Scalable for LLM Training" (2025), has it for Muon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distaccum.config.checks import size_of
from distaccum.config.engine import FSDP2Config
from distaccum.distributed.world import World
from distaccum.engines.group_settings import WholeGroups
from distaccum.engines.modules import as_real, full_tensor, owners_by_size, to_local
from distaccum.engines.optimizer_step import norms_of
from distaccum.engines.rules import Verdict, around_step, check_parts, expect_no_hooks, small, trial_copy, try_rule
from distaccum.engines.shard_rules import fault_on_shards
from distaccum.errors import ConfigError

# Shards there and back, of tensors that are cut along dimension 0 into parts of as many rows, the last ones shorter.


def cost(shape: Sequence[int]) -> int:
    """What a step of a tensor takes, in proportion: of a matrix its products with itself, by its smaller side."""
    elements = torch.Size(shape).numel()
    return elements * min(shape[0], elements // shape[0]) if len(shape) > 1 else elements


def to_owners(
    shards: Mapping[int, Tensor], rows: Mapping[int, int], owners: Sequence[int], group: dist.ProcessGroup | None = None
) -> dict[int, Tensor]:
    """The tensors that this rank owns, whole, by their numbers; a collective, in which a rank sends its shards once.

    Args:
        shards: this rank's part of each tensor, by its number; of one type.
        rows: of the whole ones.
        owners: the rank in the group that gets each.
        group: over which they are sharded; None: all ranks.
    """
    if not shards:
        return {}
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    of_rank = _by_owner(shards, owners, ranks)
    own = of_rank[rank]
    sent = torch.cat([shards[i].reshape(-1) for i in chain.from_iterable(of_rank)])
    lengths = [[_rows(rows[i], one, ranks) * _width(shards[i]) for i in own] for one in range(ranks)]
    received = sent.new_empty(sum(map(sum, lengths)))
    sizes = [sum(shards[i].numel() for i in numbers) for numbers in of_rank]
    dist.all_to_all_single(received, sent, list(map(sum, lengths)), sizes, group=group)
    del sent  # as much memory as what comes next
    parts = torch.split(received, list(map(sum, lengths)))
    pieces = [torch.split(part, each) for part, each in zip(parts, lengths, strict=True)]
    return {i: torch.cat([of_one[k] for of_one in pieces]).view(-1, *shards[i].shape[1:]) for k, i in enumerate(own)}


def from_owners(
    wholes: Mapping[int, Tensor],
    shards: Mapping[int, Tensor],
    rows: Mapping[int, int],
    owners: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """The way back: writes this rank's part of each of ``wholes`` into its shard; a collective."""
    if not shards:
        return
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    of_rank = _by_owner(shards, owners, ranks)
    own = of_rank[rank]
    parts = {i: torch.split(wholes[i], [_rows(rows[i], one, ranks) for one in range(ranks)]) for i in own}
    leaving = [parts[i][one].reshape(-1) for one in range(ranks) for i in own]
    some = next(iter(shards.values()))
    sent = torch.cat(leaving) if leaving else some.new_empty(0)
    sizes = [sum(parts[i][one].numel() for i in own) for one in range(ranks)]
    arriving = [[shards[i].numel() for i in numbers] for numbers in of_rank]
    received = some.new_empty(sum(map(sum, arriving)))
    dist.all_to_all_single(received, sent, list(map(sum, arriving)), sizes, group=group)
    pieces = torch.split(received, list(chain.from_iterable(arriving)))
    for i, piece in zip(chain.from_iterable(of_rank), pieces, strict=True):
        shards[i].copy_(piece.view_as(shards[i]))


def _by_owner(numbers: Collection[int], owners: Sequence[int], ranks: int) -> list[list[int]]:
    return [[i for i in numbers if owners[i] == rank] for rank in range(ranks)]


def _rows(whole: int, rank: int, ranks: int) -> int:
    """Of a rank's shard."""
    most = -(-whole // ranks)
    return max(0, min(most, whole - rank * most))


def _width(shard: Tensor) -> int:
    """Numbers in a row."""
    return shard.shape[1:].numel()


class WholeNorms:
    """The norms of sharded gradients, each taken of the whole by its owner: the same bits on any number of ranks."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of the parameters' gradients, shape ``(parameters,)``: 0 where another rank has the whole; a collective."""
        shards = [as_real(to_local(parameter.grad)) for parameter in parameters]
        if not shards:
            return torch.zeros(0)
        wide = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
        owners = owners_by_size([parameter.numel() for parameter in parameters], dist.get_world_size())
        rows = {i: parameter.shape[0] for i, parameter in enumerate(parameters)}
        wholes = to_owners({i: shard.to(wide) for i, shard in enumerate(shards)}, rows, owners)
        norms = dict(zip(wholes, norms_of(list(wholes.values())).unbind(), strict=True))
        zero = torch.zeros((), dtype=wide, device=shards[0].device)
        return torch.stack([norms.get(i, zero) for i in range(len(shards))])


# Steps of whole tensors.


@dataclass
class _Dealt:
    """What one optimizer steps whole.

    Args:
        shards: of the tensors.
        owners: of each, a rank in the group of the shards.
        own: by number, what this rank's optimizer has in place of a shard; empty between two steps.
    """

    shards: list[nn.Parameter]
    owners: list[int]
    own: dict[int, nn.Parameter]


class Owners(AbstractContextManager[None]):
    """Within the ``with`` block an optimizer whose rule needs whole tensors steps those that this rank owns.

    Its groups hold them while its own ``step`` runs; before and after, and for hooks on the step, they hold the user's
    shards. Replicas of the shards do the same, each for itself.

    Args:
        optimizers: over shards; none has stepped.
        parameters: the shards that are trained, by name.
        faults: by the number of an optimizer, why its rule does not work on shards.
        others: groups that have to be stepped whole in any case, by the numbers of optimizer and group.
        mesh: over which they are sharded; with replicas these are its first dimension.
        config: of the engine.
        world: this rank.

    Raises:
        ConfigError: a rule needs more than one whole tensor, or cannot be tried; or the engine offloads.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        *,
        faults: Mapping[int, str],
        others: Collection[tuple[int, int]],
        mesh: DeviceMesh,
        config: FSDP2Config,
        world: World,
    ) -> None:
        self.stepped = dict(parameters)
        """By name, what the optimizers' state is of: what this rank owns, and shards."""
        self._group, self._rank = mesh.get_group("shard"), mesh.get_local_rank("shard")
        names = {id(parameter): name for name, parameter in parameters.items()}
        chosen = {i: optimizers[i] for i in sorted({*faults, *(i for i, _ in others)})}
        for i, optimizer in chosen.items():
            _check(optimizer, faults.get(i, ""), config)
        wholes = {
            i: sorted({j for k, j in others if k == i} | {*_groups(optimizer, world)} if i in faults else set())
            for i, optimizer in chosen.items()
        }
        self.groups = WholeGroups(list(chosen.values()))
        """Within it the groups hold what this rank steps."""
        self._dealt = {optimizer: self._deal(optimizer, wholes[i], names) for i, optimizer in chosen.items()}
        self.groups.show()
        mine = {id(stand_in) for dealt in self._dealt.values() for stand_in in dealt.own.values()}
        self.own = frozenset(n for n, value in enumerate(self.stepped.values()) if id(value) in mine)
        """The numbers of the parameters whose state this rank has whole."""
        self._hooks: list[Any] = []
        self._inside = False

    def _deal(self, optimizer: Optimizer, groups: Sequence[int], names: Mapping[int, str]) -> _Dealt:
        """Every rank deals alike. What of the state is there already goes to the owners; a collective."""
        every = [p for j in groups for p in optimizer.param_groups[j]["params"]]
        shards = [p for p in every if id(p) in names]
        owners = owners_by_size([cost(p.shape) for p in shards], dist.get_world_size(self._group))
        dealt = _Dealt(shards, owners, {})
        for i, shard in enumerate(shards):
            state = {key: full_tensor(value) for key, value in optimizer.state.pop(shard, {}).items()}
            if owners[i] != self._rank:
                continue
            dealt.own[i] = stand_in = nn.Parameter(to_local(shard.detach()).new_empty(0))
            self.stepped[names[id(shard)]] = stand_in
            if state:
                optimizer.state[stand_in] = state
        places = {id(shards[i]): stand_in for i, stand_in in dealt.own.items()}
        for j in groups:
            held = optimizer.param_groups[j]["params"]
            optimizer.param_groups[j]["params"] = [places[id(p)] for p in held if id(p) in places]
        return dealt

    @property
    def says(self) -> str:
        """What a line about the engine ends in."""
        found = ""
        for optimizer, dealt in self._dealt.items():
            size = sum(shard.numel() * shard.itemsize for shard in dealt.shards)
            found += (
                f"; {size_of(size)} of parameters stepped by {type(optimizer).__name__} whole, each on one rank: "
                f"{size_of(3 * size)} sent there and back per step"
            )
        return found

    def __enter__(self) -> None:
        self.groups.check()
        for optimizer in self._dealt:  # users' hooks before and after the step see shards
            self._hooks += [optimizer.register_step_pre_hook(self._expect_outermost)]
            self._hooks += around_step(optimizer, self._gather, self._scatter)
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(self._hooks[-1].id, last=False)

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._inside:  # the step has raised
            self._put_back()

    def _expect_outermost(self, optimizer: Optimizer, *_: Any) -> None:
        """Raises MisuseError where torch runs users' hooks in the ``super().step()`` of a rule, amid whole tensors."""
        if self._inside:
            expect_no_hooks([optimizer])

    @torch.no_grad()
    def _gather(self, optimizer: Optimizer) -> None:
        """Before the optimizer moves a weight: gives it the gradients and weights that this rank owns; a collective."""
        dealt = self._dealt[optimizer]
        gradients = {i: shard.grad for i, shard in enumerate(dealt.shards) if shard.grad is not None}
        gathered = self._gathered(dealt, gradients)
        for i, whole in self._gathered(dealt, dict(enumerate(dealt.shards))).items():
            dealt.own[i].data = whole
            dealt.own[i].grad = gathered.get(i)
        self.groups.__enter__()
        self._inside = True

    def _gathered(self, dealt: _Dealt, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        wholes: dict[int, Tensor] = {}
        for parts in _of_one_type(tensors):
            found = to_owners(parts, _rows_of(dealt, parts), dealt.owners, self._group)
            wholes |= {i: torch.view_as_complex(t) if tensors[i].is_complex() else t for i, t in found.items()}
        return wholes

    @torch.no_grad()
    def _scatter(self, optimizer: Optimizer) -> None:
        """After its step: sends every rank its part of what this one owns; a collective."""
        dealt = self._dealt[optimizer]
        for stand_in in dealt.own.values():
            stand_in.grad = None
        for parts in _of_one_type(dict(enumerate(dealt.shards))):
            wholes = {i: as_real(dealt.own[i].detach()) for i in parts if i in dealt.own}
            from_owners(wholes, parts, _rows_of(dealt, parts), dealt.owners, self._group)
        self._put_back()

    def _put_back(self) -> None:
        self._inside = False
        self.groups.__exit__()
        for dealt in self._dealt.values():
            for stand_in in dealt.own.values():
                stand_in.grad = None
                stand_in.data = stand_in.data.new_empty(0)


def _of_one_type(tensors: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """This rank's parts of sharded tensors, as real numbers, those of one type at a time."""
    local = {i: to_local(tensor.detach()) for i, tensor in tensors.items()}
    for dtype in sorted({part.dtype for part in local.values()}, key=str):
        yield {i: as_real(part) for i, part in local.items() if part.dtype is dtype}


def _rows_of(dealt: _Dealt, numbers: Collection[int]) -> dict[int, int]:
    return {i: dealt.shards[i].shape[0] for i in numbers}


# Which groups they are, and whether an owner can step them.


def _groups(optimizer: Optimizer, world: World) -> list[int]:
    """The numbers of the groups whose rule does not work on shards, of an optimizer whose rule does not; a collective.

    The others go on stepping shards. Where no group alone shows the fault it is all of them.
    """
    held = [j for j, group in enumerate(optimizer.param_groups) if any(p.requires_grad for p in group["params"])]
    found = []
    for j in held if len(held) > 1 else ():
        given = optimizer.param_groups
        alone = trial_copy(optimizer, [dict(g) | ({} if i == j else {"params": []}) for i, g in enumerate(given)])
        if alone is None or fault_on_shards(alone, world):
            found.append(j)
    return found or held


def _check(optimizer: Optimizer, fault: str, config: FSDP2Config) -> None:
    """Raises ConfigError where owners cannot step what the optimizer has as one process would."""
    kind = type(optimizer).__name__
    if config.offload:
        problem = f"{kind}'s rule needs whole tensors, which are stepped on the device"
        raise ConfigError("engine.offload", True, problem, "Leave it out, or use an optimizer that steps shards")
    check_parts(optimizer, config.name, warn=False)
    generator = torch.Generator().manual_seed(0)
    whole = [[small(p, generator) for p in group["params"] if p.requires_grad][:2] for group in optimizer.param_groups]
    verdict = try_rule(optimizer, whole, [whole])
    if verdict is Verdict.UNKNOWN:
        problem = f"its rule does not work on shards ({fault}), nor on a few whole tensors"
        raise ConfigError("optimizer", kind, problem, "Use engine=zero1, where each steps whole parameters")
    if verdict is Verdict.RANDOM and config.replicas > 1:
        problem = "its rule draws random numbers, and each replica would step a whole tensor with others"
        raise ConfigError("engine.replicas", config.replicas, problem, "Use engine.replicas=1")

"""bf16 weights, and beside them their masters: the fp32 weights that the optimizers step.

Source: P. Micikevicius et al., "Mixed Precision Training" (2018), section 3.1. After every step a weight is its
master rounded, bit by bit. A master lives on the ranks that step it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.distributed.world import World
from distaccum.engines.ddp.reducer import accumulate_in_fp32
from distaccum.engines.modules import clean, put_back
from distaccum.errors import ConfigError, MisuseError
from distaccum.precision.policy import PrecisionPolicy
from distaccum.precision.selection import select


def check(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """What has masters are fp32 parameters, of optimizers that step what is in their groups.

    Raises:
        ConfigError: a trained parameter is of another type, or an optimizer has another one inside.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            problem = f"its parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and masters are fp32"
            remedy = "Load it in float32, or use precision=bf16"
            raise ConfigError("precision", "bf16-weights", problem, remedy)
    for optimizer in optimizers:
        for inner in vars(optimizer).values():
            if isinstance(inner, Optimizer) and inner.param_groups is not optimizer.param_groups:
                problem = f"{type(optimizer).__name__} has an optimizer inside, which would not step the fp32 masters"
                raise ConfigError("precision", "bf16-weights", problem, "Use precision=bf16, or one plain optimizer")


class Masters:
    """The masters of one rank. Making it turns the model's trained fp32 parameters into their roundings.

    Those of ``policy.keep_fp32`` stay as they are, and so do buffers, and what no optimizer steps. By a policy that
    keeps no masters all stay as they are: what is stepped of each parameter is itself.

    Args:
        model: on its device, the same on every rank, and not wrapped yet.
        optimizers: over its parameters, all of them on every rank.
        policy: whose ``parameter_dtype`` is that of the weights.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer], policy: PrecisionPolicy) -> None:
        self.rounded = policy.keeps_masters
        """Whether weights are roundings of what is stepped."""
        self.held = "fp32 masters and optimizer state" if self.rounded else "optimizer state"
        self._masters: dict[int, nn.Parameter] = {}  # by the weight's id; of those that this rank steps
        self._weights: list[nn.Parameter] = []
        named = dict(model.named_parameters(remove_duplicate=False))
        if self.rounded:
            self._make(model, named.values(), optimizers, policy)
        rounded = {id(weight) for weight in self._weights}
        self._names = {clean(name): p for name, p in named.items() if id(p) in rounded}
        self.names = frozenset(self._names)
        """Of all that have a master, on this rank or on another."""
        self._note()

    def _make(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        optimizers: Iterable[Optimizer],
        policy: PrecisionPolicy,
    ) -> None:
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        kept = {id(p) for module in select(model, policy)[0].values() for p in module.parameters()}
        for parameter in {id(p): p for p in parameters}.values():
            if not parameter.requires_grad or id(parameter) in kept or id(parameter) not in held:
                continue
            parameter.grad = None
            master = nn.Parameter(parameter.data)
            vars(master).update(vars(parameter))  # what an optimizer may ask for
            self._masters[id(parameter)] = master
            self._weights.append(parameter)
            parameter.data = parameter.data.to(policy.parameter_dtype)
            accumulate_in_fp32(parameter)

    def _note(self) -> None:
        """Notes where the weights are, and what they are, by their versions: the host knows both."""
        self._places = [weight.data for weight in self._weights]
        self._versions = [weight._version for weight in self._weights]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of a weight that this rank steps; every other parameter is its own."""
        return self._masters.get(id(parameter), parameter)

    def by_name(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The masters of this rank, with their weights' names."""
        return [(name, self._masters[id(w)]) for name, w in self._names.items() if id(w) in self._masters]

    def take_over(self, optimizers: Iterable[Optimizer]) -> None:
        """Puts masters in the place of the weights in the optimizers' groups and state.

        Weights that are in no group by now are stepped by another rank: their masters are dropped.
        """
        if not self.rounded:
            return
        optimizers = list(optimizers)
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        stepped_elsewhere = [number for number in self._masters if number not in held]
        for optimizer in optimizers:
            for weight in [key for key in optimizer.state if id(key) in self._masters]:
                optimizer.state[self._masters[id(weight)]] = optimizer.state.pop(weight)
            for group in optimizer.param_groups:
                group["params"] = [self.of(p) for p in group["params"]]
        for number in stepped_elsewhere:
            del self._masters[number]
        self._note()

    # --- around a step

    @torch.no_grad()
    def take_in(self) -> None:
        """Weights that somebody has changed since the last step are taken over by their masters.

        Element by element: one that is still its master's rounding leaves the master as it is.

        Raises:
            MisuseError: a weight has another shape or type.
        """
        now = [weight._version for weight in self._weights]
        moved = [w.data_ptr() != p.data_ptr() for w, p in zip(self._weights, self._places, strict=True)]
        if now == self._versions and not any(moved):
            return
        for i, (weight, place) in enumerate(zip(self._weights, self._places, strict=True)):
            if not moved[i] and now[i] == self._versions[i]:
                continue
            put_back(weight, place)
            if id(weight) in self._masters:
                master = self._masters[id(weight)]
                master.copy_(torch.where(master.to(place.dtype) == place, master, place.to(master.dtype)))
        self._note()

    @torch.no_grad()
    def round(self) -> None:
        """After a step, applied or not: the weights become their masters' roundings.

        Raises:
            MisuseError: an optimizer has changed a weight itself, and not its master.
        """
        if [weight._version for weight in self._weights] != self._versions:
            raise MisuseError(
                "the optimizer's step has changed the bf16 weights, not the fp32 masters in its groups: it keeps the "
                "parameters that it was made with. Use precision=bf16"
            )
        pairs = [
            (place, self._masters[id(weight)].detach())
            for weight, place in zip(self._weights, self._places, strict=True)
            if id(weight) in self._masters
        ]
        if pairs:
            places, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(places, masters)

    # --- state

    def in_place_of_weights(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors with masters for weights; without the weights that another rank steps."""
        self.take_in()
        found = dict(model)
        for name, weight in self._names.items():
            if id(weight) in self._masters and name in found:
                found[name] = self._masters[id(weight)].detach()
            else:
                found.pop(name, None)
        return found

    @torch.no_grad()
    def load(self, model: Mapping[str, Tensor]) -> None:
        """Restores masters from a model's tensors, once its weights are restored from them."""
        for name, weight in self._names.items():
            if id(weight) in self._masters and name in model:
                self._masters[id(weight)].copy_(model[name])
        self._note()

    # --- the end

    def release(self, optimizers: Sequence[Optimizer]) -> None:
        """Gives weights back in the place of their masters, in groups and state; see :meth:`restore`."""
        if not self.rounded:
            return
        weights = {id(self._masters[id(w)]): w for w in self._weights if id(w) in self._masters}
        for optimizer in optimizers:
            for master in [key for key in optimizer.state if id(key) in weights]:
                optimizer.state[weights[id(master)]] = optimizer.state.pop(master)
            for group in optimizer.param_groups:
                group["params"] = [weights.get(id(p), p) for p in group["params"]]

    def whole(self, parameter: nn.Parameter) -> Tensor | None:
        """The master of a weight, for its owner to send: on other ranks memory for it; None: it has no master."""
        if all(parameter is not weight for weight in self._weights):
            return None
        if id(parameter) not in self._masters:
            self._masters[id(parameter)] = nn.Parameter(parameter.data.float())
        return self._masters[id(parameter)].detach()

    def restore(self) -> None:
        """Makes the model's parameters fp32 again: their masters, or their own values where no master is here."""
        for weight in self._weights:
            weight.grad = None
            master = self._masters.get(id(weight))
            weight.data = weight.data.float() if master is None else master.data
        self._masters, self._weights, self._names, self._places, self._versions = {}, [], {}, [], []


def synchronize(model: nn.Module, world: World) -> None:
    """Sets every trained parameter to rank 0's, before it is rounded; a collective."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            world.broadcast_(parameter.detach())

"""All of DeepSpeed that has no public name: where its optimizer wrappers hold gradients and fp32 weights, its hooks.

:func:`check` looks for the names once an engine has been made, and refuses a DeepSpeed that has not all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distaccum.errors import ConfigError

WORKING = ("0.19.1", "0.19.8")
"""The oldest and the newest version whose names are these."""

Named = tuple[str, Tensor]


class Piece(NamedTuple):
    """What lies of a parameter in a flat tensor of this rank: ``numel`` elements, of some ranks none."""

    parameter: nn.Parameter
    start: int
    """In the flat tensor."""
    offset: int
    """In the parameter."""
    numel: int


class Flat(NamedTuple):
    """A flat tensor that this rank steps, and every parameter that some rank has a piece of in the same one."""

    tensor: Tensor
    pieces: Sequence[Piece]


class Gradients(Protocol):
    """A rank's part of the reduced gradient."""

    sharded: bool
    """Whether each rank holds a part of it; otherwise all hold the same."""
    flat: bool
    """Whether the optimizer steps flat tensors of many parameters, and not the parameters."""
    names: tuple[str, ...]
    """What is used of the wrapper."""

    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of weights that the forward computes with and this rank's fp32 copies of them, which it steps."""

    def held(self) -> Iterator[Named]:
        """Pairs of a parameter's name and this rank's part of its gradient."""

    def flats(self) -> Iterator[Flat]:
        """What the optimizer steps, where that is :attr:`flat`; the same ones, in the same order, on every rank."""

    def divide(self, divisor: float) -> None:
        """Makes the next step use the gradient over ``divisor``; once a window."""

    def divide_by_nothing(self) -> None:
        """Undoes :meth:`divide`, or DeepSpeed's backward would scale the next loss."""

    def drop(self) -> None:
        """Drops what was accumulated and reduced."""


class Replicated:
    """Stage 0: in the parameters' ``grad``, with or without a wrapper that holds fp32 weights."""

    sharded = flat = False
    names: tuple[str, ...] = ()

    def __init__(self, engine: Any, trained: Mapping[str, nn.Parameter]) -> None:
        self._engine = engine
        self._trained = trained

    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """In 16 bits: of each parameter."""
        copies = fp32_copies(self._engine.optimizer)
        yield from ((p.detach(), copies[id(p)].detach()) for p in self._trained.values() if id(p) in copies)

    def held(self) -> Iterator[Named]:
        """Whole gradients."""
        yield from ((name, p.grad) for name, p in self._trained.items() if p.grad is not None)

    def flats(self) -> Iterator[Flat]:
        """None: it steps the parameters, or copies of each."""
        return iter(())

    def divide(self, divisor: float) -> None:
        """Divides in place."""
        _divide([gradient for _, gradient in self.held()], divisor)

    def divide_by_nothing(self) -> None:
        """The gradient itself was divided."""

    def drop(self) -> None:
        """Frees them; the next backward makes new ones."""
        for parameter in self._trained.values():
            parameter.grad = None


class MasterCopies:
    """Stage 1 in bf16: whole fp32 gradients in buffers of the wrapper; each rank steps a part."""

    sharded, flat = False, True
    names: tuple[str, ...] = (
        "param_names",
        "bf16_groups",
        "bf16_partitioned_groups",
        "fp32_groups_flat_partition",
        "real_dp_process_group",
        "fp32_groups_gradients",
        "fp32_groups_gradients_flat",
        "fp32_groups_has_gradients",
        "get_grads_for_reduction",
        "clear_hp_grads",
        "clear_lp_grads",
    )

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of this rank's slice of each group."""
        optimizer = self._optimizer
        return _own_partitions(optimizer, optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition)

    def held(self) -> Iterator[Named]:
        """Whole gradients."""
        names = self._optimizer.param_names
        for group, gradients in zip(self._optimizer.bf16_groups, self._optimizer.fp32_groups_gradients, strict=True):
            yield from ((names[p], gradient) for p, gradient in zip(group, gradients, strict=True))

    def flats(self) -> Iterator[Flat]:
        """One of each group."""
        return _linked(self._optimizer.fp32_groups_flat_partition, self._optimizer.bf16_groups)

    def divide(self, divisor: float) -> None:
        """Divides in place."""
        _divide(self._optimizer.fp32_groups_gradients_flat, divisor)

    def divide_by_nothing(self) -> None:
        """The gradient itself was divided."""

    def drop(self) -> None:
        """Zeroes in place."""
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads()


class _Sharded:
    sharded = flat = True
    names: tuple[str, ...] = ("override_loss_scale", "averaged_gradients", "param_names", "zero_grad")
    offload_names: tuple[str, ...] = ("grad_position", "get_param_id", "reset_cpu_buffers")

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    def divide(self, divisor: float) -> None:
        """Sets the loss scale that DeepSpeed divides by: no walk over memory, and its clipping sees it."""
        self._optimizer.override_loss_scale(divisor)

    def divide_by_nothing(self) -> None:
        """Sets it to 1."""
        self.divide(1.0)


class Partitions(_Sharded):
    """Stages 1 and 2: this rank's slice of all parameters end to end."""

    names = (
        *_Sharded.names,
        "dtype",
        "gradient_accumulation_dtype",
        "params_in_partition",
        "cpu_offload",
        "micro_step_id",
        "all_grad_tensors",
        "bit16_groups",
        "parallel_partitioned_bit16_groups",
        "single_partition_of_fp32_groups",
        "real_dp_process_group",
    )

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        # DeepSpeed copies the reduced gradient into a buffer in the format of the first parameter that the optimizer
        # was given, frozen or not: where that is of 16 bits it would round what is in fp32.
        self._optimizer.dtype = getattr(self._optimizer, "gradient_accumulation_dtype", torch.float32)

    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of this rank's slice of each group."""
        optimizer = self._optimizer
        groups = optimizer.parallel_partitioned_bit16_groups
        return _own_partitions(optimizer, groups, optimizer.single_partition_of_fp32_groups)

    def flats(self) -> Iterator[Flat]:
        """One of each group."""
        return _linked(self._optimizer.single_partition_of_fp32_groups, self._optimizer.bit16_groups)

    def held(self) -> Iterator[Named]:
        """This rank's slices, without padding."""
        optimizer = self._optimizer
        for i, parameters in enumerate(optimizer.params_in_partition):
            if optimizer.cpu_offload:
                flat = optimizer.single_partition_of_fp32_groups[i].grad
                places = (optimizer.grad_position[optimizer.get_param_id(p)] for p in parameters)
                pieces: Sequence[Tensor] = [flat.narrow(0, int(start), int(n)) for _, _, start, n in places]
            else:
                pieces = [g for g in optimizer.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            yield from ((optimizer.param_names[p], piece) for p, piece in zip(parameters, pieces, strict=False))

    def drop(self) -> None:
        """Drops them as DeepSpeed does at an overflow."""
        optimizer = self._optimizer
        optimizer.zero_grad(set_to_none=True)
        optimizer.micro_step_id = -1
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            held.update(dict.fromkeys(held))
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()


class ParameterShards(_Sharded):
    """Stage 3: this rank's slice of each parameter."""

    names = (
        *_Sharded.names,
        "fp16_groups",
        "get_param_id",
        "grad_position",
        "offload_optimizer",
        "grad_partitions_flat_buffer",
        "parameter_offload",
        "persistent_parameters",
        "fp16_partitioned_groups_flat",
        "fp32_partitioned_groups_flat",
    )

    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of this rank's slices; in fp32 these are no copies but the slices themselves."""
        optimizer = self._optimizer
        for own, master in zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            yield own, master.detach()

    def flats(self) -> Iterator[Flat]:
        """One of each of DeepSpeed's groups, of which a user's has one or several."""
        optimizer, rank = self._optimizer, torch.distributed.get_rank()
        for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            pieces = []
            for p in parameters:
                _, start, size = optimizer.grad_position[optimizer.get_param_id(p)]
                offset = min(int(size) * rank, int(p.ds_numel))
                pieces.append(Piece(p, int(start), offset, min(int(size), int(p.ds_numel) - offset)))
            yield Flat(flat, pieces)

    def held(self) -> Iterator[Named]:
        """This rank's slices."""
        optimizer = self._optimizer
        for i, parameters in enumerate(optimizer.fp16_groups):
            if optimizer.offload_optimizer:
                flat = optimizer.fp32_partitioned_groups_flat[i].grad
                places = (optimizer.grad_position[optimizer.get_param_id(p)] for p in parameters)
                pieces: Sequence[Tensor] = [flat.narrow(0, int(start), int(n)) for _, start, n in places]
            else:
                pieces = optimizer.averaged_gradients[i]
            yield from ((optimizer.param_names[p], piece) for p, piece in zip(parameters, pieces, strict=True))

    def drop(self) -> None:
        """Drops them as DeepSpeed does at an overflow."""
        optimizer = self._optimizer
        optimizer.zero_grad(set_to_none=True)
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()
        else:
            optimizer.averaged_gradients = {}
        # Otherwise a parameter that a window does not use keeps its gradient of the window before.
        optimizer.grad_partitions_flat_buffer.zero_()


def _own_partitions(optimizer: Any, groups: Any, masters: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for partitions, master, members in zip(groups, masters, optimizer.real_dp_process_group, strict=True):
        yield partitions[torch.distributed.get_rank(group=members)], master.detach()


def _linked(flats: Any, groups: Any) -> Iterator[Flat]:
    """By what DeepSpeed notes at each parameter that lies in this rank's partition of its group."""
    for flat, parameters in zip(flats, groups, strict=True):
        pieces = []
        for p in parameters:
            here = p._hp_mapping
            if here is None:
                pieces.append(Piece(p, 0, 0, 0))
            else:
                within, of = here.hp_fragment_address, here.lp_fragment_address
                pieces.append(Piece(p, int(within.start), int(of.start), int(of.numel)))
        yield Flat(flat, pieces)


def gradients_of(engine: Any, trained: Mapping[str, nn.Parameter], version: str) -> Gradients:
    """The gradients of the wrapper that DeepSpeed chose for a stage and a precision.

    Raises:
        ConfigError: that wrapper lacks a name that is used here.
    """
    gradients = _gradients_of(engine, trained)
    _check(engine, gradients, version)
    if isinstance(gradients, ParameterShards):
        _clear_padding(gradients)
    return gradients


def _gradients_of(engine: Any, trained: Mapping[str, nn.Parameter]) -> Gradients:
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return MasterCopies(engine)
    if stage == 0:
        return Replicated(engine, trained)
    return ParameterShards(engine) if hasattr(optimizer, "fp16_groups") else Partitions(engine)


def _clear_padding(gradients: Gradients) -> None:
    """Zeroes what fills slices up to one size: it is memory as it was found, whose NaN a sum over a slice meets."""
    for (own, master), flat in zip(gradients.masters(), gradients.flats(), strict=True):
        for parameter, start, _, numel in flat.pieces:
            padding = slice(start + numel, start + int(cast(Any, parameter).ds_tensor.ds_numel))
            own[padding].zero_()
            master[padding].zero_()


_OF_ENGINE = (
    "allreduce_gradients",
    "coalesce_grad_reduction",
    "destroy",
    "no_sync",
    "set_gradient_accumulation_boundary",
    "was_step_applied",
    "_backward_post_hook",
    "_backward_prologue",
    "_backward_prologue_per_tensor",
    "_flush_coalesced_reduction_zero12",
    "_flush_coalesced_reduction_zero3",
    "_get_gradients_for_reduction",
)


def check_version(deepspeed: Any) -> None:
    """Raises ConfigError for a DeepSpeed without the methods that are called here; before a model is wrapped."""
    missing = [name for name in _OF_ENGINE if not hasattr(deepspeed.DeepSpeedEngine, name)]
    if missing:
        raise _other_version(deepspeed.__version__, f"DeepSpeedEngine.{missing[0]}")


def forget_left_group(deepspeed: Any) -> None:
    """Where the process group that DeepSpeed has kept was destroyed, begins as in a new process.

    It keeps the group, and of stage 3 the modules of a forward that did not end, and the numbers of the next module and
    the next parameter, which it compares over the ranks.
    """
    groups = deepspeed.utils.groups
    kept = getattr(groups, "_WORLD_GROUP", None)
    if kept is None:
        return
    try:
        dist.get_process_group_ranks(kept)
    except (KeyError, ValueError):
        groups._WORLD_GROUP = None
        deepspeed.zero.Init.param_id = 0
        stage_3 = import_module("deepspeed.runtime.zero.parameter_offload")
        stage_3.FWD_MODULE_STACK.clear()
        register = unwrap(stage_3.DeepSpeedZeRoOffload._register_deepspeed_module)
        (numbers,) = register.__defaults__ or ([0],)
        numbers[:] = [0]


def _check(engine: Any, gradients: Gradients, version: str) -> None:
    wrapper, wanted = engine.optimizer, list(gradients.names)
    if getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False):
        wanted += getattr(gradients, "offload_names", ())
    missing = [name for name in wanted if not hasattr(wrapper, name)]
    if missing:
        raise _other_version(version, f"{type(wrapper).__name__}.{missing[0]}")


def _other_version(version: str, name: str) -> ConfigError:
    problem = f"DeepSpeed {version} has no {name}, without which a window's gradient is not known to be exact"
    return ConfigError("engine", "deepspeed", problem, f"Install deepspeed>={WORKING[0]},<={WORKING[1]}")


def accumulated(optimizer: Any, trained: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The tensors in which a window accumulates on this rank."""
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return [*optimizer.fp32_groups_gradients_flat, *(p.grad for p in trained)]
    if getattr(optimizer, "use_grad_accum_attribute", False):
        return [g for p in trained for g in (p.grad, getattr(p, "grad_accum", None))]
    return [p.grad for p in trained]


def forget_accumulated(trained: Sequence[nn.Parameter]) -> None:
    """Drops what backwards have left at the parameters."""
    for parameter in trained:
        parameter.grad = parameter.grad_accum = None  # type: ignore[attr-defined]  # DeepSpeed's


def end_without_reducing(engine: Any, hold: AbstractContextManager[object]) -> None:
    """Leaves ``hold``, in which an engine that is done with keeps its reduction back, and makes none.

    DeepSpeed makes one as it leaves, of no gradient too: at the latest when the engine's memory is freed, where the
    process group has ended, and a run that is done would close with a traceback.
    """
    for name in ("_flush_coalesced_reduction_zero12", "_flush_coalesced_reduction_zero3"):
        setattr(engine, name, _nothing)
    hold.__exit__(None, None, None)


def _nothing(optimizer: Any) -> None:
    """In place of a reduction of ``optimizer``'s gradients."""


def complete(optimizer: Any, trained: Sequence[nn.Parameter]) -> list[bool]:
    """Gives zeros to parameters without a gradient on this rank; says which had one.

    Other ranks may have used them, and reductions must match. At stage 3 DeepSpeed would otherwise step on what was
    left of the window before, and in bf16 at stage 1 leave what this rank did not use out of its norm.
    """
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        pairs = zip(optimizer.bf16_groups, optimizer.fp32_groups_has_gradients, strict=True)
        had = {id(p): bool(one) for group, has in pairs for p, one in zip(group, has, strict=True)}
        for used in optimizer.fp32_groups_has_gradients:
            used[:] = [True] * len(used)
        return [had.get(id(p), False) for p in trained]
    has_own_attribute = getattr(optimizer, "use_grad_accum_attribute", False)
    had_one = []
    for parameter in trained:
        if has_own_attribute:
            had_one.append(getattr(parameter, "grad_accum", None) is not None)
            if not had_one[-1]:
                zeros = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
                parameter.grad_accum = zeros  # type: ignore[attr-defined]  # DeepSpeed's
            continue
        had_one.append(parameter.grad is not None)
        if parameter.grad is None:
            gradient = torch.zeros_like(parameter, dtype=accumulated_in(parameter))
            parameter.grad = gradient
            shape = getattr(parameter, "ds_shape", None)
            if shape is not None:  # its own memory was given back, and with it its shape
                parameter.grad.data = gradient.new_zeros(shape)
    return had_one


def send_along(engine: Any, numbers: Callable[[], Tensor | None]) -> None:
    """Where gradients stay whole, ``numbers`` travel in their reduction, and are averaged in place like them."""
    owner, name = engine, "_get_gradients_for_reduction"
    if hasattr(engine.optimizer, "get_grads_for_reduction"):
        owner, name = engine.optimizer, "get_grads_for_reduction"
    gradients_of_all = getattr(owner, name)

    def and_numbers() -> tuple[list[Tensor], Any]:
        gradients, of_experts = gradients_of_all()
        more = numbers()
        # In the format of a gradient, and so in the same bucket.
        return ([*gradients] if more is None else [*gradients, more]), of_experts

    setattr(owner, name, and_numbers)


class Backwards:
    """Keeps DeepSpeed's hooks from acting in backwards that are none of a window's.

    A gradient for something else (of an input, of a penalty, of a probe between windows) runs the same hooks: they
    would reduce it, divide it by DeepSpeed's accumulation steps, and refuse it where a loss scale is set.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer, self._of_window = engine, engine.optimizer, False
        engine._backward_prologue = partial(self._within_window, engine._backward_prologue)
        engine._backward_prologue_per_tensor = _unchanged
        if hasattr(self._optimizer, "unregister_grad_acc_post_hooks"):
            self._optimizer.unregister_grad_acc_post_hooks()
            self._optimizer.register_grad_acc_post_hook(partial(self._after_backward, engine._backward_post_hook))

    @contextmanager
    def of_window(self) -> Iterator[None]:
        """Around a window's own backward."""
        self._of_window = True
        try:
            yield
        finally:
            self._of_window = False

    @contextmanager
    def of_replay(self) -> Iterator[None]:
        """Around forwards and a backward past DeepSpeed's own, which count as a window's.

        DeepSpeed enters such a backward by hooks on outputs, and overlooks those in a dataclass.
        """
        with self.of_window():
            self._optimizer.enter_backward()
            try:
                yield
            finally:
                self._optimizer._backward_active_depth = 0

    def _within_window(self, hook: Callable[[], None]) -> None:
        if self._of_window:
            hook()

    def _after_backward(self, hook: Callable[[], None]) -> None:
        """Of a backward past DeepSpeed's own: a replay's, or one that is none of a window's."""
        # Each forward that it reached has entered one, and DeepSpeed waits for the end of all.
        self._optimizer._backward_active_depth = min(self._optimizer._backward_active_depth, 1)
        if self._of_window:
            self._engine._manual_backward_expected = True  # or it would be refused for want of a loss scale
            hook()
        else:
            self._optimizer.exit_backward()


def _unchanged(gradient: Any) -> Any:
    return gradient


class Trace:
    """A number that says which modules were gathered in which order, at stage 3: ranks must gather the same ones.

    Where they do not, and the modules are of one size, the parts of two modules are put together in silence.

    Args:
        engine: of stage 3.
        world_size: so that sums of squares over all ranks are exact in fp64.
    """

    def __init__(self, engine: Any, world_size: int) -> None:
        self._modulus = 2 ** min(20, (52 - 2 * world_size.bit_length()) // 2)
        self.number = 0
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        self._fetch = coordinator.fetch_sub_module
        coordinator.fetch_sub_module = self._note

    def _note(self, current_submodule: Any, forward: bool, **options: Any) -> Any:
        if current_submodule._parameters:
            self.number = (self.number * 31 + 2 * current_submodule.ds_id + forward + 1) % self._modulus
        return self._fetch(current_submodule, forward, **options)


def own_loss_scale(optimizer: Any) -> None:
    """Sets DeepSpeed's loss scale to 1, and keeps it from raising at the lowest one."""
    scaling = getattr(optimizer, "loss_scale_config", None)
    if scaling is not None:
        scaling.cur_scale, scaling.dynamic_loss_scale = 1.0, False
    if hasattr(optimizer, "loss_scaler"):
        optimizer.loss_scaler.raise_error_at_min_scale = False


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """A parameter's shape, also where its memory was given back."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether a rank keeps a part of it (stage 3)."""
    return hasattr(parameter, "ds_tensor")


def shard(value: Tensor, parameter: Any) -> Tensor:
    """This rank's part of a value in equal parts; given the whole, DeepSpeed would take one that is too long."""
    size, rank = int(parameter.ds_tensor.ds_numel), torch.distributed.get_rank()
    return nn.functional.pad(value.flatten(), (0, size * (rank + 1)))[size * rank : size * (rank + 1)]


def copy_to_shard(parameter: Any, value: Tensor) -> None:
    """Sets this rank's part of a partitioned parameter."""
    parameter.ds_tensor.data.copy_(shard(value, parameter))


def shards_from_whole(optimizer: Any) -> None:
    """At stage 3: of small parameters, which stay whole on every rank, this rank's part is set to what is there now."""
    rank = torch.distributed.get_rank()
    for parameter in optimizer.persistent_parameters:
        if parameter.numel() == parameter.ds_numel:  # else its memory is given back
            size = int(parameter.ds_tensor.ds_numel)
            own = parameter.detach().reshape(-1)[size * rank : size * (rank + 1)]
            parameter.ds_tensor.data[: own.numel()].copy_(own)


class LostEdits:
    """At stage 3: finds weights that were changed while no rank held them whole, which changes nothing.

    Versions count what was written into a tensor, and DeepSpeed writes past them. What was changed within
    ``GatheredParameters`` has reached this rank's part, whose version then counts too.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._trained: list[tuple[str, Any]] = list(trained.items())
        self.note()

    def note(self) -> None:
        """From here on changes are the user's."""
        self._versions = self._now()

    def _now(self) -> list[tuple[int, int]]:
        return [(p._version, p.ds_tensor._version) for _, p in self._trained]

    def find(self) -> str:
        """The name of a parameter whose change since :meth:`note` was lost; empty where there is none."""
        now, rank = self._now(), torch.distributed.get_rank()
        lost = ""
        for (name, p), (version, of_shard), (before, shard_before) in zip(
            self._trained, now, self._versions, strict=True
        ):
            if p.ds_persist or p.ds_tensor.ds_numel * rank >= p.ds_numel:
                continue  # stays whole; or nothing of it lies here
            put_aside = p.numel() and p.ds_status.name == "NOT_AVAILABLE"  # by p.data = ...
            if put_aside or (version != before and of_shard == shard_before):
                lost = lost or name
        self._versions = now
        return lost


def fp32_copies(optimizer: Any) -> dict[int, Tensor]:
    """The fp32 weights that stage 0 keeps next to 16-bit ones, by the parameter's ``id``."""
    if not (hasattr(optimizer, "fp16_groups") and hasattr(optimizer, "fp32_groups")):
        return {}
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {id(p): copy for group, copies in groups for p, copy in zip(group, copies, strict=True)}


def accumulate_in_fp32(parameter: nn.Parameter) -> None:
    """Makes autograd accumulate a 16-bit parameter's gradients in fp32, where torch can (2.10 and later)."""
    if hasattr(parameter, "grad_dtype") and parameter.itemsize < torch.float32.itemsize:
        parameter.grad_dtype = torch.float32


def accumulated_in(parameter: nn.Parameter) -> torch.dtype:
    """The format in which autograd accumulates the parameter's gradients."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _divide(gradients: Sequence[Tensor], divisor: float) -> None:
    if divisor != 1.0 and gradients:
        torch._foreach_div_(list(gradients), divisor)


def gather_persistent(optimizer: Any) -> None:
    """Gathers again the small parameters that stay whole at stage 3, as DeepSpeed does after a step."""
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)

"""A model in a few lines, for a run's header: its modules with their parameters, what is trained, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from distaccum.config.checks import size_of

_MOST = 30  # rows


@dataclass(frozen=True)
class ModuleRow:
    """A module of the model's own, or several of one shape that follow each other, or a parameter that is in none.

    Attributes:
        name: as in ``named_modules``; ``blocks.0-11`` for several.
        kind: the class; ``12x Block`` for several.
        parameters: elements of all of them, without those that are another row's already.
        trained: how many of these are trained.
        shared: elements that are another row's already, such as those of a tied weight.
        size: bytes of the parameters.
        dtypes: of the parameters.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    shared: int
    size: int
    dtypes: tuple[str, ...]


def modules_of(model: nn.Module) -> list[str]:
    """The model's modules as the lines of a table."""
    return table(summarize(model))


def summarize(model: nn.Module) -> list[ModuleRow]:
    """The model's own modules; those without parameters are left out.

    A parameter counts in one row, however often the model has it. Modules of a list or a sequence that follow each
    other and have the same parameters are one row.
    """
    rows: list[ModuleRow] = []
    counted: set[int] = set()
    if any(True for _ in model.children()):
        for name, parameter in model.named_parameters(recurse=False):
            rows.append(_row([name], "Parameter", [parameter], counted))
    for group in _groups("", model):
        parameters = [parameter for _, module in group for parameter in module.parameters()]
        if parameters:
            rows.append(_row([path for path, _ in group], type(group[0][1]).__name__, parameters, counted))
    return rows


def table(rows: Sequence[ModuleRow]) -> list[str]:
    """The rows as aligned lines: name, class, parameters, memory, types, and what is frozen or counted elsewhere."""
    shown = rows[:_MOST]
    columns = ([r.name for r in shown], [r.kind for r in shown], [f"{r.parameters:,}" for r in shown])
    sizes = [size_of(row.size) for row in shown]
    name_width, kind_width, number_width, size_width = (max(map(len, c), default=0) for c in (*columns, sizes))
    lines = [
        f"{name:<{name_width}}  {kind:<{kind_width}}  {number:>{number_width}}  {size:>{size_width}}  {_note(row)}"
        for name, kind, number, size, row in zip(*columns, sizes, shown, strict=True)
    ]
    if left := rows[_MOST:]:
        lines.append(f"... {len(left)} more rows")
    return [line.rstrip() for line in lines]


def _note(row: ModuleRow) -> str:
    words = list(row.dtypes)
    frozen = row.parameters - row.trained
    if frozen:
        words.append("frozen" if frozen == row.parameters else f"{frozen:,} frozen")
    if row.shared:
        words.append(f"{row.shared:,} tied")
    return ", ".join(words)


def _groups(path: str, module: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """The children, with runs of one shape together, and those of a list of modules in its place."""
    prefix = f"{path}." if path else ""
    for _, run in groupby(module.named_children(), key=lambda child: _shape(*child)):
        group = [(f"{prefix}{name}", child) for name, child in run]
        if isinstance(group[0][1], nn.ModuleList):
            for inner, each in group:
                yield from _groups(inner, each)
        else:
            yield group


def _shape(name: str, module: nn.Module) -> object:
    """Equal for modules that are shown in one row: numbered ones, of one class and with the same parameters."""
    if not name.isdecimal():
        return name
    parameters = (
        (path, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for path, parameter in module.named_parameters(remove_duplicate=False)
    )
    return tuple((path, type(inner)) for path, inner in module.named_modules()), tuple(parameters)


def _row(paths: list[str], kind: str, parameters: list[nn.Parameter], counted: set[int]) -> ModuleRow:
    """The row of these modules; ``counted`` has the parameters that are in a row already, and gets these."""
    every = {id(parameter): parameter for parameter in parameters}
    own = [parameter for number, parameter in every.items() if number not in counted]
    counted.update(every)
    return ModuleRow(
        name=_span(paths),
        kind=kind if len(paths) == 1 else f"{len(paths)}x {kind}",
        parameters=sum(map(_elements, own)),
        trained=sum(_elements(parameter) for parameter in own if parameter.requires_grad),
        shared=sum(map(_elements, every.values())) - sum(map(_elements, own)),
        size=sum(_elements(parameter) * parameter.element_size() for parameter in own),
        dtypes=tuple(dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in every.values())),
    )


def _elements(parameter: nn.Parameter) -> int:
    """Of the whole parameter, also where DeepSpeed's stage 3 has taken it apart."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _span(paths: list[str]) -> str:
    """``blocks.0-11`` of ``blocks.0`` to ``blocks.11``."""
    first, last = paths[0].split("."), paths[-1].split(".")
    return ".".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))

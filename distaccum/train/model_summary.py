"""A model in a few lines: its modules with their parameters, what is trained of them, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from distaccum.config.sizes import size_of

_MOST = 30  # rows


@dataclass(frozen=True)
class ModuleRow:
    """A module, or several of one shape that follow each other, or a parameter that a shown module has itself.

    Attributes:
        name: as in ``named_modules``; ``blocks.0-11`` for several.
        kind: the class; ``12x Block`` for several.
        parameters: elements of all of them, without those that are another row's already.
        trained: how many of these are trained.
        shared: elements that are another row's already, such as those of a tied weight.
        size: bytes of the parameters.
        dtypes: of the parameters.
        depth: 1 for the model's own modules.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    shared: int
    size: int
    dtypes: tuple[str, ...]
    depth: int


def summarize(model: nn.Module, depth: int) -> list[ModuleRow]:
    """The model's modules down to ``depth``; those without parameters are left out.

    A parameter counts in one row of each depth, however often the model has it. Lists of modules are no depth of their
    own, and modules of a list or a sequence that follow each other and have the same parameters are one row.
    """
    return list(_rows([("", model)], depth, 1, {}))


def table(rows: Sequence[ModuleRow]) -> list[str]:
    """The rows as aligned lines: name, class, parameters, memory, types, and what is frozen or counted elsewhere.

    A module of a shown one stands below it, indented, with what its name has more.
    """
    shown = rows[:_MOST]
    names, parents = [], [""]
    for row in shown:
        parents = [*parents[: row.depth], f"{row.name}."]
        names.append("  " * (row.depth - 1) + row.name.removeprefix(parents[row.depth - 1]))
    numbers = [f"{row.parameters:,}" for row in shown]
    sizes = [size_of(row.size) for row in shown]
    columns = (names, [row.kind for row in shown], numbers, sizes)
    name_width, kind_width, number_width, size_width = (max(map(len, column), default=0) for column in columns)
    lines = [
        f"{name:<{name_width}}  {row.kind:<{kind_width}}  {number:>{number_width}}  {size:>{size_width}}  {_note(row)}"
        for name, row, number, size in zip(names, shown, numbers, sizes, strict=True)
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


def _rows(modules: list[tuple[str, nn.Module]], depth: int, level: int, owners: dict[int, str]) -> Iterator[ModuleRow]:
    """Of what several modules of one shape consist of; ``owners`` has the row of each parameter that is counted."""
    _, first = modules[0]
    if level > depth or not any(True for _ in first.children()):
        return
    for name, _ in first.named_parameters(recurse=False):
        own = [(_join(path, name), [module.get_parameter(name)]) for path, module in modules]
        yield _row(own, "Parameter", level, owners)
    for group in _groups(modules):
        members = [(path, list(module.parameters())) for path, module in group]
        if any(parameters for _, parameters in members):
            inner = dict(owners)
            yield _row(members, type(group[0][1]).__name__, level, owners)
            yield from _rows(group, depth, level + 1, inner)


def _groups(modules: list[tuple[str, nn.Module]]) -> Iterator[list[tuple[str, nn.Module]]]:
    """The children, those with one place in all of ``modules`` together; runs of one shape together, too."""
    children = [list(module.named_children()) for _, module in modules]
    runs = groupby(enumerate(children[0]), key=lambda child: _shape(*child[1]))
    for _, run in runs:
        group = [
            (_join(path, own[place][0]), own[place][1])
            for place, _ in run
            for (path, _), own in zip(modules, children, strict=True)
        ]
        if isinstance(group[0][1], nn.ModuleList):
            yield from _groups(group)
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


def _row(members: list[tuple[str, list[nn.Parameter]]], kind: str, level: int, owners: dict[int, str]) -> ModuleRow:
    name = _span([path for path, _ in members])
    every = {id(parameter): parameter for _, parameters in members for parameter in parameters}
    own = [parameter for parameter in every.values() if id(parameter) not in owners]
    owners |= dict.fromkeys(map(id, own), name)
    return ModuleRow(
        name=name,
        kind=kind if len(members) == 1 else f"{len(members)}x {kind}",
        parameters=sum(map(_elements, own)),
        trained=sum(_elements(parameter) for parameter in own if parameter.requires_grad),
        shared=sum(map(_elements, every.values())) - sum(map(_elements, own)),
        size=sum(_elements(parameter) * parameter.element_size() for parameter in own),
        dtypes=tuple(dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in every.values())),
        depth=level,
    )


def _elements(parameter: nn.Parameter) -> int:
    """Of the whole parameter, also where DeepSpeed's stage 3 has taken it apart."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _span(paths: list[str]) -> str:
    """``blocks.0-11.norm`` of ``blocks.0.norm`` to ``blocks.11.norm``."""
    first, last = paths[0].split("."), paths[-1].split(".")
    return ".".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))

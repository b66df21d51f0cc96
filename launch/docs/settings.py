"""The tables of settings in docs/reference.md, made of docstrings: of the dataclasses, and of what groups name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from distaccum.tools.settings import Setting, arguments, settings

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
MARKS = "<!-- {0}: made by python -m launch.docs -->", "<!-- {0} end -->"
MORE = {  # where a setting's page says more
    "batch.micro_tokens": "data.md#micro-batches-of-tokens",
    "batch.pad_rows": "data.md#one-shape",
    "checkpoint.background": "checkpoints.md#in-the-background",
    "compile": "performance.md#compiled-forwards",
    "compile.graphs": "performance.md#cuda-graphs",
    "data": "data.md",
    "deterministic": "precision.md#the-same-bits-again",
    "engine": "engines.md",
    "loss": "data.md#losses-in-chunks",
    "model": "models.md#the-gpt",
    "optim.groups": "trainer.md#parameter-groups",
    "precision": "precision.md",
    "precision.scaler.initial_scale_power": "precision.md#the-loss-scaler",
    "resume": "checkpoints.md#resuming",
    "resume_allow": "checkpoints.md#resuming",
    "schedule": "trainer.md#schedules",
    "eval.samples": "trainer.md#texts",
    "metrics.loggers": "trackers.md#a-tracker-of-your-own",
    "metrics.mlflow.enabled": "trackers.md",
    "metrics.report": "tools.md#report",
    "metrics.tensorboard.enabled": "trackers.md",
    "metrics.wandb.mode": "trackers.md",
    "metrics.windows": "tools.md#comparing-two-runs",
    "objective": "trackers.md#the-objective",
    "profile.steps": "performance.md#where-the-time-goes",
    "trainer.backend": "engines.md#over-gloo",
    "trainer.eval_samples": "trainer.md#evaluation-and-metrics",
    "trainer.hang_timeout": "cluster.md#ranks-that-stop",
    "trainer.max_steps": "trainer.md#evaluating-alone",
    "trainer.num_workers": "data.md#loading",
    "trainer.on_spike": "trainer.md#spikes",
    "trainer.verify": "verification.md",
}
FEW = 7  # settings of a part that stand with those of the run
_WORDS = {
    "list[str]": "list of texts",
    "list[int]": "list of whole numbers",
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true | false",
}


def tables() -> str:
    """All settings in Markdown: a table for the run, with parts of few settings, and one for each large part."""
    parts = groupby(settings(), lambda one: one.key.split(".")[0])
    named: dict[str, list[Setting]] = {}
    for part, those in parts:
        found = list(those)
        named.setdefault("The run" if len(found) < FEW else part, []).extend(found)
    return "\n\n".join(_table(part, those) for part, those in named.items())


def _table(part: str, those: Iterable[Setting]) -> str:
    heading = part if part == "The run" else f"`{part}`"
    rows = "\n".join(_rows(those))
    return f"### {heading}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _rows(those: Iterable[Setting]) -> Iterator[str]:
    for one in those:
        more = MORE.get(one.key)
        link = f" [More]({more})" if more else ""
        owners = f" Engines: {', '.join(f'`{name}`' for name in one.engines)}." if one.engines else ""
        default = f"`{one.default}`" if one.default else ""
        yield f"| `{one.key}` | {_type(one)} | {default} | {one.meaning}{owners}{link} |"


def _type(one: Setting) -> str:
    if one.group:
        return "one of the [groups](#groups)"
    kinds = [_WORDS.get(kind, kind) for kind in one.type.split(" | ")]
    words = {*one.choices, "null", "true", "false"}
    return _listed([f"`{kind}`" if kind in words else kind for kind in " | ".join(kinds).split(" | ")])


def _listed(parts: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def keys_of_choices() -> str:
    """What the choices of the groups take: a row for each key, and for each choice that has another one by its name.

    Arguments of another package's class, of which only the name is known, have a row together.
    """
    rows: dict[tuple[str, ...], list[str]] = {}  # with the choices that have the key
    for (files, meaning), those in groupby(arguments(), lambda one: (one.files, one.meaning)):
        found = list(those)
        together = [found] if re.fullmatch(r"Argument of `[\w.]+`\.", meaning) else [[one] for one in found]
        for keys in together:
            columns = zip(*((f"`{one.key}`", _type(one), _default(one.default)) for one in keys), strict=True)
            rows.setdefault((*map("; ".join, columns), meaning), []).extend(files)
    head = "| key | of | type | default | meaning |\n|---|---|---|---|---|\n"
    return head + "\n".join(
        f"| {key} | {_choices(files)} | {kind} | {default} | {meaning} |"
        for (key, kind, default, meaning), files in rows.items()
    )


def _choices(files: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in files)


def _default(default: str) -> str:
    return "required" if default == "???" else f"`{default}`"


def with_tables(page: str) -> str:
    """The page with the tables between their marks."""
    for name, made in (("settings", tables()), ("keys", keys_of_choices())):
        begin, end = (mark.format(name) for mark in MARKS)
        marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert len(marked.findall(page)) == 1, f"{PAGE.name} has the lines {begin} and {end} once"
        page = marked.sub(lambda _, text=f"{begin}\n\n{made}\n\n{end}": text, page)
    return page

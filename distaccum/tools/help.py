"""``distaccum train --help`` and ``distaccum plan --help``: usage, examples, and what the keys mean.

What is said of a key is its dataclass's docstring, or the comment beside it in ``conf/``. Loads no torch and no Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from distaccum import program
from distaccum.config.schema import conf_dir
from distaccum.errors import near_misses
from distaccum.tools.settings import Setting, arguments, groups, settings

_ALL = "all"
_INDENT = 6
_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w-]+):(?: (?P<value>.*?))?(?: +# (?P<said>.*))?")

_TRAIN = """\
usage: distaccum train [KEY=VALUE ...] [GROUP=CHOICE ...] [OPTIONS]
       torchrun --nproc-per-node=N -m distaccum train [...]

Trains what the settings describe, in this process or in as many as torchrun
starts: the gradient is that of the global batch on any number of them.

examples:
  distaccum train trainer.max_steps=50
  distaccum train model=cnn data=digits batch.global_size=64 optim.lr=1e-3
  distaccum train --check=8 engine=fsdp2          would it run on 8 processes?
  distaccum train --cfg job                       every setting with its value
  distaccum train -m optim.lr=1e-3,3e-3           a run for each
  torchrun --nproc-per-node=8 -m distaccum train engine=fsdp2 precision=bf16
  distaccum train resume=auto hydra.run.dir=runs/first     continue, or begin

options:
  --help [KEY]   this text; with a key or a group, what can be set there, as in
                 --help trainer; all of it with --help all
  --check[=N]    build everything for this launch, or for N processes, say what
                 was built, and start nothing
  --cfg job      print all settings as they are, and start nothing
  -m             a run for each combination of comma-separated values
  --KEY=VALUE    as KEY=VALUE, for the agents of sweeps
  -v             log what rank 0 does
  --version      the versions of distaccum, torch and Python
  --hydra-help   Hydra's own options (--config-dir, --config-name, --info, ...)

exit codes: 0 done, or saved to be continued; 2 the settings cannot work;
1 anything else
"""
_PLAN = """\
usage: distaccum plan [KEY=VALUE ...] [GROUP=CHOICE ...] [OPTIONS]

Forecasts what a run would hold, send and take on a cluster; trains nothing.
Prints tables, and writes plan.json and a plot.

examples:
  distaccum plan cluster.micro_step_ms=80
  distaccum plan engine=fsdp2 cluster.nodes=8 cluster.gpus=8 \\
      cluster.link_gbps=400 cluster.micro_step_ms=80
  distaccum plan experiment=gpt2-1.5b-openwebtext engine=fsdp2 \\
      data.path='shards/*.bin' cluster.memory_gib=80 cluster.micro_step_ms=200

options:
  --help [KEY]   this text; with a key or a group, what can be set there
  --cfg job      print all settings as they are
  --version      the versions of distaccum, torch and Python

exit codes: 0 done; 2 the settings cannot work
"""
_OFTEN = (
    "batch.global_size",
    "batch.micro_size",
    "optim.lr",
    "optim.clip_norm",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.num_workers",
    "checkpoint.every",
    "checkpoint.keep",
    "resume",
    "init_from",
    "seed",
    "metrics.wandb.mode",
)


def show(command: str, topic: str) -> int:
    """Prints the help of ``train`` or ``plan``, or of a key or group of settings; returns the exit code."""
    if not topic:
        program.say(overview(command))
        return 0
    text = about(command, topic)
    if text:
        program.say(text)
        return 0
    keys = [one.key for one in (*groups(), *settings())]
    above = (key.rpartition(".")[0] for key in keys)
    hint = near_misses(topic, dict.fromkeys([_ALL, *keys, *above])) or "."
    program.complain(
        f"distaccum {command}: --help {topic}: no such setting or group{hint} See distaccum {command} --help\n"
    )
    return 2


def overview(command: str) -> str:
    """The usage, the groups with their choices, and the settings that are changed most."""
    chosen = "".join(_group(one) for one in groups())
    if command == "plan":
        own = "".join(line.text() for line in _plan_lines())
        return f"{_PLAN}\nsettings of its own:\n{own}\nand those of a run:\n\ngroups, the default first:\n{chosen}"
    often = {one.key: one for one in settings()}
    run_dir = _setting("hydra.run.dir", "path", "runs/TIMESTAMP-XXXX", "the run directory; resume=auto names it alike.")
    most = "".join(_of(often[key]) for key in _OFTEN) + run_dir
    return f"{_TRAIN}\ngroups, the default first:\n{chosen}\nsettings that are changed most:\n{most}"


def about(command: str, topic: str) -> str:
    """What can be set under a key or in a group; empty where there is nothing of that name."""
    found = [one for one in groups() if topic in (one.key, _ALL)]
    inner = [one for one in settings() if not one.group and (topic == _ALL or _is_below(one.key, topic))]
    text = "".join(_group(one) for one in found) + "".join(_of(one) for one in inner)
    for one in found:
        if not any(_is_below(setting.key, one.key) and setting.key != one.key for setting in settings()):
            text += "".join(_choice(one.key, name) for name in one.choices)
    if not text:
        text = "".join(_of(one) for one in arguments() if _is_below(one.key, topic))
    if command == "plan":
        text += "".join(line.text() for line in _plan_lines() if topic == _ALL or _is_below(line.key, topic))
    return text


def _is_below(key: str, topic: str) -> bool:
    return key == topic or key.startswith(f"{topic}.")


def _group(one: Setting) -> str:
    indent = max(16, len(one.key) + 4)
    choices = program.wrapped(f"  {one.key}".ljust(indent) + ", ".join(one.choices), indent)
    return choices + program.wrapped(" " * indent + _plain(one.meaning), indent)


def _of(one: Setting) -> str:
    of = f"; engine={' or '.join(one.engines)}" if one.engines else ""
    of += f"; {one.key.partition('.')[0]}={' or '.join(one.files)}" if one.files else ""
    return _setting(one.key, one.type, f"{one.default or 'of the group'}{of}", one.meaning)


def _setting(key: str, kind: str, default: str, meaning: str) -> str:
    head = program.wrapped(f"  {key}  ({kind}; default {default})", _INDENT)
    return head + program.wrapped(" " * _INDENT + _plain(meaning), _INDENT)


def _plain(meaning: str) -> str:
    return meaning.replace("`", "")


@dataclass(frozen=True)
class _Line:
    """A line of a file in ``conf/``: a key, its value, and the comment beside it."""

    key: str
    value: str
    said: str

    def text(self) -> str:
        """As the help shows it."""
        shown = program.wrapped(f"  {self.key}={self.value}", _INDENT)
        return shown + (program.wrapped(" " * _INDENT + self.said, _INDENT) if self.said else "")


def _choice(group: str, name: str) -> str:
    """A file of a group: what its first line says, and its keys."""
    path = conf_dir() / group / f"{name}.yaml"
    said = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
    head = program.wrapped(f"{group}={name}" + (f": {' '.join(said)}" if said else ""), 2)
    told = {one.key: _plain(one.meaning) for one in arguments() if name in one.files}
    lines = _lines(path, group.replace("/", "."))
    return f"\n{head}" + "".join(replace(line, said=line.said or told.get(line.key, "")).text() for line in lines)


def _lines(path: Path, prefix: str) -> Iterator[_Line]:
    """The keys of a file that have a value, with the comments beside them."""
    above: list[tuple[int, str]] = [(-1, prefix)]
    for line in path.read_text().splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        depth = len(found["indent"])
        while above[-1][0] >= depth:
            above.pop()
        key = ".".join(filter(None, (above[-1][1], found["key"])))
        if found["value"]:
            yield _Line(key, found["value"], found["said"] or "")
        above.append((depth, key))


def _plan_lines() -> list[_Line]:
    """The settings of ``distaccum plan`` alone."""
    return [line for line in _lines(conf_dir() / "plan.yaml", "") if line.key.startswith(("cluster.", "plan."))]

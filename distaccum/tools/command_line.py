"""The command line as people and agents of sweeps type it: settings as flags, and what is said of one that is wrong.

Both know which settings there are from what the groups compose. A run reaches them by their names in ``program.py``.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distaccum.config.command_line import register_aliases, take_flag
from distaccum.config.engine import ENGINES
from distaccum.config.extras import install_command
from distaccum.config.instantiate import signature_of, target_of
from distaccum.config.schema import RunConfig, conf_dir, dotted, translate, unknown_key
from distaccum.errors import ConfigError, near_misses, shorten
from distaccum.tools.other_names import of_another_library
from distaccum.tools.own_files import of_a_python_file

# The configuration that a command line's groups compose: which settings there are, for suggestions.

_CHOICE = re.compile(r"\+?([\w/@-]+)=['\"]?([\w.@-]+)")
_MOST = 12  # arguments of a target that a message lists


@dataclass(frozen=True)
class Composed:
    """What the chosen groups hold, with none of the overrides of single settings.

    ``groups`` are the names of all groups, ``choices`` those that are chosen.
    """

    node: DictConfig
    groups: frozenset[str]
    choices: dict[str, str]

    def settings(self) -> list[str]:
        """The dotted names of all settings."""
        return dotted(OmegaConf.to_container(self.node, resolve=False))

    def __contains__(self, key: str) -> bool:
        return key in self.groups or key in self.settings() or key.startswith("hydra.")

    def value(self, key: str) -> Any:
        """The value of a setting, or None."""
        return OmegaConf.select(self.node, key, throw_on_missing=False)

    def unknown(self, key: str, value: object) -> ConfigError:
        """The error for a setting that is not there: of another choice, of the ``_target_`` around it, or misspelt."""
        if named := of_another_library(key, value):
            return named
        group, _, rest = key.partition(".")
        engine = self.choices.get("engine", "")
        if group == "engine" and rest and engine in ENGINES:
            return unknown_key(key, value, engine)
        parent, _, last = key.rpartition(".")
        around = OmegaConf.select(self.node, parent) if parent else None
        target = around.get("_target_") if isinstance(around, DictConfig) else None
        takes = _arguments(parent, str(target)) if target is not None else []
        if last in takes:
            problem = f"not stated in the configuration, but {target} takes it"
            return ConfigError(key, value, problem, f"Add it with +{key}={'VALUE' if value is None else value}")
        chosen = self.choices.get(group)
        others = [name for name in _choices_with(group, rest) if name != chosen] if rest and chosen else []
        if others and rest not in self._below(group):
            problem = f"a setting of {group}={shorten(others, 1)}, not of {group}={chosen}"
            return ConfigError(key, value, problem, f"Use {group}={others[0]}, or leave it out")
        if target is None or around is None:
            return unknown_key(key, value, engine, self.settings())
        hint = near_misses(last, {*map(str, around), *takes})
        return ConfigError(key, value, f"no such setting{hint}", f"{target} takes {shorten(takes, _MOST)}")

    def _below(self, group: str) -> list[str]:
        return [key.removeprefix(f"{group}.") for key in self.settings() if key.startswith(f"{group}.")]


def composed(arguments: Sequence[str], name: str = "config") -> Composed | None:
    """Composes the file ``conf/NAME.yaml`` with the choices of groups among ``arguments`` that there are.

    None where even that cannot be composed: Hydra's own error says why.
    """
    given, _ = get_args_parser().parse_known_args(list(arguments))
    try:
        with _loader(given) as loader:
            groups = frozenset(_groups(loader))
            chosen = [choice for override in given.overrides if (choice := _choice(override, loader, groups))]
            chosen += [override for override in given.overrides if override.startswith("hydra.searchpath=")]
            node = loader.load_configuration(given.config_name or name, chosen, run_mode=RunMode.RUN)
            choices = {str(group): str(choice) for group, choice in node.hydra.runtime.choices.items()}
            OmegaConf.set_struct(node, False)
            del node["hydra"]
            return Composed(node, groups, choices)
    except Exception:  # of many kinds: this is a look ahead, and what is wrong is said by who composes in earnest
        return None


@contextmanager
def _loader(given: Any) -> Iterator[ConfigLoaderImpl]:
    """Hydra's loader, of the folders that the parsed command line names."""
    with initialize_config_dir(str(Path(given.config_path or conf_dir()).resolve()), version_base="1.3"):
        path = GlobalHydra.instance().config_loader().get_search_path()
        if given.config_dir:
            path.prepend(provider="command-line", path=f"file://{Path(given.config_dir).resolve()}")
        yield ConfigLoaderImpl(path)


def _groups(loader: Any, parent: str = "") -> Iterator[str]:
    for found in loader.list_groups(parent):
        group = f"{parent}/{found}" if parent else found
        yield group
        yield from _groups(loader, group)


def _choice(override: str, loader: Any, groups: frozenset[str]) -> str | None:
    """The override, or the first choice of a sweep; None where it chooses nothing that there is."""
    found = _CHOICE.match(override)
    if found is None or found[1].partition("@")[0] not in groups:
        return None
    known = loader.get_group_options(found[1].partition("@")[0])
    return found[0].replace("'", "").replace('"', "") if found[2] in known else None


def _choices_with(group: str, setting: str) -> list[str]:
    """The files of a group that state a setting."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return [file.stem for file in files if setting in dotted(OmegaConf.to_container(OmegaConf.load(file)))]


def _arguments(key: str, target: str) -> list[str]:
    try:
        return list(signature_of(target_of(key, {"_target_": target})))
    except ConfigError:
        return []


# Settings as flags, ``--optim.lr=0.01``.

_NEGATIVE = re.compile(r"-[\d.]")
_TRUTH = ("true", "false", "True", "False")


def flags_as_settings(
    arguments: Sequence[str], own: Sequence[str] = (), *, compose: Callable[[Sequence[str]], Composed | None] = composed
) -> list[str]:
    """Makes ``--optim.lr=0.01`` and ``--optim.lr 0.01`` into ``optim.lr=0.01``, as agents of sweeps write settings.

    Args:
        arguments: the command line.
        own: flags of distaccum that Hydra does not know; like Hydra's own they stay as they are.
        compose: the configuration that the other arguments choose; called where there is such a flag.

    Raises:
        ConfigError: a flag that is neither Hydra's nor ``own``, and no setting of the composed configuration; or a
            setting is taken out, as ``~optim.clip_norm``, and its default would count in its place.
    """
    for argument in arguments:
        if argument.startswith("~"):
            _refuse_taking_out(argument)
        if error := of_a_python_file(*argument.partition("=")[::2]):
            raise error
    options = get_args_parser()._option_string_actions  # argparse has no public name for them
    changed: list[str] = []
    flags: list[int] = []  # where a flag stands that may be a setting
    given = list(arguments)
    while given:
        argument = given.pop(0)
        flag = argument.partition("=")[0]
        changed.append(argument)
        if not argument.startswith("-") or _NEGATIVE.match(argument):
            continue
        if flag in own or _is_hydras(flag, options):
            if flag in options and options[flag].nargs is None and "=" not in argument and given:
                changed.append(given.pop(0))  # its value
            continue
        flags.append(len(changed) - 1)
    if not flags:
        return changed
    others = [argument for i, argument in enumerate(changed) if i not in flags]
    there = compose(others)
    made: list[str] = []
    i = 0
    while i < len(changed):
        following = changed[i + 1] if i + 1 < len(changed) and i + 1 not in flags else None
        if i not in flags:
            made.append(changed[i])
        elif there is None:  # Hydra says what is wrong with the others
            made.append(changed[i].lstrip("-"))
        else:
            setting, took = _setting(changed[i], following, there, [*options, *own])
            made.append(setting)
            i += took
        i += 1
    return made


def _refuse_taking_out(argument: str) -> None:
    """Without its key the printed configuration says nothing of a setting, and the run takes the schema's default."""
    key, _, value = argument[1:].partition("=")
    group, _, rest = key.partition(".")
    nodes = [
        asdict(RunConfig().with_schedule(own_optimizer=False)),
        *({"engine": asdict(engine())} for engine in ENGINES.values()),
    ]
    found = [default for node in nodes if (default := _value_of(node, key)) not in (None, {}, [])]
    if not found:
        return
    is_group = not rest and (conf_dir() / group).is_dir()
    default = "its defaults" if isinstance(found[0], dict) else f"its default, {found[0]},"
    choices = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    remedy = f"Choose one of {group}={'|'.join(choices)}" if is_group else f"Write {key}=null where that turns it off"
    raise ConfigError(f"~{key}", value or None, f"takes the setting out, and {default} would count", remedy)


def _value_of(node: Any, key: str) -> Any:
    """The default of a setting; None of a target's argument, for which the target's own default counts."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) and "_target_" not in node else None
    return node


def _is_hydras(flag: str, options: Mapping[str, object]) -> bool:
    """Whether it is an option of Hydra's, or the beginning of one, as argparse takes it; a group's name is none."""
    if flag.startswith("--"):
        return not (flag not in options and (conf_dir() / flag[2:]).is_dir()) and any(
            option.startswith(flag) for option in options
        )
    return any(flag.startswith(option) for option in options if not option.startswith("--"))


def _setting(argument: str, following: str | None, there: Composed, flags: Sequence[str]) -> tuple[str, bool]:
    """The override for a flag, and whether it takes the word that follows it as its value."""
    flag, has_value, value = argument.partition("=")
    key = flag.lstrip("-")
    if key not in there:
        raise _unknown(flag, value if has_value else None, there, flags)
    if has_value:
        return f"{key}={value}", False
    if isinstance(there.value(key), bool) and following not in _TRUTH:
        return f"{key}=true", False
    if following is None or "=" in following or following.startswith("--"):
        raise ConfigError(flag, None, "has no value", f"Write {flag}=VALUE")
    return f"{key}={following}", True


def _unknown(flag: str, value: str | None, there: Composed, flags: Sequence[str]) -> ConfigError:
    key = flag.lstrip("-")
    if named := of_another_library(flag, value):
        return named
    if key.partition(".")[0] in there:
        error = there.unknown(key, value)
        return ConfigError(flag, value, error.problem, error.remedy)
    hint = near_misses(flag, [*flags, *(f"--{name}" for name in there.settings())])
    return ConfigError(flag, value, f"no such flag or setting{hint}", "`--help` says which there are")


# A mistake that is seen before torch is imported, which takes most of the time until an answer.


def refused(arguments: Sequence[str]) -> ConfigError | None:
    """What is wrong with a command line of the main job, as far as composing it tells; None leaves it to who runs it.

    It is composed only where it has a key or a choice that no file of ``conf/`` has: that takes a third of a second.
    """
    given, _ = take_flag(arguments, "-v", "--check")
    left = any(argument in ("-m", "--multirun") or argument.startswith(_LEFT) for argument in given)
    if left or not any(map(_is_suspect, given)):
        return None
    try:
        with redirect_stderr(io.StringIO()):  # argparse's usage
            settings = register_aliases(flags_as_settings(given))
            known, _ = get_args_parser().parse_known_args(settings)
        with _loader(known) as loader:
            loader.load_configuration(known.config_name or "config", known.overrides, run_mode=RunMode.RUN)
    except ConfigError as error:
        return error
    except (HydraException, SystemExit) as error:
        return from_hydra(error, arguments)
    except Exception:  # of another kind: said by who composes in earnest
        return None
    return None


_LEFT = ("hydra.run.dir=", "hydra.sweep.dir=", "hydra/", "hydra.mode=")  # a status is written there, or many jobs
_PLAIN = re.compile(r"[A-Za-z_][\w.]*=")


def _is_suspect(argument: str) -> bool:
    if argument.startswith(("--", "~")):
        return True
    if not _PLAIN.match(argument):
        return False
    key, _, value = argument.partition("=")
    if key != "precision" and (conf_dir() / key).is_dir():
        words = re.findall(r"[\w.-]+", value)
        return not all(word == "null" or (conf_dir() / key / f"{word}.yaml").exists() for word in words)
    return not key.startswith("hydra.") and key not in _known()


@cache
def _known() -> frozenset[str]:
    """The names of the settings that the schema of an editor lists."""
    node = json.loads((conf_dir() / "settings.schema.json").read_text())
    return frozenset(_names(node, ""))


def _names(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for inner in (node, *node.get("anyOf", ())):
        for name, below in inner.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from _names(below, f"{prefix}{name}.")


# Hydra's errors as ConfigError: key, value, problem, remedy.


def from_hydra(error: BaseException, arguments: Sequence[str], name: str = "config") -> ConfigError:
    """The ConfigError for an error that Hydra raised while it composed ``arguments`` over ``conf/NAME.yaml``."""
    given = dict(argument.lstrip("+~").split("=", 1) for argument in arguments if "=" in argument)
    message = str(error).strip()
    match error:
        case SystemExit():
            said = _said_by_argparse(arguments)
            return ConfigError("command line", None, said, "`--help` says which flags there are")
        case MissingConfigException():
            return _no_such_option(error, message)
        case OSError():
            path, problem = error.filename or given.get("hydra.run.dir"), f"cannot be written ({error.strerror})"
            return ConfigError("hydra.run.dir", path, problem, "Choose a writable folder")
    found = _of_an_override(message, given, arguments, name)
    causes = [translate(one) for one in (error, error.__cause__) if isinstance(one, OmegaConfBaseException)]
    if isinstance(error, OverrideParseException) and found is None:
        remedy = "Write overrides as key=value, and quote what holds spaces, commas, brackets or umlauts"
        return ConfigError("command line", error.override, message.splitlines()[0], remedy)
    others = ConfigError("command line", None, message.replace("\n", " "), "Correct the overrides")
    return found or next(iter(causes), others)


def _of_an_override(message: str, given: Mapping[str, str], arguments: Sequence[str], name: str) -> ConfigError | None:
    """The error that Hydra's message blames on one override; None where it names none."""
    if found := re.match(r"Ambiguous value for argument '([^=]+)=(.*?)'$", message, re.MULTILINE):
        remedy = "Write a point in a number, key=[1,2] for a list, or -m before a sweep"
        return ConfigError(found[1].lstrip("+"), found[2], "several values, as a sweep has them", remedy)
    if found := re.match(r"Could not override '([^']+)'", message):
        key = found[1].split("@")[0]
        there, engine = composed(arguments, name), given.get("engine", RunConfig().engine.name)
        value = given.get(key)
        return unknown_key(key, value, engine) if there is None else there.unknown(key, value)
    if found := re.match(r"Interpolation key '([^']+)' not found", message):
        for key, value in given.items():
            if f"${{{found[1]}}}" in value:
                return ConfigError(key, value, "names no setting", "Name one that there is, as ${optim.lr}")
    return None


def _said_by_argparse(arguments: Sequence[str]) -> str:
    with redirect_stderr(io.StringIO()) as said, suppress(SystemExit):
        get_args_parser().parse_args(list(arguments))
    return said.getvalue().rpartition("error: ")[2].strip() or "cannot be read"


def _no_such_option(error: MissingConfigException, message: str) -> ConfigError:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = list(error.options or sorted(file.stem for file in (conf_dir() / group).glob("*.yaml")))  # none in lists
    if group == "hydra/launcher" and option.startswith("submitit"):
        return ConfigError(
            group, option, "Hydra's submitit launcher is not installed", f"Run {install_command('slurm')}"
        )
    if (group, option) == ("hydra/sweeper", "optuna"):
        return ConfigError(group, option, "Hydra's Optuna sweeper is not installed", f"Run {install_command('sweep')}")
    if not group:
        return ConfigError("command line", error.missing_cfg_file, message.splitlines()[0], "Give a config that exists")
    return ConfigError(
        group, option, f"no such choice{near_misses(option, options)}", f"Use one of {', '.join(options)}"
    )

"""Settings are described as they are: the JSON schema, what is refused, and what is used when nothing is said."""

import json
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from distaccum.config.engine import ENGINES
from distaccum.config.schema import RunConfig, conf_dir
from distaccum.errors import ConfigError
from distaccum.tools.settings import Setting, groups, meanings, settings

SCHEMA = Draft7Validator(json.loads((conf_dir() / "settings.schema.json").read_text()))


def _wrong(content: Any) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in SCHEMA.iter_errors(content)]


@pytest.mark.parametrize("file", sorted((conf_dir() / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_is_right(file: Path) -> None:
    assert _wrong(OmegaConf.to_container(OmegaConf.load(file))) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", [one.key for one in settings() if one.group])
def test_what_any_choice_composes_is_right(group: str) -> None:
    OmegaConf.register_new_resolver("distaccum.run_name", lambda *_: "run", replace=True)
    for file in sorted((conf_dir() / group).glob("*.yaml")):
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", [f"{group}={file.stem}"])
        assert _wrong(OmegaConf.to_container(composed)) == [], file


@pytest.mark.parametrize(
    "content",
    [
        {"optim": {"lrr": 1}},
        {"batch": {"global_size": "many"}},
        {"trainer": {"nonfinite": "go"}},
        {"engine": {"name": "fsdp2", "sync": "often"}},
        {"metrics": {"wandb": {"mode": "on"}}},
    ],
)
def test_what_is_refused_is_wrong(content: dict[str, Any]) -> None:
    assert len(_wrong(content)) == 1
    with pytest.raises(ConfigError):
        RunConfig.from_dict(content)


def test_every_setting_has_its_meaning_there() -> None:
    for one in settings():
        node: Any = SCHEMA.schema
        for part in one.key.split("."):
            node = node["properties"][part]
        assert node["description"]


OWN = {one.key: one for one in settings() if not one.group}
GROUPS = {one.key: one for one in groups()}
CONF = Path(__file__).parents[2] / "conf"


def _homes() -> dict[str, Any]:
    """The settings of each key as the dataclasses make them, an engine's under ``NAME:engine``."""
    found: dict[str, Any] = {"": RunConfig()} | {f"{name}:engine": kind() for name, kind in ENGINES.items()}
    for key in OWN:
        prefix = key.rpartition(".")[0]
        if prefix not in found and prefix != "engine":
            found[prefix] = _of(RunConfig(), prefix)
    return found


def _of(value: Any, key: str) -> Any:
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _home(one: Setting) -> tuple[Any, str]:
    """The dataclass that has the setting, made, and the setting's name in it."""
    prefix, _, name = one.key.rpartition(".")
    return HOMES[f"{one.engines[0]}:engine" if one.engines else prefix], name


HOMES = _homes()
TYPED = {"true": True, "false": False, "0": 0, "1": 1, "2": 2, "3": 3}  # words that YAML reads as something else


def test_every_field_is_described_once() -> None:
    """Walked here by hand: the fields of the dataclasses, and of the engines'."""

    def walk(value: Any, prefix: str) -> set[str]:
        found = set()
        for one in fields(value):
            inner, key = getattr(value, one.name), f"{prefix}{one.name}"
            found |= walk(inner, f"{key}.") if is_dataclass(inner) else {key}
        return found

    expected = walk(RunConfig(), "") | {key for kind in ENGINES.values() for key in walk(kind(), "engine.")}
    expected -= {"engine.name", "precision.name", "compile.name"}  # the groups' own choices
    assert sorted(one.key for one in settings()) == sorted({*expected, *GROUPS} - {"experiment", "hydra/launcher"})


def test_the_default_is_what_holds_when_nothing_is_said() -> None:
    for one in OWN.values():
        home, name = _home(one)
        held = getattr(home, name)
        by_kind = {dict: "", type(None): "null", bool: str(held).lower()}
        assert one.default == by_kind.get(type(held), str(held)), one.key


# Without which a setting of a part would change nothing, and is refused.
NEEDED = {"compile": {"name": "blocks"}, "profile": {"steps": [1, 2]}}


def test_a_setting_takes_its_choices_and_refuses_another_word_with_the_same_ones() -> None:
    listed = 0
    for one in OWN.values():
        home, name = _home(one)
        for word in one.choices:
            needed = NEEDED.get(one.key.partition(".")[0], {})
            made = replace(home, **needed | {name: TYPED.get(word, word)})
            assert getattr(made, name) == TYPED.get(word, word), one.key
        if one.type in ("bool", "bool | null") or not one.choices or "path" in one.type:
            continue
        with pytest.raises(ConfigError) as refused:
            replace(home, **{name: "no-such-word"})
        if words := re.search(r"Use (?:one of )?([\w-]+(?:(?:, | or )[\w-]+)*)$", str(refused.value)):
            assert sorted(re.split(", | or ", words[1].lower())) == sorted(one.choices), one.key
            listed += 1
    assert listed >= 14


@pytest.mark.parametrize("one", GROUPS.values(), ids=lambda one: one.key)
def test_the_choices_of_a_group_are_its_files(one: Setting) -> None:
    assert set(one.choices) == {path.stem for path in (CONF / one.key).glob("*.yaml")}
    listed = re.findall(r"^  - ([\w/]+): (\w+)", (CONF / "config.yaml").read_text(), re.MULTILINE)
    assert one.default == dict(listed).get(one.key, "null")


def test_a_meaning_is_one_line_that_stands_by_itself() -> None:
    for one in (*settings(), *groups()):
        assert one.meaning.endswith((".", ")")), one.key
        assert "\n" not in one.meaning
        assert "``" not in one.meaning
        assert one.meaning.count("`") % 2 == 0, one.key


def test_a_docstring_is_read_with_its_types_and_continued_lines() -> None:
    @dataclass
    class Base:
        """A base.

        Args:
            one: of the base.
            two: of the base, too.
        """

    @dataclass
    class Child(Base):
        """A child.

        Args:
            two (a | b): ``a``, or
                else b.

        Raises:
            ValueError: not an argument: this is.
        """

    assert meanings(Child) == {"one": ("", "of the base."), "two": ("a | b", "`a`, or else b.")}


def test_a_setting_without_a_meaning_is_named() -> None:
    @dataclass
    class Broken:
        """Args:

        Args:
            one means nothing
        """

    with pytest.raises(LookupError, match="Broken: 'one means nothing' is not of the form"):
        meanings(Broken)

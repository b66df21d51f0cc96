"""The shape of the house: imports point down, each room keeps to its job."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distaccum
from distaccum.config.engine import ENGINES

PACKAGE = Path(__file__).parents[2] / "distaccum"

# From top to bottom; a room may import from the lines below its own, and from its own.
FLOORS = (
    {"train"},
    {"run_job", "node_job"},
    {"trainer"},
    {"training"},
    {"loop", "report", "resume", "origin", "export"},
    {"accumulator"},
    {"functional"},
    {"build"},
    {"attempts"},
    {"evaluate", "callbacks", "diagnose"},
    {"checkpoint", "metrics", "open_window"},
    {"data", "models"},
    {"window"},
    {"engines"},
    {"deepspeed_json"},
    {"precision", "loss", "transformers_loss", "schedule", "prefetch", "batch_statistics", "optim"},
    {"agreement", "compose_errors", "testing", "nodes"},
    {
        "world",
        "normaliser",
        "batch_plan",
        "token_plan",
        "stream_plan",
        "shuffle",
        "config",
        "run_dir",
        "clocks",
        "forecast",
    },
    {"files", "precision_config", "engine_config", "host_copy", "durations", "deadline", "signals", "meeting"},
    {"checks"},
    {"errors"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "distaccum":
            yield from (f"distaccum.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_down(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        return
    used = {name.split(".")[1] for name in _imports(_parse(path)) if name.startswith("distaccum.")}
    upward = {other for other in used if FLOOR[other] < FLOOR[room]}
    assert not upward, f"{room} imports from above itself: {upward}"


def test_the_package_itself_imports_nothing_before_it_is_asked() -> None:
    """Type checkers see the names at once; a program imports a name's home when it first uses it."""
    tree = _parse(PACKAGE / "__init__.py")
    (unseen,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    shown = {
        alias.asname: node.module for node in unseen.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    tree.body.remove(unseen)
    assert set(_imports(tree)) == {"importlib", "typing"}
    assert shown == distaccum._HOMES
    for name, home in shown.items():
        assert getattr(distaccum, str(name)).__module__ == home
    with pytest.raises(AttributeError, match="'distaccum' has no attribute 'nothing'"):
        _ = distaccum.nothing


def test_every_room_has_a_floor() -> None:
    assert {_room(path) for path in FILES} - {"__init__"} == set(FLOOR)


def _users_of(library: str) -> set[str]:
    return {_name(path) for path in FILES if any(name.split(".")[0] == library for name in _imports(_parse(path)))}


def test_libraries_stay_in_their_rooms() -> None:
    assert _users_of("omegaconf") == {"config.py", "compose_errors.py", "train.py"}
    assert _users_of("hydra") == {"nodes.py", "compose_errors.py", "train.py", "node_job.py"}
    assert _users_of("wandb") == {"metrics/wandb_sink.py"}
    assert _users_of("safetensors") == {"checkpoint/tensors.py"}
    assert _users_of("datasets") == {"data/adopt.py"}
    assert _users_of("pytest") == {"testing/fixtures.py"}


def test_the_plan_is_pure() -> None:
    pure = ("batch_plan", "token_plan", "stream_plan", "shuffle", "schedule", "config", "precision_config", "clocks")
    pure += ("engine_config", "deepspeed_json", "forecast")
    for path in (path for path in FILES if _room(path) in pure):
        assert not {"torch", "deepspeed"} & {module.split(".")[0] for module in _imports(_parse(path))}, path


def test_engines_are_named_in_the_composition_root_only() -> None:
    shared = {"base", "guard", "shards"}
    users: dict[str, set[str]] = {}
    for path in FILES:
        for module in _imports(_parse(path)):
            if module.startswith("distaccum.engines.") and _room(path) != "engines":
                users.setdefault(module.rsplit(".", 1)[1], set()).add(_name(path))
    assert users.pop("entries") == {"build.py"}
    assert users.keys() == shared


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_code_outside_asks_for_an_engine_by_its_name(path: Path) -> None:
    """Names in docstrings are for people; what decides by one belongs to the engines and their settings."""
    if _room(path) in ("engines", "engine_config", "build") or _room(path) == "deepspeed_json":
        return
    tree = _parse(path)
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
    words = {c.value for node in asked for c in ast.walk(node) if isinstance(c, ast.Constant)}
    assert not words & set(ENGINES)
    if _room(path) not in ("config", "accumulator", "functional"):  # where "ddp" is what is taken by default
        assert not {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & set(ENGINES)


def test_the_update_fits_on_one_screen() -> None:
    tree = _parse(PACKAGE / "window.py")
    (run_window,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run_window")
    assert run_window.end_lineno is not None
    assert run_window.end_lineno - run_window.lineno < 40


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_environment_writes_no_globals_no_type_questions(path: Path) -> None:
    for node in ast.walk(_parse(path)):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert ast.unparse(node.value) != "os.environ"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("os.putenv", "os.environ.update", "os.environ.setdefault")
            if called == "isinstance":
                assert "Engine" not in ast.unparse(node.args[1])


def test_public_things_say_what_they_are() -> None:
    silent = []
    for path in FILES:
        tree = _parse(path)
        nodes = [tree] if path.name != "__main__.py" else []
        nodes += [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        for node in nodes:
            public = not getattr(node, "name", "").startswith("_")
            if public and not ast.get_docstring(node):
                silent.append(f"{_name(path)}:{getattr(node, 'name', 'module')}")
    assert not silent

"""The settings as a JSON schema, by which an editor completes and checks the keys of a YAML file of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distaccum.config.schema import conf_dir
from distaccum.tools.settings import Setting, settings

FILE: Path = conf_dir() / "settings.schema.json"
_KINDS: dict[str, dict[str, Any]] = {
    "bool": {"type": "boolean"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "path": {"type": "string"},
    "size": {"type": ["string", "integer"]},
    "duration": {"type": ["string", "number"]},
    "mapping": {"type": "object"},
    "null": {"type": "null"},
    "true": {"const": True},
    "false": {"const": False},
    "list[int]": {"type": "array", "items": {"type": "integer"}},
    "list[str]": {"type": "array", "items": {"type": "string"}},
    "list of mappings": {"type": "array", "items": {"type": "object"}},
}
_ALSO: dict[str, list[dict[str, Any]]] = {  # what conf/ states for it
    "batch.micro_size": [{"const": "auto"}, {"type": "null"}]
}
_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def schema() -> str:
    """The schema, as the file has it; with what an experiment has beside the settings, ``defaults`` and ``hydra``."""
    root = _object({"defaults": {"type": "array"}, "hydra": {"type": "object"}})
    for one in settings():
        *parts, name = one.key.split(".")
        place = root
        for part in parts:
            place = place["properties"].setdefault(part, _object({}))
        if one.group:
            place["properties"].setdefault(name, _object({"name": {"enum": list(one.choices)}}))
            place["properties"][name] |= {"description": one.meaning}
            if not any(other.key.startswith(f"{one.key}.") for other in settings()):
                place["properties"][name] = {"type": "object", "description": one.meaning}
        else:
            found = place["properties"].setdefault(name, {"anyOf": [], "description": one.meaning})
            found["anyOf"] += [kind for kind in (*_alternatives(one), _INTERPOLATION) if kind not in found["anyOf"]]
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Settings of distaccum"}
    return json.dumps(head | root, indent=1) + "\n"


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _alternatives(one: Setting) -> list[dict[str, Any]]:
    kinds = [_KINDS.get(kind, {"const": int(kind) if kind.isdecimal() else kind}) for kind in one.type.split(" | ")]
    return kinds + _ALSO.get(one.key, [])

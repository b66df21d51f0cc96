"""Secrets in settings: known by their key or by their form, and replaced in everything that a run writes.

What is used keeps its value. Replaced are strings and numbers under keys such as ``api_key``, ``hf_token`` or
``password``, strings of known forms (``hf_...``, ``sk-...``, ``AKIA...``, a URL's password, ...), and wherever they
appear, the values of environment variables with such names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

REDACTED = "<redacted>"
_SHORTEST = 8  # of a value that is looked for in other texts; a shorter one would be found in innocent words
_KEY = re.compile(
    r"(api|access|private|storage|account)_?key|secret|passw(or)?d|passphrase|pwd|credential|token|(?<![a-z])auth(?!or)|"
    r"bearer|webhook|cookie",
    re.IGNORECASE,
)
_PATHS = ("PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY")  # of every shell
# What language models call tokens: settings, and not secrets.
_INNOCENT = re.compile(
    r"tokens|tokeni[sz]|token_?(id|type|dim|embed|count|budget|limit|weight|drop)|(max|min|num|n|per|batch|"
    r"bos|eos|pad|unk|mask|sep|cls|start|end|stop|special|image|audio|video|ignore|new|decoder|prompt)_token",
    re.IGNORECASE,
)
_FORMS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|"
    r"github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|"
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
_PAIR = re.compile(r"""(?P<key>[\w.@/-]+)(?P<sign>\s*=\s*["']?|["']\s*:\s*["'])(?P<value>[^\s"',;)}\]]+)""")
_OVERRIDE = re.compile(r"[+~]*[\w.@/-]+=")


def is_secret(key: str) -> bool:
    """Whether a setting of this name holds a secret; of a dotted name, the last part decides."""
    name = key.replace("-", "_").rpartition(".")[2]
    return _KEY.search(_INNOCENT.sub("", name)) is not None


def values_of(settings: object, *, under: bool = False) -> Iterator[str]:
    """The secrets in nested settings, by their keys; ``under`` says that the key above was one."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from values_of(value, under=under or is_secret(str(key)))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from values_of(value, under=under)
    elif under and isinstance(settings, str | int | float) and not isinstance(settings, bool) and settings:
        yield str(settings)


def values_of_environment(environment: Mapping[str, str] = os.environ) -> set[str]:
    """The secrets among the environment variables, by their names."""
    return {value for name, value in environment.items() if is_secret(name) and name not in _PATHS}


def redact(settings: Any, values: Collection[str] = ()) -> Any:
    """A copy of nested settings without the secrets in them; ``values`` are known ones, from elsewhere."""
    return _redact(settings, {*values, *values_of(settings), *values_of_environment()}, under=False)


def redact_text(text: str, values: Collection[str] = ()) -> str:
    """A text, such as a traceback or a command line, without known secrets, forms of secrets, and ``key=secret``."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, REDACTED)
    return _PAIR.sub(_redact_pair, _FORMS.sub(REDACTED, text))


def _redact(settings: Any, values: Collection[str], *, under: bool) -> Any:
    if isinstance(settings, Mapping):
        return {key: _redact(value, values, under=under or is_secret(str(key))) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_redact(value, values, under=under) for value in settings]
    if not isinstance(settings, str):
        return REDACTED if under and isinstance(settings, int | float) and not isinstance(settings, bool) else settings
    override = _OVERRIDE.match(settings)
    if override and is_secret(override[0][:-1]):  # its value may have spaces
        return override[0] + REDACTED
    return REDACTED if under and settings else redact_text(settings, values)


def _redact_pair(found: re.Match[str]) -> str:
    value = REDACTED if is_secret(found["key"]) else found["value"]
    return f"{found['key']}{found['sign']}{value}"

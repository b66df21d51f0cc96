"""Where this machine gets its packages from, for a build that is to get them from there too."""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_INSIDE = Path("/mnt/host")  # where single files of the machine lie for a build


@dataclass
class PipSource:
    """A pip configuration, and the folders and files of this machine that it speaks of."""

    config: str
    mounts: dict[Path, Path] = field(default_factory=dict)  # here -> there


def pip_source(listing: str | None = None) -> PipSource:
    """This machine's pip configuration; ``listing`` is what ``pip config list`` says, asked for if not given."""
    if listing is None:
        command = [sys.executable, "-m", "pip", "config", "list"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    source = PipSource("")
    sections: dict[str, dict[str, str]] = defaultdict(dict)
    lines = [line.partition("=") for line in listing.splitlines() if "=" in line]
    for name, _, value in sorted(lines, key=lambda line: line[0].startswith(":env:")):  # variables win over files
        section, _, key = name.removeprefix(":env:").rpartition(".")
        words = [_reachable(word, source.mounts) for word in ast.literal_eval(value).split()]
        sections[section or "global"][key] = "\n    ".join(words)
    for section, values in sections.items():
        source.config += f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
    return source


def _reachable(word: str, mounts: dict[Path, Path]) -> str:
    """The word as it is to stand in the build's configuration; notes what has to be mounted for it."""
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute() or not path.exists():
        return word
    if path.is_file():  # not in its own place, where a package of the image may want to put another
        mounts[path] = _INSIDE / path.name
        return str(mounts[path])
    folder = path.parent if path.name == "simple" else path  # an index links to files beside it
    mounts[folder] = folder
    return word


def debian_mirror(suite: str) -> str | None:
    """The mirror that this machine's apt takes ``suite`` from; None if it does not."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [line.split()[1] for line in listed.splitlines() if line.split()[0] == suite]
    return found[0] if found else None


def apt_settings() -> str:
    """What this machine's apt is told about proxies and certificates."""
    dumped = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout  # noqa: S607
    words = ("proxy", "verify-", "cainfo")
    lines = [line for line in dumped.splitlines() if line.lower().startswith("acquire::http")]
    return "".join(f"{line}\n" for line in lines if any(word in line.lower() for word in words))


def proxies() -> dict[str, str]:
    """The proxy variables of this environment."""
    names = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    return {name: os.environ[name] for name in names if name in os.environ}

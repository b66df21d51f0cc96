"""``distaccum report RUN [RUN ...]``: one HTML file of a run, or of several laid over each other.

Exit codes: 0 written, 1 a file cannot be read or written, 2 a folder is no run.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from distaccum import program
from distaccum.errors import ConfigError
from distaccum.tools.arguments import Arguments
from distaccum.tools.report.page import page
from distaccum.tools.report.png import pictures
from distaccum.tools.report.read import read_runs

NAME = "report.html"
_EPILOG = """\
examples:
  distaccum report runs/NAME
  distaccum report runs/first runs/second -o compared.html
  distaccum report runs/sweep/*/ --png

exit codes: 0 written; 1 a file cannot be read or written; 2 a folder is no run
"""


def main() -> None:
    """Runs ``distaccum report``."""
    program.start()
    description = "One HTML file of a run, or of several; a browser opens it from disk."
    parser = Arguments("report", description, _EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory, as hydra.run.dir names it")
    output_help = f"default: RUN/{NAME}; of several runs ./{NAME}"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=output_help)
    parser.add_argument("--png", action="store_true", help="each chart as a picture beside it, too (extra: plot)")
    given = parser.of()
    try:
        runs = read_runs(given.runs)
        output = given.output or (runs[0].path / NAME if len(runs) == 1 else Path(NAME))
        drawn = pictures(runs, output) if given.png else {}
        write(output, page(runs).encode())
        for path, content in drawn.items():
            write(path, content)
    except ConfigError as error:
        program.complain(f"{parser.prog}: configuration error: {error}\n")
        sys.exit(2)
    except OSError as error:
        program.complain(f"{parser.prog}: {error.filename}: {error.strerror}\n")
        sys.exit(1)
    program.say("".join(f"{path}\n" for path in (output, *drawn)))


def write(path: Path, content: bytes) -> None:
    """Writes a file as a whole: who looks at it meanwhile sees the one before.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    temporary = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error


if __name__ == "__main__":
    main()

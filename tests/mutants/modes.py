"""Breaks what keeps the modes right, one way at a time: masters, the moving average, packed documents, adapters.

``python -m tests.mutants.modes [NAME]`` runs beside each mutant the test that notices it, in a copy of the package with
the mutant and in one without; it exits with 1 if a test passes with the mutant, or fails without.
"""

import subprocess
import sys
from collections.abc import Sequence

from tests.mutants import Mutant, package, read
from tests.support.commands import ROOT, environment

MUTANTS = read("modes")  # each with the test that notices it
LATE = ("TimeoutError", "Failed: Timeout")


def outcome(tests: Sequence[str], mutant: Mutant | None) -> tuple[int, str]:
    """pytest's exit code with a mutated copy of the package on its path (0: passed, 1: failed), and what it says."""
    with package([mutant]) as folder:
        (folder / "launch").symlink_to(ROOT / "launch")
        whole = ["-q", "-x", "-m", "", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", folder]
        command = [sys.executable, "-B", "-m", "pytest", *map(str, whole), *(str(folder / test) for test in tests)]
        given = environment(PYTHONPATH=str(folder))
        found = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
        return found.returncode, _reason(found.stdout + found.stderr)


def _reason(printed: str) -> str:
    """What failed first; or all, if nothing did."""
    return next((line[1:].strip() for line in printed.splitlines() if line.startswith("E ")), printed.strip())


def main(wanted: str = "") -> int:
    """How many mutants are not noticed, plus one if a test fails without any."""
    chosen = [mutant for mutant in MUTANTS if wanted in mutant.name]
    code, said = outcome(list(dict.fromkeys(mutant.where for mutant in chosen)), None)
    wrong = int(code != 0)
    print(f"{'FAILS' if code else 'passes'}  no mutant: {said}", flush=True)
    for mutant in chosen:
        code, said = outcome([mutant.where], mutant)
        fine = code == 1 and not said.startswith(LATE)  # no mutant hangs: that was the machine
        wrong += not fine
        print(f"{'caught' if fine else 'NOT CAUGHT'}  {mutant.name}: {said}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)

"""The command ``distaccum doctor``: its arguments, who looks at what, and its exit code."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distaccum import program
from distaccum.errors import ConfigError, near_misses
from distaccum.tools.arguments import Arguments
from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.here import ALL_S, BETWEEN, TITLES, here, import_all, own_name
from distaccum.tools.doctor.table import Examination, Section, show

if TYPE_CHECKING:
    from distaccum.distributed.environment import LaunchEnvironment
    from distaccum.tools.doctor.meeting import Meeting

_EPILOG = """\
examples:
  distaccum doctor
      this machine
  distaccum doctor --folder /scratch/$USER/runs
      with the disk that runs will go to
  torchrun --standalone --nproc-per-node=8 -m distaccum doctor
      and what its ranks do together
  srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \\
      --rdzv-endpoint=$FIRST_NODE:29400 -m distaccum doctor
      the nodes of a Slurm job
  distaccum doctor --json --only host,disk
      for a program

exit codes: 0 nothing is wrong; 1 something is; 2 bad arguments
"""
_INTERRUPTED = 130
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Runs the command, with the arguments of this process; ends with its exit code."""
    program.start()
    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]  # under nohup less are
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        code = _main(sys.argv[1:])
    except KeyboardInterrupt:  # by torchrun's and Slurm's signals, too: what was written is removed first
        code = _INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    sys.exit(code)


def _main(arguments: Sequence[str]) -> int:
    options = _parsed(arguments)
    import_all()
    ranks, trouble = _launched()
    if ranks is None or ranks.size == 1:
        return _report(options, {socket.gethostname(): _here(options)}, trouble, {socket.gethostname(): [0]})
    from distaccum.tools.doctor.meeting import AbsentError, Meeting  # noqa: PLC0415  torch may be what is wrong

    try:
        meeting = Meeting.open(ranks)
    except AbsentError as error:
        if ranks.rank:
            return _give_up(ranks, str(error))
        mend = "nc -zv $MASTER_ADDR $MASTER_PORT    # from the nodes of the missing ranks; and look at what they print"
        trouble.find(f"the ranks have not met: {error}", mend)
        return _report(
            options, {socket.gethostname(): _here(options, ranks.local_size)}, trouble, {socket.gethostname(): [0]}
        )
    return _with_others(meeting, options)


def _with_others(meeting: Meeting, options: argparse.Namespace) -> int:
    """Every rank says where it is, the first one of each machine looks at it, and rank 0 shows everything."""
    from distaccum.tools.doctor.agreement import About, nodes  # noqa: PLC0415
    from distaccum.tools.doctor.meeting import MEET_S, agree, gather  # noqa: PLC0415
    from distaccum.tools.doctor.together import absent, ask, take_part  # noqa: PLC0415

    ranks = meeting.ranks
    told = gather(meeting, "about", About.here(ranks.rank, ranks.local_rank).to_json(), MEET_S)
    known = [About.from_json(one) for one in told.values() if one is not None]
    places: dict[str, list[int]] | None = agree(meeting, "places", nodes(known) if known else None, 2 * MEET_S)
    if places is None:
        return _give_up(ranks, "rank 0 is gone")
    mine = next((members for members in places.values() if ranks.rank in members), [])
    found = _here(options, len(mine), len(places)) if ranks.rank in mine[:1] else {}
    looks = gather(meeting, "looks", {name: one.to_json() for name, one in found.items()}, ALL_S)
    name: str | None = agree(meeting, "name", own_name(), 2 * ALL_S)
    if name is None:
        return _give_up(ranks, "rank 0 is gone")
    if ranks.rank:
        if BETWEEN in options.only:
            take_part(meeting, name, options.folder)
        return 0
    between = absent({rank: told[rank] and looks[rank] for rank in told})
    by_node = {
        place: {part: Look.from_json(one) for part, one in (looks[members[0]] or {}).items()}
        for place, members in places.items()
    }
    if BETWEEN in options.only:
        networks = {place: of.get("network") for place, of in by_node.items()}
        together = ask(meeting, name, options.folder, known, networks)
        between = Look(together.facts, between.findings + together.findings)
    return _report(options, by_node, between, places)


def _launched() -> tuple[LaunchEnvironment | None, Look]:
    """What the launcher says; what is wrong with it is a finding, and this process then looks alone."""
    trouble = Look()
    try:
        from distaccum.distributed.environment import LaunchEnvironment  # noqa: PLC0415  torch may be what is wrong
    except ImportError:
        return None, trouble  # the probe of the software says why
    try:
        return LaunchEnvironment.from_environment(), trouble
    except ConfigError as error:
        trouble.find(str(error), "unset RANK WORLD_SIZE    # or start with torchrun")
        return None, trouble


def _here(options: argparse.Namespace, local_ranks: int = 1, nodes: int = 1) -> dict[str, Look]:
    patient = sys.stderr.isatty()
    if patient:
        sys.stderr.write(f"looking at {', '.join(options.only)} ...")
        sys.stderr.flush()
    try:
        return here(options.only, options.folder, local_ranks=local_ranks, nodes=nodes)
    finally:
        if patient:
            sys.stderr.write("\r\x1b[K")  # the table takes its place
            sys.stderr.flush()


def _give_up(ranks: LaunchEnvironment, why: str) -> int:
    print(f"distaccum doctor: rank {ranks.rank}: {why}", file=sys.stderr)  # noqa: T201
    return 1


def _report(
    options: argparse.Namespace,
    by_node: Mapping[str, Mapping[str, Look]],
    between: Look,
    places: Mapping[str, Sequence[int]],
) -> int:
    """Shows what was found; 1 where something is wrong."""
    sections = [
        Section(title=TITLES[part], looks={place: of[part] for place, of in by_node.items() if part in of})
        for part in TITLES
        if part in options.only and part != BETWEEN
    ]
    sections.append(Section(title=TITLES[BETWEEN], looks={"": between}))
    examination = Examination(nodes=places, sections=[one for one in sections if one.looks])
    if options.json:
        json.dump(examination.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(examination)
    return int(not examination.right)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    description = "What this machine, or a job's machines, have for training:\nwhat is wrong, and what mends it."
    parser = Arguments("doctor", description, _EPILOG)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where runs will go (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    help_text = f"look at these alone: {', '.join(TITLES)}"
    parser.add_argument("--only", type=_parts, default=list(TITLES), metavar="PART[,PART]", help=help_text)
    return parser.of(arguments)


def _parts(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError(f"no part; there are {', '.join(TITLES)}")
    for name in names:
        if name not in TITLES:
            known = f"{near_misses(name, TITLES)}; there are {', '.join(TITLES)}"
            raise argparse.ArgumentTypeError(f"{name}: no such part{known}")
    return names

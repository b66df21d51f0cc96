"""A key prefix unique to one (re)start of the ranks, so that a restart never reads old keys.

Torchrun keeps one store over its restarts (seen with torch 2.13), which still holds the keys of earlier ranks, and each
agent counts restarts for itself. So the ranks agree on a random name: each rank but 0 shows a fresh word, and rank 0
answers to that word with the name.
"""

from __future__ import annotations

import logging
from secrets import token_hex
from time import monotonic, sleep

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported

_log = logging.getLogger(__name__)

_POLL_S = 0.01
_FIRST_WORD_S = 60.0  # of waiting in silence; then after twice as long, each time


def private_store(store: Store, rank: int, size: int, *, timeout_s: float) -> Store:
    """The part of ``store`` that only these ``size`` ranks use; a collective.

    Raises:
        TimeoutError: on rank 0, if a rank has not come within ``timeout_s`` seconds. On the others the store's own
            time-out raises.
    """
    if rank == 0:
        name = token_hex(8)
        _admit(store, range(1, size), name, timeout_s)
    else:
        word = token_hex(8)
        store.set(f"meeting/{rank}", word)
        name = store.get(f"meeting/answer/{word}").decode()
        store.set(f"meeting/{name}/{rank}", "here")
    return PrefixStore(f"ranks/{name}", store)


def _admit(store: Store, ranks: range, name: str, timeout_s: float) -> None:
    """Answers each rank's words until it has come: the first word may be one of an earlier start."""
    began, word_s, absent, answered = monotonic(), _FIRST_WORD_S, list(ranks), dict[int, bytes]()
    while True:
        absent = [rank for rank in absent if not store.check([f"meeting/{name}/{rank}"])]
        if not absent:
            return
        waited = monotonic() - began
        if waited > timeout_s:
            raise TimeoutError(f"ranks {absent} have not come within {timeout_s:.0f} s")
        if waited > word_s:
            _log.warning("ranks %s have not come after %.0f s: do their processes still import?", absent, waited)
            word_s *= 2
        for rank in absent:
            if store.check([f"meeting/{rank}"]) and (word := store.get(f"meeting/{rank}")) != answered.get(rank):
                store.set(f"meeting/answer/{word.decode()}", name)
                answered[rank] = word
        sleep(_POLL_S)

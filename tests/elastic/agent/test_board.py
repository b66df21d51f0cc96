"""The agents' keys of the store."""

from __future__ import annotations

import json

from torch.distributed import HashStore, PrefixStore

from distaccum.elastic.agent.board import Board, View, Word, has_ended


def test_all_have_the_run_of_who_came_first() -> None:
    store = HashStore()
    first, second = Board(store), Board(store)
    assert first.prefix == second.prefix == f"elastic/{first.run}"
    assert Board(HashStore()).run != first.run


def test_who_comes_first_says_the_shape_and_so_view_0() -> None:
    store = HashStore()
    first, second = Board(store), Board(store)
    assert first.agree_shape(2, 2) == (2, 2)
    assert second.agree_shape(2, 4) == (2, 2)
    assert second.new_views() == [View(0, ("0.0.1", "0.1.1", "1.0.1", "1.1.1"))]
    assert second.new_views() == []


def test_lives_are_never_used_again() -> None:
    store = HashStore()
    assert Board(store).lives(0, 1) == 0
    assert [Board(store).new_life(0, 1) for _ in range(2)] == [1, 2]
    assert Board(store).new_life(1, 0) == 1
    assert Board(store).lives(0, 1) == 2


def test_words_come_once_and_in_order() -> None:
    store = HashStore()
    reader, writer = Board(store), Board(store)
    assert reader.new_words() == []
    writer.tell_gone("0.0.1", "was killed by SIGKILL")
    reader.tell_gone("1.0.1", "ended with exit code 1")
    assert reader.new_words() == [Word("0.0.1", "was killed by SIGKILL"), Word("1.0.1", "ended with exit code 1")]
    assert reader.new_words() == []


def test_a_word_that_is_still_being_written_comes_later() -> None:
    store = HashStore()
    board = Board(store)
    keys = PrefixStore(board.prefix, store)
    number = keys.add("word-numbers", 1)
    board.tell_gone("0.1.1", "ended with exit code 1")
    assert [word.member for word in board.new_words()] == ["0.1.1"]
    keys.set(f"word/{number}", json.dumps({"member": "0.0.1", "how": "was killed by SIGKILL"}))
    keys.add("words", 1)
    assert [word.member for word in board.new_words()] == ["0.0.1"]


def test_views_are_found_past_the_newest_that_is_told() -> None:
    store = HashStore()
    board = Board(store)
    board.agree_shape(1, 2)
    keys = PrefixStore(board.prefix, store)
    for generation, members in ((1, ["0.1.1"]), (2, ["0.1.1", "0.0.2"])):
        keys.set(f"view/{generation}", json.dumps({"generation": generation, "members": members}))
    assert [view.generation for view in board.new_views()] == [0, 1, 2]
    assert board.view.members == ("0.1.1", "0.0.2")


def test_candidates() -> None:
    store = HashStore()
    board = Board(store)
    keys = PrefixStore(board.prefix, store)
    assert board.candidates() == []
    keys.set("candidate-number/1", "0.0.2")
    keys.add("candidates", 2)  # the second is still being written
    assert board.candidates() == ["0.0.2"]
    keys.set("candidate-number/2", "0.1.2")
    assert board.candidates() == ["0.0.2", "0.1.2"]


def test_a_job_ends_once() -> None:
    store = HashStore()
    assert not has_ended(store)
    board = Board(store)
    assert (board.ended(), board.why(), has_ended(store)) == (None, "", False)
    board.end(1, "no rank is left")
    board.end(0, "")
    assert (board.ended(), board.why(), has_ended(store)) == (1, "no rank is left", True)

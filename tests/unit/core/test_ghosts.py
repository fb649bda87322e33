from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.ghosts import GHOST_CAPACITIES, LEARNING_RATE, MAX_PROBATION, MAX_RARITY, Content, Ghosts
from kvstore.core.heat import Heat, touched

contents = st.builds(Content, st.integers(1, 60), st.integers(0, 5))


def test_a_content_that_comes_back_goes_on_with_its_score() -> None:
    ghosts = Ghosts(1000)
    ghosts.add(Content(10, 1), Heat(3.0, True))
    assert ghosts.admit(Content(10, 1), 2.0) == Heat(touched(3.0, 2.0), True)
    assert len(ghosts) == ghosts.size_bytes == 0
    assert not ghosts.admit(Content(10, 1), 2.0).proven


def test_the_same_hash_with_another_length_is_another_content() -> None:
    ghosts = Ghosts(1000)
    ghosts.add(Content(10, 1), Heat(3.0, True))
    assert ghosts.admit(Content(11, 1), 2.0) == Heat(2.0, False)


def test_two_capacities_are_remembered_those_evicted_last() -> None:
    ghosts = Ghosts(100)
    for i in range(50):
        ghosts.add(Content(10, i), Heat(float(i), False))
    kept = 100 * GHOST_CAPACITIES // 10
    assert [content.hash for content, _ in ghosts] == list(range(50 - kept, 50))
    ghosts.resize(50)
    assert len(ghosts) == kept // 2
    with pytest.raises(ValueError, match="nothing to remember"):
        ghosts.resize(0)


def test_tiny_blocks_are_bounded_by_their_number() -> None:
    ghosts = Ghosts(10**12, max_ghosts=3)
    for i in range(10):
        ghosts.add(Content(1, i), Heat(0.0, False))
    assert [content.hash for content, _ in ghosts] == [7, 8, 9]


def test_of_two_blocks_with_one_content_the_hotter_is_remembered() -> None:
    ghosts = Ghosts(1000)
    for heat in (Heat(1.0, False), Heat(5.0, True), Heat(2.0, False)):
        ghosts.add(Content(10, 1), heat)
    assert list(ghosts) == [(Content(10, 1), Heat(5.0, True))]
    assert ghosts.size_bytes == 10


def returning(proven: bool, probation: float) -> Ghosts:
    """Half of the ghosts were read and half were not; those of one kind come back."""
    ghosts = Ghosts(1000, probation)
    for i in range(200):
        ghosts.add(Content(10, i), Heat(0.0, i % 2 == 0))
    for i in range(200):
        if (i % 2 == 0) == proven:
            ghosts.admit(Content(10, i), 1.0)
    return ghosts


def test_blocks_that_were_read_and_come_back_put_new_ones_on_probation() -> None:
    ghosts = returning(proven=True, probation=0.0)
    assert ghosts.probation == MAX_PROBATION
    assert ghosts.admit(Content(10, 1000), 7.0) == Heat(7.0 - MAX_PROBATION, False)


def test_blocks_that_were_never_read_and_come_back_end_it() -> None:
    ghosts = returning(proven=False, probation=MAX_PROBATION)
    assert ghosts.probation == 0.0
    assert ghosts.admit(Content(10, 1000), 7.0) == Heat(7.0, False)


def test_a_single_block_of_a_rare_kind_does_not_turn_everything_over() -> None:
    ghosts = Ghosts(1000)
    for i in range(200):
        ghosts.add(Content(10, i), Heat(0.0, i == 7))
    ghosts.admit(Content(10, 7), 1.0)
    assert 0.0 < ghosts.probation <= LEARNING_RATE * MAX_RARITY * 10 / 1000


def test_contents_that_never_came_by_teach_nothing() -> None:
    ghosts = Ghosts(1000, probation=1.5)
    for i in range(1000):
        ghosts.admit(Content(10, i), 1.0)
    assert ghosts.probation == 1.5


@given(st.lists(st.tuples(st.booleans(), contents, st.booleans())))
def test_the_books_agree_and_a_copy_is_the_same(steps: list[tuple[bool, Content, bool]]) -> None:
    ghosts = Ghosts(100)
    for is_eviction, content, proven in steps:
        if is_eviction:
            ghosts.add(content, Heat(0.0, proven))
        else:
            ghosts.admit(content, 1.0)
        assert ghosts.size_bytes == sum(content.length_bytes for content, _ in ghosts) <= 100 * GHOST_CAPACITIES
        assert 0.0 <= ghosts.probation <= MAX_PROBATION
    copy = Ghosts(100, ghosts.probation)
    for content, heat in ghosts:
        copy.add(content, heat)
    assert list(copy) == list(ghosts)

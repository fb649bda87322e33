from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.heat import HALF_LIFE, Clock, Heat, Ranking, touched

TIB, MIB = 1 << 40, 1 << 20
scores = st.floats(-1e9, 1e9)


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), min_size=1, max_size=50))
def test_the_score_is_the_decaying_count_of_touches(steps: list[tuple[float, bool]]) -> None:
    heat, clock, score = 1.0, 0.0, 0.0
    for passed, is_touched in steps:
        clock += passed
        heat *= 2.0**-passed
        if is_touched:
            heat += 1
            score = touched(score, clock)
    assert 2.0 ** (score - clock) == pytest.approx(heat)


@given(scores, scores)
def test_a_touch_never_cools_and_at_most_doubles(score: float, clock: float) -> None:
    after = touched(score, clock)
    assert max(score, clock) <= after <= max(score, clock) + 1
    assert touched(0.0, 0.0) == 1.0


def test_the_hotter_of_two_is_the_greater() -> None:
    assert Heat(2.0, False) > Heat(1.0, True)
    assert Heat(1.0, False).touched(1.0) == Heat(2.0, True)


def test_one_turnover_is_a_half_life_and_a_new_capacity_only_changes_the_pace() -> None:
    clock = Clock(100)
    clock.admit(int(100 * HALF_LIFE))
    assert clock.now == 1.0
    assert clock.heat(0.0) == 0.5
    assert clock.age(0.25) == -0.75
    clock.resize(50)
    assert clock.now == 1.0
    clock.admit(int(50 * HALF_LIFE))
    assert clock.now == 2.0
    with pytest.raises(ValueError, match="no turnover"):
        clock.resize(0)


def test_heat_of_a_score_far_off_is_a_number() -> None:
    clock = Clock(100)
    assert clock.heat(-1e9) == 0.0
    assert math.isfinite(clock.heat(1e9))


def test_after_ten_years_blocks_still_order_by_their_touches() -> None:
    clock = Clock(10 * TIB)
    clock.now = 4e6
    found = []
    for _ in range(1000):
        clock.admit(MIB)
        found.append(clock.now)
    assert found == sorted(set(found))
    passed = found[-1] - 4e6
    assert passed == pytest.approx(1000 * MIB / (10 * TIB * HALF_LIFE), rel=0.01)
    twice = [touched(score, clock.now) for score in found]
    assert twice == sorted(twice)


def test_a_ranking_of_many() -> None:
    chance, ranking, scores = random.Random(1), Ranking[int](), dict[int, float]()
    for _ in range(200_000):
        id = chance.randrange(50_000)
        if chance.random() < 0.2:
            ranking.discard(id)
            scores.pop(id, None)
        else:
            scores[id] = score = chance.random()
            ranking.set(id, score)
    assert [id for id, _ in ranking.coldest()] == sorted(scores, key=scores.__getitem__)


def test_what_is_no_number_is_refused() -> None:
    ranking = Ranking[str]()
    with pytest.raises(ValueError, match="not a number"):
        ranking.set("a", math.nan)
    assert "a" not in ranking
    assert list(ranking.coldest()) == []


class RankingMachine(RuleBasedStateMachine):
    """Against a dict that is sorted each time."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking, self.scores = Ranking[int](), dict[int, float]()

    @rule(id=st.integers(0, 20), score=st.sampled_from([0.0, 1.0, 2.0, 3.0]) | scores)
    def set(self, id: int, score: float) -> None:
        self.ranking.set(id, score)
        self.scores[id] = score

    @rule(id=st.integers(0, 20))
    def discard(self, id: int) -> None:
        self.ranking.discard(id)
        self.scores.pop(id, None)

    @rule(n=st.integers(0, 5))
    def look(self, n: int) -> None:
        found = list(itertools.islice(self.ranking.coldest(), n))
        assert [score for _, score in found] == sorted(self.scores.values())[:n]

    @invariant()
    def is_the_same(self) -> None:
        found = list(self.ranking.coldest())
        assert dict(found) == self.scores
        assert len(found) == len(self.ranking) == len(self.scores)
        assert [score for _, score in found] == sorted(self.scores.values())
        for id in range(21):
            assert self.ranking.score(id) == self.scores.get(id)
            assert (id in self.ranking) == (id in self.scores)


TestRanking = RankingMachine.TestCase

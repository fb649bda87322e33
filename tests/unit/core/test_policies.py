from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import errors, placement, retry
from kvstore.core.placement import Candidate

u64 = st.integers(0, 2**64 - 1)
candidates = st.lists(st.builds(Candidate, st.text(min_size=1), st.just("h:1"), st.integers(0, 1000)), max_size=6)


@given(candidates, st.integers(0, 1000), u64, u64)
def test_a_worker_with_room_is_chosen_when_there_is_one(pool: list[Candidate], size: int, a: int, b: int) -> None:
    chosen = placement.choose(pool, size, a, b)
    assert (chosen is None) == (not pool)
    if chosen and any(c.free_bytes >= size for c in pool):
        assert chosen.free_bytes >= size


def test_the_freer_of_two() -> None:
    low, high = Candidate("a", "h:1", 10), Candidate("b", "h:2", 20)
    assert placement.choose([low, high], 5, 0, 1) is high
    assert placement.choose([low, high], 5, 0, 0) is low


@given(st.integers(1, 40), u64, st.floats(0, 10))
def test_delays_fit_the_deadline(attempt: int, random: int, left: float) -> None:
    delay = retry.delay_s(attempt, random, left)
    assert delay is None or 0 < delay <= min(retry.MAX_DELAY_S, left)


def test_what_may_be_retried() -> None:
    assert retry.may_retry(errors.Overloaded("x"), idempotent=False)
    assert retry.may_retry(errors.Unavailable("x"), idempotent=True)
    assert not retry.may_retry(errors.Unavailable("x"), idempotent=False)
    assert not retry.may_retry(errors.Timeout("x"), idempotent=True)
    assert not retry.may_retry(errors.NotFound("x"), idempotent=True)

from __future__ import annotations

from itertools import pairwise

from kvstore.core.bursts import GAP_S, MAX_BURST_CLOCK, MAX_BURST_S, STEP, Bursts
from kvstore.core.heat import Clock, Ranking

CHUNK_S = 0.002


def test_within_a_burst_earlier_positions_outrank_later_ones() -> None:
    bursts = Bursts[str]()
    found = [bursts.touch("engine", i * CHUNK_S, clock=5.0 + i / 100) for i in range(100)]
    assert found[0] == 5.0
    assert all(a > b for a, b in pairwise(found))
    assert found[0] - found[-1] == 99 * STEP


def test_a_pause_begins_a_burst_at_the_clock_of_its_own() -> None:
    bursts = Bursts[str]()
    assert bursts.touch("engine", 0.0, 1.0) == 1.0
    assert bursts.touch("engine", GAP_S, 2.0) == 1.0 - STEP
    assert bursts.touch("engine", 2 * GAP_S + 0.01, 3.0) == 3.0


def test_clients_do_not_disturb_each_other() -> None:
    bursts = Bursts[str]()
    assert bursts.touch("a", 0.0, 1.0) == 1.0
    assert bursts.touch("b", 0.01, 2.0) == 2.0
    assert bursts.touch("a", 0.02, 1.5) == 1.0 - STEP


def test_a_client_that_never_pauses_is_not_scored_at_an_old_clock_for_ever() -> None:
    bursts = Bursts[str]()
    steps = int(3 * MAX_BURST_S / GAP_S)
    found = [bursts.touch("engine", i * GAP_S, clock=float(i)) for i in range(steps)]
    assert all(i - at <= MAX_BURST_S / GAP_S + steps * STEP for i, at in enumerate(found))


def test_a_client_that_brings_more_than_fits_begins_a_new_burst() -> None:
    bursts = Bursts[str]()
    found = [bursts.touch("engine", i * CHUNK_S, clock=i / 10) for i in range(100)]
    assert all(i / 10 - at <= MAX_BURST_CLOCK + 100 * STEP for i, at in enumerate(found))


def test_bursts_that_are_over_are_forgotten() -> None:
    bursts = Bursts[int]()
    for client in range(1000):
        bursts.touch(client, client * CHUNK_S, 0.0)
    assert len(bursts) <= GAP_S / CHUNK_S + 1
    bursts.touch(0, 1e6, 0.0)
    assert len(bursts) == 1


def test_a_prefix_outlives_its_suffix_although_it_was_opened_first() -> None:
    bursts, ranking, clock = Bursts[str](), Ranking[tuple[str, int]](), Clock(1000)
    for start_s, prompt in ((0.0, "old"), (10.0, "new")):
        for i in range(50):
            ranking.set((prompt, i), bursts.touch("engine", start_s + i * CHUNK_S, clock.now))
            clock.admit(1)
    order = [id for id, _ in ranking.coldest()]
    assert order == [(prompt, i) for prompt in ("old", "new") for i in reversed(range(50))]

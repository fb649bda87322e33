from __future__ import annotations

from kvstore.core.recently import Recently


def test_a_key_counts_for_its_time_and_may_be_renewed() -> None:
    names: Recently[str] = Recently(ttl_s=10)
    names.add("a", 0)
    assert names.has("a", 9.9)
    assert not names.has("a", 10)
    names.add("a", 5)
    assert names.has("a", 14)
    names.discard("a")
    names.discard("never added")
    assert not names.has("a", 5)


def test_the_oldest_go_first() -> None:
    names: Recently[int] = Recently(ttl_s=10, max_keys=2)
    for key, now in ((1, 0), (2, 1), (1, 2), (3, 3)):
        names.add(key, now)
    assert len(names) == 2
    assert [names.has(key, 3) for key in (1, 2, 3)] == [True, False, True]

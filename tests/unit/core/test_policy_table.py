"""The rules of policies, resolved: whatever a master sends."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.policies import NONE, Rule, Table

ids = st.integers(0, 8)
times = st.one_of(st.just(0.0), st.floats(), st.floats(1, 100))
rules = st.lists(st.builds(Rule, ids, ids, times, st.booleans()), max_size=12)


def test_the_nearest_ttl_holds_and_any_pin_does() -> None:
    table = Table([Rule(1, ttl_s=60), Rule(2, 1), Rule(3, 2, ttl_s=5), Rule(4, 2, pinned=True), Rule(5, 4, ttl_s=5)])
    assert [table.ttl_s(policy) for policy in (1, 2, 3)] == [60, 60, 5]
    assert [table.is_pinned(policy) for policy in range(1, 6)] == [False, False, False, True, True]
    assert [table.ttl_s(policy) for policy in (4, 5)] == [0, 0], "what is pinned does not expire"
    assert table.below(2) == [2, 3, 4, 5]
    assert [table.depth(policy) for policy in (1, 2, 5)] == [1, 2, 4]


def test_what_is_not_known_has_nothing() -> None:
    table = Table([Rule(1, 7, ttl_s=60)])
    assert (table.is_pinned(9), table.ttl_s(9), table.depth(9), table.below(9)) == (False, 0, 0, [9])
    assert (table.ttl_s(1), table.depth(1)) == (60, 1), "its parent is not known: it is at the top"


def test_a_long_chain_is_no_trouble() -> None:
    count = 100_000
    table = Table([Rule(1, ttl_s=9), *(Rule(id, id - 1) for id in range(count, 1, -1))])
    assert table.ttl_s(count) == 9
    assert len(table.below(1)) == count


@given(rules)
def test_any_table_is_a_forest(rules: list[Rule]) -> None:
    """As loops end somewhere, every rule is below exactly one top, and all answers follow from the way up."""
    table = Table(rules)
    known = {rule.id: rule for rule in rules if rule.id != NONE}
    everything = table.below(NONE)
    assert sorted(everything) == sorted({NONE, *known})
    for id, rule in known.items():
        above = [other for other in known if other != id and id in table.below(other)]
        assert table.depth(id) == 1 + len(above)
        assert table.is_pinned(id) == any(known[each].pinned for each in (id, *above))
        if rule.parent not in known:
            assert not above
        if not table.is_pinned(id):
            ways = sorted((id, *above), key=table.depth, reverse=True)
            ttls = [known[each].ttl_s for each in ways if math.isfinite(known[each].ttl_s) and known[each].ttl_s > 0]
            assert table.ttl_s(id) == (ttls[0] if ttls else 0)


@given(rules)
def test_without_a_loop_the_way_up_is_the_one_that_was_sent(rules: list[Rule]) -> None:
    """Parents have smaller ids here."""
    known = {rule.id: rule._replace(parent=min(rule.parent, rule.id - 1)) for rule in rules if rule.id != NONE}
    table = Table(known.values())
    for id, rule in known.items():
        if rule.parent in known:
            assert id in table.below(rule.parent)
            assert table.depth(id) == table.depth(rule.parent) + 1

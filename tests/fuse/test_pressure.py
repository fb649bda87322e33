"""The short form of ``python -m bench.tiers``: LMCache's load on a store half as large as what is asked for."""

from __future__ import annotations

from pathlib import Path

from bench import tiers


def test_no_error_no_cap_passed_and_every_byte_accounted_for(tmp_path: Path) -> None:
    outcome = tiers.run(tmp_path, seconds=25.0)
    tiers.show(outcome)  # pytest shows it when something fails
    assert outcome.failures == []
    assert outcome.looks > 50
    assert sum(tally.hits for tally in outcome.tallies) > sum(tally.puts for tally in outcome.tallies) / 2
    assert sum(node.counters.evictions for node in outcome.nodes) > 0, "more came than there is room"
    assert sum(node.counters.promotions for node in outcome.nodes) > 0
    assert outcome.share_in_memory(hot=True) > outcome.share_in_memory(hot=False)

"""``tests/RULES.md`` names, for every rule of the protocol, tests that fail when it is broken: they are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

TESTS: Final = Path(__file__).parents[1]
TABLE: Final = TESTS / "RULES.md"
LATER: Final = (31,)
"""Rules of what is not built yet."""


class Row(NamedTuple):
    rule: str
    broken: str
    caught_by: list[str]


def rows() -> list[Row]:
    found = re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|$", TABLE.read_text(), re.MULTILINE)[1:]  # below the title
    return [Row(rule, broken, re.findall(r"`([^`]+)`", tests)) for rule, broken, tests in found]


@pytest.mark.parametrize("rule", [rule for rule in range(1, 32) if rule not in LATER])
def test_every_rule_is_broken_and_caught(rule: int) -> None:
    assert any(row.rule == str(rule) for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.rule} {row.broken.strip()}")
def test_the_tests_are_there(row: Row) -> None:
    assert row.caught_by
    for test in row.caught_by:
        file, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {re.escape(name)}\(", (TESTS / file).read_text(), re.MULTILINE), test

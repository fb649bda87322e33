"""Which version of a temporary name a RENAME takes (rule 24): the one that its LOOKUP was answered with."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.fuse.names import TempNames

KEY = (1, "k.tmp")


@dataclass(eq=False)
class Version:
    inode: int
    process: int = 0


def closed(names: TempNames[Version], inode: int, now_s: float) -> Version:
    version = Version(inode)
    names.opened(KEY, version)
    names.flushed(KEY, version)
    names.closed(KEY, version, now_s)
    return version


def test_the_one_that_was_looked_up_is_renamed_whoever_closes_meanwhile() -> None:
    names = TempNames[Version]()
    first = closed(names, 11, 1.0)
    assert names.lookup(KEY) is first
    second = closed(names, 12, 2.0)
    assert names.to_rename(KEY) is first
    names.remove(KEY, first)
    assert names.to_rename(KEY) is second


def test_without_a_look_up_it_is_the_one_that_a_look_up_would_show() -> None:
    names = TempNames[Version]()
    closed(names, 11, 1.0)
    closed(names, 12, 2.0)
    renamed = names.to_rename(KEY)
    assert renamed is not None
    assert renamed is names.lookup(KEY)

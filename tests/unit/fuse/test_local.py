"""The table of local files: numbers that two writers race for (rule 24)."""

from __future__ import annotations

from kvstore.fuse.inodes import Numbers
from kvstore.fuse.local import CONTESTED_S, LocalFiles
from kvstore.fuse.localfile import LocalFile

KEY = (1, "k.tmp")


def closed_version(local: LocalFiles) -> LocalFile:
    file = local.new(KEY, True, 0o100644, 0, 0, 0)
    local.temps.opened(KEY, file)
    local.temps.closed(KEY, file, 0.0)
    return file


def test_a_rewritten_number_belongs_to_the_writer() -> None:
    local = LocalFiles(Numbers(1))
    old = closed_version(local)
    number = old.inode
    fresh = local.rewrite(old, number, 0, 1.0)
    assert local.get(number) is fresh
    assert fresh.looked_up, "whoever opens it once more may be somebody else"
    assert local.get(old.inode) is old
    assert len({old.id, fresh.id, number}) == 2, "what is kept for a successor goes by a name that never changes"


def test_while_a_name_is_contested_each_look_up_has_a_number_of_its_own() -> None:
    local = LocalFiles(Numbers(1))
    file = closed_version(local)
    assert local.shown(KEY, 0.0) == (file, file.inode)
    local.contested(KEY, 0.0)
    numbers = [shown[1] for shown in (local.shown(KEY, 0.1) for _ in range(3)) if shown and shown[0] is file]
    assert len({*numbers, file.inode}) == 4
    assert all(local.get(number) is file for number in numbers)
    first, second = (local.rewrite(file, number, 0, 0.2) for number in numbers[:2])
    assert local.get(numbers[0]) is first
    assert local.get(numbers[1]) is second
    assert local.get(numbers[2]) is file
    assert local.shown(KEY, CONTESTED_S) == (file, file.inode)


def test_an_alias_ends_with_its_file() -> None:
    local = LocalFiles(Numbers(1))
    file = closed_version(local)
    local.contested(KEY, 0.0)
    shown = local.shown(KEY, 0.0)
    assert shown
    local.remove(file)
    assert local.get(shown[1]) is None
    assert local.all() == []


def test_numbers_of_two_processes_of_a_mount_differ() -> None:
    first, second = LocalFiles(Numbers(1, 0)), LocalFiles(Numbers(1, 1))
    numbers = {closed_version(local).inode for local in (first, second) for _ in range(3)}
    assert len(numbers) == 6
    assert all(Numbers.is_local(number) for number in numbers)

"""The bytes on disk: pinned, so that nobody changes them by accident."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.core.errors import Corrupt, Unsupported
from kvstore.core.types import Seen
from kvstore.master.storage import records as r

ENTRY = r.NameRow(5, 0o100644, 1000, 100, 14 << 20, 10, 20, bytes(range(16)), 2**64 - 1)
GOLDEN: list[tuple[r.Codec[Any], msgspec.Struct, str]] = [
    (r.CLUSTER, r.ClusterRow("ab"), "0191a26162"),
    (r.INCARNATIONS, r.IncarnationsRow([Seen(2**64 - 1, 0), Seen(7, 300)]), "01919292cfffffffffffffffff009207cd012c"),
    (r.NAME, ENTRY, "019905cd81a4cd03e864ce00e000000a14c410000102030405060708090a0b0c0d0e0fcfffffffffffffffff"),
    (r.INODE, r.InodeRow(1, "é", 7), "019301a2c3a907"),
    (r.BLOCK, r.BlockRow(5, [1, 2**64 - 1], 7, 300), "0194059201cfffffffffffffffff07cd012c"),
    (r.VOLUME, r.VolumeRow("n", "ssd", 1.5), "0193a16ea3737364cb3ff8000000000000"),
    (
        r.NODE,
        r.NodeRow("h:1", "h:2", "", "0.1", 7, 3, 9, {7: 8}, [1], recovered=[Seen(5, 6)], over=[4]),
        "019ca3683a31a3683a32a0a3302e310703098107089101c3919205069104",
    ),
    (r.REBUILD, r.RebuildRow("discard", 2**64 - 1), "0192a764697363617264cfffffffffffffffff"),
    (
        r.CLAIM,
        r.ClaimRow("a/b", 0o644, 1, 2, -3, 4, 2**64 - 1, 5, 6, 7),
        "019aa3612f62cd01a40102fd04cfffffffffffffffff050607",
    ),
    (
        r.JOURNAL,
        r.JournalRow(10, "mkdir", 1, "d", 5, r.NameRow(5, 0o040755, 0, 0, 0, 1, 1)),
        "01990aa56d6b64697201a164059905cd41ed0000000101c4000000a0c0",
    ),
    (r.POLICY, r.PolicyRow(5, 1, 1 << 30, 1.5, True, 300, 2), "01970501ce40000000cb3ff8000000000000c3cd012c02"),
    (r.COUNTERS, r.Counters(1, 2, 3, 4, 5, 6, 7, 8), "01980102030405060708"),
]


@pytest.mark.parametrize(("codec", "row", "golden"), GOLDEN, ids=lambda x: type(x).__name__)
def test_golden_bytes(codec: r.Codec[Any], row: msgspec.Struct, golden: str) -> None:
    assert r.dump(row).hex() == golden
    assert codec.load(bytes.fromhex(golden)) == row


def test_every_kind_of_row_is_pinned() -> None:
    assert {codec.kind for codec, _, _ in GOLDEN} == {*r.Row.__subclasses__(), r.Counters}


def test_keys() -> None:
    assert r.name_key(1, "é").hex() == "0000000000000001c3a9"
    assert r.replica_key(2**64 - 1, bytes(16)).hex() == "ff" * 8 + "00" * 16
    assert r.prefix_end(1) == r.pack_u64(2)
    assert r.prefix_end(2**64 - 1) is None


def test_a_row_with_fields_of_a_newer_version_still_loads() -> None:
    longer = r.FORMAT + msgspec.msgpack.encode([1, "x", 7, "a field appended later"])
    assert r.INODE.load(longer) == r.InodeRow(1, "x", 7)


def test_a_row_without_the_fields_that_came_later() -> None:
    assert r.INODE.load(bytes.fromhex("019201a2c3a9")) == r.InodeRow(1, "é", 0)
    assert r.BLOCK.load(bytes.fromhex("0192059201cfffffffffffffffff")) == r.BlockRow(5, [1, 2**64 - 1], 0, 0)
    node = r.NODE.load(bytes.fromhex("019aa3683a31a3683a32a0a3302e310703098107089101c3"))
    assert (node.collects, node.recovered) == (True, [])
    assert r.COUNTERS.load(bytes.fromhex("0196010203040506")) == r.Counters(1, 2, 3, 4, 5, 6, 0, 1)
    assert r.REBUILD.load(bytes.fromhex("0191a764697363617264")) == r.RebuildRow("discard", 0)
    assert r.VOLUME.load(r.FORMAT + msgspec.msgpack.encode(["n", "ssd"])) == r.VolumeRow("n", "ssd", 0.0)


def test_what_cannot_be_read_says_so() -> None:
    with pytest.raises(Unsupported, match="newer"):
        r.INODE.load(b"\x02\x90")
    with pytest.raises(Corrupt, match="damaged"):
        r.INODE.load(b"\x01\x91\x01")
    with pytest.raises(Unsupported):
        r.INODE.load(b"")

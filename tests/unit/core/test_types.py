from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import paths
from kvstore.core.errors import InvalidRequest, NameTooLong
from kvstore.core.types import U63_MAX, U64_MAX, Address, BlockId

u64 = st.integers(0, U64_MAX)
addresses = st.builds(Address, st.builds(BlockId, u64, u64), st.integers(0, U63_MAX), u64)


@given(addresses)
def test_an_address_is_the_name_of_its_file(address: Address) -> None:
    assert Address.parse(address.file_name) == address
    assert BlockId.unpack(address.block.pack()) == address.block


def test_the_shape_on_disk_is_pinned() -> None:
    address = Address(BlockId(0xAB, 0x1F), 14680064, 0xDEADBEEF)
    assert str(address) == "00000000000000ab-1f.14680064.00000000deadbeef"
    assert address.block.pack() == bytes.fromhex("00000000000000ab000000000000001f")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "00000000000000ab-1f.14680064",
        "00000000000000AB-1f.1.00000000deadbeef",  # one spelling only
        "00000000000000ab-01f.1.00000000deadbeef",
        "00000000000000ab-1f.01.00000000deadbeef",
        "00000000000000ab-1f.9999999999999999999.00000000deadbeef",
        "00000000000000ab-1f.1.00000000deadbeef\n",
    ],
)
def test_other_names_are_no_addresses(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Address.parse(name)


@pytest.mark.parametrize(("path", "parts"), [("", ()), ("/", ()), ("/a//b/", ("a", "b")), ("-x", ("-x",))])
def test_split(path: str, parts: tuple[str, ...]) -> None:
    assert paths.split(path) == parts


@pytest.mark.parametrize("path", ["a/../b", "./a", "a\0b", "a/\udc80"])
def test_bad_paths_are_refused(path: str) -> None:
    with pytest.raises(InvalidRequest):
        paths.split(path)


def test_long_names_and_paths() -> None:
    assert paths.split("é" * 127 + "x") == ("é" * 127 + "x",)  # 255 bytes
    for path in ("é" * 128, "a/" * 2049, "a/" * 257, "é" * 4000):
        with pytest.raises(NameTooLong):
            paths.split(path)

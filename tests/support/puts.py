"""Puts and gets with LMCache's system calls, in whole or step by step. Contents are `tests.support.versions`."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tests.support.versions import Version, checked, content


class Put:
    """One put of key 0, step by step: two writes of one half each. `temporary` is its name until it is whole."""

    def __init__(
        self,
        directory: Path,
        writer: int,
        flags: int = os.O_TRUNC,
        length_bytes: int = 0,
        temporary: str = "0.tmp",
    ) -> None:
        self.final, self.temporary, self.flags, self.fd = directory / "0.data", directory / temporary, flags, -1
        self.data = content(0, writer, 0, length_bytes or 9000 + 5000 * writer)

    def steps(self) -> Iterator[str]:
        """Does one step after the other; yields its name when it is done."""
        self.fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | self.flags, 0o644)
        yield "open"
        half = len(self.data) // 2
        os.write(self.fd, self.data[:half])
        yield "half"
        os.write(self.fd, self.data[half:])
        yield "written"
        os.close(self.fd)
        yield "closed"
        os.rename(self.temporary, self.final)
        yield "renamed"


def put(directory: Path, key: int, data: bytes, luck: random.Random, name: str = "{}.tmp") -> None:
    """In one to five writes, with or without O_TRUNC. One that fails takes its temporary file away, like LMCache's.

    `name`: of the temporary file; ``.tmp/{}.data`` for LMCache's relative_tmp_dir.
    """
    temporary = directory / name.format(key)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | luck.choice((0, os.O_TRUNC)), 0o644)
        try:
            cuts = sorted(luck.sample(range(1, len(data)), luck.randrange(5)))
            for start, end in itertools.pairwise([0, *cuts, len(data)]):
                os.write(fd, data[start:end])
        finally:
            os.close(fd)
        os.rename(temporary, directory / f"{key}.data")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def get(directory: Path, key: int) -> Version | None:
    """open, fstat, one read. None for a miss. Raises Torn."""
    try:
        fd = os.open(directory / f"{key}.data", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return checked(os.pread(fd, os.fstat(fd).st_size + 1, 0), key)
    finally:
        os.close(fd)

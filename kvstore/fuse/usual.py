"""What the files of a directory usually measure: so much is reserved for the next one that is made there.

One mount serves several models, each with chunks of its own size in a directory of its own. Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Final

REMEMBERED: Final = 8
"""Sizes of one directory, the newest: a model's chunks all measure the same, so a few of them tell."""
MAX_DIRECTORIES: Final = 1024
"""Those in which something was written last; each takes about 1 KiB."""


class UsualSizes:
    """Of a directory it is the second largest of the last `REMEMBERED` sizes.

    One that is too large costs little (it evicts nothing, and goes back at the flush), one that is too small makes each
    flush ask again: hence a large one. The second, so that one outlier says nothing; a single file has to do alone.
    `first_bytes` holds where nothing is known.
    """

    def __init__(self, first_bytes: int, max_directories: int = MAX_DIRECTORIES) -> None:
        self._first_bytes, self._max_directories = first_bytes, max_directories
        self._sizes: OrderedDict[int, deque[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def of(self, directory: int) -> int:
        """Bytes."""
        sizes = self._sizes.get(directory)
        return heapq.nlargest(2, sizes)[-1] if sizes else self._first_bytes

    def add(self, directory: int, size_bytes: int) -> None:
        """A whole file of it measured this."""
        sizes = self._sizes.setdefault(directory, deque(maxlen=REMEMBERED))
        sizes.append(size_bytes)
        self._sizes.move_to_end(directory)
        if len(self._sizes) > self._max_directories:
            self._sizes.popitem(last=False)

"""Files of clients that were unlinked while somebody can still write them (aborted, or of a session that is over).
Their bytes are of no use to anybody, so they may not grow where there is no room.
"""

from __future__ import annotations

import logging
import os

from kvstore.filecut import cut
from kvstore.runtime import Runtime
from kvstore.worker.background import Background
from kvstore.worker.volumes.books import Books
from kvstore.worker.volumes.held import HeldBytes

log = logging.getLogger(__name__)


class GivenUp:
    """Implements `held.Holding` for one such file. `fd` watches it and belongs to `HeldFiles`.

    Once it was cut it is emptied at each look, and what was written between two of them is in no books.
    """

    def __init__(self, fd: int, held: HeldBytes, runtime: Runtime, background: Background, *, is_cut: bool) -> None:
        self._fd, self._held, self._runtime, self._background = fd, held, runtime, background
        self._is_cut = is_cut

    def resized(self, size_bytes: int) -> None:
        if not self._is_cut and self._books.missing(size_bytes - self._held.size_bytes) > 0:
            self._is_cut = size_bytes > self._held.size_bytes
        if not self._is_cut:
            self._held.resized(size_bytes)
        elif size_bytes:
            self._background.start(self._empty(os.dup(self._fd)))

    def released(self) -> None:
        self._held.released()

    @property
    def _books(self) -> Books:
        return self._held.books

    async def _empty(self, own_fd: int) -> None:
        try:
            await self._runtime.in_thread(_cut_behind, own_fd)
        except OSError as error:
            log.warning("a file that was given up and is written on could not be emptied: %s", error.strerror)
        else:
            self._held.resized(0)
        finally:
            os.close(own_fd)


def _cut_behind(fd: int) -> None:
    """The file has no name any more, and `fd` only reads."""
    writable = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        cut(writable)
    finally:
        os.close(writable)

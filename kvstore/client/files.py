"""Bytes ⇄ file descriptors, blocking: whole, in loops over short reads and writes, with no copy through Python."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvstore.core.errors import Corrupt, InvalidRequest, KvError, NoSpace, Overloaded, Timeout, TooLarge, Unavailable
from kvstore.core.hashing import PIECE_BYTES, BlockHasher
from kvstore.core.limits import FRAME_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer  # collections.abc has it from Python 3.12 on
else:
    Buffer = object

Progress = Callable[[int], None]
"""Told of the bytes that were moved since the last time."""
READ_BYTES = 8 << 20
"""One piece of a read that may be given up: a millisecond from the page cache."""
_KINDS: dict[int, type[KvError]] = {
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EFBIG: TooLarge,
    errno.EMFILE: Overloaded,
    errno.ENFILE: Overloaded,
    errno.EIO: Corrupt,
}


def mapped(error: OSError, doing: str) -> KvError:
    """The KvError of a failed system call."""
    kind = _KINDS.get(error.errno or 0, Unavailable)
    return kind(f"{doing}: {error.strerror or error}")


def view_of(data: Buffer) -> memoryview:
    """The bytes of any contiguous buffer (bytes, array, tensor memory …). Raises InvalidRequest."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(f"the data must be a contiguous buffer of bytes: {error}") from None


def writable_view(buffer: Buffer, length_bytes: int) -> memoryview:
    """The first `length_bytes` of a buffer to read into. Raises InvalidRequest when it is too small or read-only."""
    view = view_of(buffer)
    if len(view) < length_bytes:
        raise InvalidRequest(f"the buffer has {len(view)} bytes, the value {length_bytes}")
    if length_bytes and view.readonly:
        raise InvalidRequest("the buffer is read-only; give a bytearray or another writable buffer")
    return view[:length_bytes]


class Written(NamedTuple):
    """What was written, and the state of the file just after: the worker takes the hash over if that still holds."""

    hash: int
    mtime_ns: int


def write_all(fd: int, view: memoryview, offset: int = 0) -> None:
    """Raises NoSpace and what else `mapped` knows."""
    at = 0
    try:
        while at < len(view):
            at += os.pwrite(fd, view[at:], offset + at)
    except OSError as error:
        raise mapped(error, "cannot write the staging file") from None


def write_hashed(fd: int, view: memoryview) -> Written:
    """The whole view from offset 0. Each piece is hashed while the processor's cache has it: for 14 MiB this saves the
    worker a pass of 2.6 ms over the file.
    """
    hasher = BlockHasher()
    for at in range(0, len(view), PIECE_BYTES):
        piece = view[at : at + PIECE_BYTES]
        write_all(fd, piece, at)
        hasher.update(piece)
    return Written(hasher.digest(), os.fstat(fd).st_mtime_ns)


class Claim:
    """Of a thread on its caller's buffer: whoever gives it up knows whether the thread may still write there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self.is_given_up = False

    def begin(self) -> bool:
        """In the thread: whether the buffer may be written to."""
        with self._lock:
            self._begun = not self.is_given_up
            return self._begun

    def give_up(self) -> bool:
        """For the caller: whether the thread has begun, and so is to be waited for; it soon stops."""
        with self._lock:
            self.is_given_up = True
            return self._begun


def read_into(fd: int, view: memoryview, claim: Claim | None = None) -> None:
    """Fill the view from offset 0. Raises Corrupt when the file is shorter, Timeout when the claim is given up."""
    at, most = 0, len(view) if claim is None else READ_BYTES
    try:
        while at < len(view):
            if claim is not None and claim.is_given_up:
                raise Timeout(f"given up after {at} of {len(view)} bytes")
            count = os.preadv(fd, [view[at : at + most]], at)
            if count == 0:
                raise Corrupt(f"the block ends after {at} of {len(view)} bytes")
            at += count
    except OSError as error:
        raise mapped(error, "cannot read the block") from None


def read_bytes(fd: int, length_bytes: int) -> bytes:
    """The first `length_bytes` of the file. One allocation in the common case of one whole read."""
    try:
        data = os.pread(fd, length_bytes, 0)
    except OSError as error:
        raise mapped(error, "cannot read the block") from None
    if len(data) == length_bytes:
        return data
    whole = bytearray(length_bytes)  # a short read: rare, so read again rather than patch together
    read_into(fd, memoryview(whole))
    return bytes(whole)


def frames_of(view: memoryview) -> Iterator[bytes]:
    """Frames of a buffer; copies, since gRPC refuses memoryviews."""
    return (bytes(view[i : i + FRAME_BYTES]) for i in range(0, len(view), FRAME_BYTES))


def frames_of_fd(fd: int, size_bytes: int) -> Iterator[bytes]:
    """Frames of the first `size_bytes` of a file. Raises Corrupt when it is shorter.

    Not mapped: whoever has the file open could shorten it, and the fault would kill the process.
    """
    for at in range(0, size_bytes, FRAME_BYTES):
        want = min(FRAME_BYTES, size_bytes - at)
        try:
            frame = os.pread(fd, want, at)
        except OSError as error:
            raise mapped(error, "cannot read the staging file") from None
        if len(frame) != want:
            raise Corrupt(f"the file ended after {at + len(frame)} of {size_bytes} bytes while it was read")
        yield frame


def hash_fd(fd: int, size_bytes: int) -> int:
    hasher = BlockHasher()
    for frame in frames_of_fd(fd, size_bytes):
        hasher.update(frame)
    return hasher.digest()


def scratch_fd(directory: str | None) -> int:
    """A file without a name (read-write): its bytes go when its last fd is closed. Raises NoSpace, Unavailable."""
    try:
        fd, name = tempfile.mkstemp(prefix="kvstore-", dir=directory)
        os.unlink(name)
    except OSError as error:
        raise mapped(error, f"cannot make a temporary file in {directory or tempfile.gettempdir()}") from None
    return fd


def scratch_of(directory: str | None, view: memoryview) -> int:
    """A read-only fd of a file without a name that holds these bytes."""
    fd = scratch_fd(directory)
    try:
        write_all(fd, view)
        return reopened(fd, os.O_RDONLY)
    finally:
        os.close(fd)


def reopened(fd: int, flags: int) -> int:
    """Another open of the same file, with flags of its own; works for files without a name."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    except OSError as error:
        raise mapped(error, "cannot open the temporary file again") from None


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


def write_and_close(fd: int, view: memoryview) -> Written:
    """`write_hashed`, and the fd is closed whatever happens."""
    try:
        return write_hashed(fd, view)
    finally:
        os.close(fd)


def load_and_close(fd: int, length_bytes: int, view: memoryview | None, claim: Claim | None = None) -> bytes | KvError:
    """A whole block, into the view (then nothing is returned) or as bytes; an error is returned, not raised."""
    try:
        if view is None:
            return read_bytes(fd, length_bytes)
        if claim is None or claim.begin():
            read_into(fd, view, claim)
    except KvError as error:
        return error
    finally:
        os.close(fd)
    return b""


def no_progress(count: int) -> None:
    """The default of `progress`."""


def regular_size(path: str | os.PathLike[str]) -> int:
    """Bytes of a regular file. Raises OSError, InvalidRequest for a pipe or device, whose size nobody knows."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(f"{os.fspath(path)} is not a regular file")
    return status.st_size


def check_piece(piece: bytes, left_bytes: int) -> None:
    """Raises Corrupt when a file ended before its size."""
    if not piece:
        raise Corrupt(f"the file became shorter while it was copied: {left_bytes} bytes are missing")


def beside(path: str | os.PathLike[str]) -> str:
    """A fresh name in the same directory, to be renamed to `path` when it is complete."""
    directory, name = os.path.split(os.fspath(path))
    return os.path.join(directory, f".{name[:200]}.{secrets.token_hex(4)}.part")


def remove_quietly(path: str) -> None:
    """On the way out of a failure, which is what the caller should hear of."""
    try:
        os.unlink(path)
    except OSError:
        pass

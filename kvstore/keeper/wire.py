"""The kernel's side of FUSE as far as the keeper reads or changes it: <linux/fuse.h>, protocol 7.40 and later.

Offsets count from the start of a message, head included. Requests are `bytes`, replies are views that may be changed
in place.
"""

from __future__ import annotations

import enum
import errno
import os
import struct
from typing import Final, NamedTuple


class Op(enum.IntEnum):
    """Requests that the keeper knows by name."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    GETXATTR = 22
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    CREATE = 35
    INTERRUPT = 36
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    RENAME2 = 45


IN_HEAD: Final = struct.Struct("<IIQQIIIHH")
"""length, opcode, unique, inode, uid, gid, pid, extension length, padding."""
IN_START: Final = struct.Struct("<IIQQ")
"""The part of it that the relay reads."""
OUT_HEAD: Final = struct.Struct("<IiQ")
"""length, -errno, unique (0: a notification)."""
OPEN_OUT: Final = struct.Struct("<QIi")
"""handle, FOPEN flags, backing id."""
ENTRY_SIZE: Final = 128
"""fuse_entry_out; its first field is the inode number."""

# Where things stand.
UNIQUE_AT: Final = 8
BODY_AT: Final = IN_HEAD.size
OPENED_AT: Final = OUT_HEAD.size
CREATED_AT: Final = OUT_HEAD.size + ENTRY_SIZE
OPENED_SIZE: Final = OPENED_AT + OPEN_OUT.size
CREATED_SIZE: Final = CREATED_AT + OPEN_OUT.size

FOPEN_DIRECT_IO: Final = 1 << 0
FOPEN_NOFLUSH: Final = 1 << 5
FOPEN_PASSTHROUGH: Final = 1 << 7

# INIT. Bits of `flags`, and of `flags2`, which counts only with INIT_EXT.
PARALLEL_DIROPS: Final = 1 << 18
HANDLE_KILLPRIV_V2: Final = 1 << 28
"""The kernel asks for no `security.capability` before a write: writes by passthrough go on while nobody answers. (There
are none: the mount is nosuid.)
"""
INIT_EXT: Final = 1 << 30
PASSTHROUGH2: Final = 1 << 5
MAX_STACK_DEPTH: Final = 1
"""Backing files may not lie on a stacked file system themselves (overlayfs: ELOOP)."""
_INIT_IN: Final = struct.Struct("<IIIII")
"""major, minor, max_readahead, flags, flags2."""
_INIT_IN_MIN: Final = BODY_AT + _INIT_IN.size
_INIT_OUT_SIZE: Final = 64
_INIT_FLAGS_AT: Final = OUT_HEAD.size + 12
_INIT_FLAGS2_AT: Final = OUT_HEAD.size + 32
_INIT_DEPTH_AT: Final = OUT_HEAD.size + 36
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_RELEASE_IN: Final = struct.Struct("<QIIQ")
"""handle, open flags, release flags, lock owner."""
_GETXATTR_NAME_AT: Final = BODY_AT + 8
_WRITE_FLAGS_AT: Final = BODY_AT + 32

NO_REPLY: Final = frozenset({Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT, Op.NOTIFY_REPLY})
"""Nobody waits for these, and our file system needs none of them."""
_FIXED_PART: Final = {
    Op.CREATE: 16, Op.MKNOD: 16, Op.MKDIR: 8, Op.UNLINK: 0, Op.RMDIR: 0, Op.SYMLINK: 0,
    Op.RENAME: 8, Op.RENAME2: 16, Op.LINK: 8,
}  # fmt: skip
"""Bytes between the head and the names."""
CHANGES_NAMES: Final = frozenset(_FIXED_PART)


def reply(unique: int, error: int, body: bytes = b"") -> bytes:
    """`error`: an errno, 0 for success."""
    return OUT_HEAD.pack(OUT_HEAD.size + len(body), -error, unique) + body


def last_answer(unique: int, opcode: int) -> bytes:
    """What a request is told when nobody else answers: EIO. A close cannot fail and is believed."""
    return reply(unique, 0 if opcode in (Op.RELEASE, Op.RELEASEDIR) else errno.EIO)


def release(unique: int, inode: int, handle: int, *, directory: bool) -> bytes:
    """A RELEASE or RELEASEDIR as the kernel would send it."""
    opcode = Op.RELEASEDIR if directory else Op.RELEASE
    size = IN_HEAD.size + _RELEASE_IN.size
    return IN_HEAD.pack(size, opcode, unique, inode, 0, 0, 0, 0, 0) + _RELEASE_IN.pack(handle, 0, 0, 0)


def with_unique(message: bytes, unique: int) -> bytes:
    return message[:UNIQUE_AT] + _U64.pack(unique) + message[UNIQUE_AT + 8 :]


def released_handle(request: bytes) -> int:
    return int(_U64.unpack_from(request, BODY_AT)[0])


def open_flags(request: bytes) -> int:
    """O_… of an OPEN or CREATE."""
    return int(_U32.unpack_from(request, BODY_AT)[0])


def only_reads(flags: int) -> bool:
    """Whether a handle opened with these O_… flags cannot have changed anything at its close."""
    return not flags & (os.O_ACCMODE | os.O_TRUNC)


def appends(write: bytes) -> bool:
    """Whether a WRITE is through a handle with O_APPEND: sent twice, it would be written twice."""
    return bool(_U32.unpack_from(write, _WRITE_FLAGS_AT)[0] & os.O_APPEND)


def xattr_name(request: bytes) -> bytes:
    """Of a GETXATTR."""
    return request[_GETXATTR_NAME_AT:].rstrip(b"\0")


def entry_inode(message: memoryview) -> int:
    """Of a CREATE reply: its first field is the new inode's number."""
    return int(_U64.unpack_from(message, OUT_HEAD.size)[0])


class Names(NamedTuple):
    name: bytes
    new_inode: int
    """RENAME: the new parent; else 0."""
    new_name: bytes


def names(opcode: int, request: bytes) -> Names:
    """What a request of `CHANGES_NAMES` is about."""
    fixed = _FIXED_PART[Op(opcode)]
    parts = request[BODY_AT + fixed :].split(b"\0")
    new_inode = int(_U64.unpack_from(request, BODY_AT)[0]) if opcode in (Op.RENAME, Op.RENAME2) else 0
    new_name = parts[1] if opcode in (Op.RENAME, Op.RENAME2, Op.SYMLINK) else b""
    return Names(parts[0], new_inode, new_name)


def offers_passthrough(init_request: bytes) -> bool:
    """Whether the kernel that sent this INIT knows passthrough (6.9 and later)."""
    if len(init_request) < _INIT_IN_MIN:
        return False
    _, _, _, flags, flags2 = _INIT_IN.unpack_from(init_request, BODY_AT)
    return bool(flags & INIT_EXT and flags2 & PASSTHROUGH2)


def patch_init(request: bytes, message: memoryview) -> None:
    """Switch on, in an INIT reply, what libfuse 3.14 does not know: passthrough, and look-ups side by side."""
    if not offers_passthrough(request) or len(message) < OUT_HEAD.size + _INIT_OUT_SIZE:
        return
    flags, flags2 = _U32.unpack_from(message, _INIT_FLAGS_AT)[0], _U32.unpack_from(message, _INIT_FLAGS2_AT)[0]
    _U32.pack_into(message, _INIT_FLAGS_AT, flags | INIT_EXT | PARALLEL_DIROPS | HANDLE_KILLPRIV_V2)
    _U32.pack_into(message, _INIT_FLAGS2_AT, flags2 | PASSTHROUGH2)
    _U32.pack_into(message, _INIT_DEPTH_AT, MAX_STACK_DEPTH)


def init_reply(unique: int, max_write: int = 1 << 20) -> bytearray:
    """An INIT reply of protocol 7.31 with nothing special in it, ready to be patched: for probes."""
    body = struct.pack("<IIIIHHIIHHII", 7, 31, 128 * 1024, 0, 12, 9, max_write, 1, max_write // 4096, 0, 0, 0)
    return bytearray(reply(unique, 0, body.ljust(_INIT_OUT_SIZE, b"\0")))

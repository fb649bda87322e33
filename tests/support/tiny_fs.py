"""A small but whole file system process for the keeper's tests: FUSE messages by hand, standard library only.

    python -m tests.support.tiny_fs DIRECTORY [--exit CODE] [--start-delay S] [--mute]

It shows the regular files of DIRECTORY (flat); an inode's number is that of the file behind it, so a successor finds
everything again. Files are served by passthrough, those called ``direct…`` by READ and WRITE. A look-up of ``sleep-S``
takes S seconds, one of ``die`` ends the process, one of ``notify-S`` sends a notification about its directory first.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.keeper import channel, wire
from kvstore.keeper.channel import PASSTHROUGH_BIT, Inheritance, Kind, Table
from kvstore.keeper.wire import Op

ROOT: Final = 1
BEAT_S: Final = 0.2
BUFFER: Final = (1 << 20) + (64 << 10)
_ATTR: Final = struct.Struct("<6Q10I")
_ENTRY: Final = struct.Struct("<4Q2I")
_ATTR_HEAD: Final = struct.Struct("<QII")
_READ: Final = struct.Struct("<QQI")
_SETATTR: Final = struct.Struct("<IIQQ")
_STATFS: Final = struct.Struct("<5Q4I24x")
_DIRENT: Final = struct.Struct("<QQII")
_INVALIDATE: Final = struct.Struct("<QII")
_NOTIFY_INVAL_ENTRY: Final = 3
_SIZE_VALID: Final = 1 << 3


class Request(NamedTuple):
    opcode: int
    unique: int
    inode: int
    body: bytes

    @property
    def name(self) -> str:
        return os.fsdecode(self.body.split(b"\0")[0])


class TinyFs:
    def __init__(self, directory: str, inheritance: Inheritance, *, mute: bool) -> None:
        self.directory, self.mute = directory, mute
        self.fuse = socket.socket(fileno=inheritance.fuse_fd)
        self.control = socket.socket(fileno=inheritance.control_fd)
        self.state_fd = inheritance.state_fd
        self.generation = inheritance.generation
        self.kept: dict[int, int] = {}
        self.files: dict[int, int] = {}
        """handle → fd"""
        self.again: set[tuple[int, bytes]] = set()
        self.next_handle = 1
        self.over = False
        self.answers: dict[int, Callable[[Request], bytes]] = {
            Op.INIT: self.init,
            Op.LOOKUP: self.lookup,
            Op.GETATTR: lambda r: _attr_out(self.stat(r.inode)),
            Op.SETATTR: self.setattr,
            Op.OPEN: self.open,
            Op.CREATE: self.create,
            Op.READ: self.read,
            Op.WRITE: self.write,
            Op.RELEASE: self.release,
            Op.FLUSH: lambda r: b"",
            Op.FSYNC: lambda r: b"",
            Op.OPENDIR: lambda r: wire.OPEN_OUT.pack(self.new_handle(), 0, 0),
            Op.READDIR: self.readdir,
            Op.RELEASEDIR: lambda r: b"",
            Op.UNLINK: self.unlink,
            Op.RENAME: self.rename,
            Op.STATFS: lambda r: _STATFS.pack(1000, 1000, 1000, 1000, 1000, 4096, 255, 4096, 0),
        }

    # The process.

    def run(self) -> None:
        channel.send(self.control, Kind.READY)
        if not self.mute:
            threading.Thread(target=self.beat, daemon=True).start()
        while not self.over:
            ready, _, _ = select.select([self.control, self.fuse], [], [])
            if self.control in ready:
                self.hear(channel.receive(self.control))
            elif self.fuse in ready:
                data = self.fuse.recv(BUFFER)
                if not data:
                    return
                self.serve(data)

    def beat(self) -> None:
        """On a thread: a slow request is no sign of death."""
        while True:
            channel.send(self.control, Kind.BEAT)
            time.sleep(BEAT_S)

    def hear(self, message: channel.Message) -> None:
        if message.kind == Kind.KEPT:
            self.kept |= dict(zip(message.json(), message.fds, strict=True))
        elif message.kind == Kind.TAKE:
            with open(message.fds[0], "rb") as file:
                self.take_over(Table.from_json(file.read()))
        else:
            self.over = True

    def take_over(self, table: Table) -> None:
        for handle, inode, is_directory in table.opens:
            self.next_handle = max(self.next_handle, (handle & ~PASSTHROUGH_BIT) + 1)
            if not is_directory:
                fd = self.kept.pop(inode, -1)
                self.files[handle] = fd if fd >= 0 else os.open(self.path(self.name_of(inode)), os.O_RDWR)
        self.again = {(a.opcode, a.name) for a in table.again}
        lived = len(os.pread(self.state_fd, 1000, 0))
        os.pwrite(self.state_fd, b"x", lived)
        facts = {"generation": str(self.generation), "lived": str(lived), "again": str(len(table.again))}
        said = {"line": f"tiny file system {os.getpid()}", "facts": facts}
        channel.send(self.control, Kind.SERVING, text=json.dumps(said).encode())

    def serve(self, data: bytes) -> None:
        _, opcode, unique, inode = wire.IN_START.unpack_from(data)
        request = Request(opcode, unique, inode, data[wire.BODY_AT :])
        answer = self.answers.get(opcode)
        try:
            if answer is None:
                raise OSError(errno.ENOSYS, "")
            self.fuse.send(wire.reply(unique, 0, answer(request)))
        except OSError as error:
            self.fuse.send(wire.reply(unique, error.errno or errno.EIO))

    # Names.

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def name_of(self, inode: int) -> str:
        for name in os.listdir(self.directory):
            if os.stat(self.path(name)).st_ino == inode:
                return name
        raise FileNotFoundError(errno.ENOENT, "")

    def stat(self, inode: int) -> os.stat_result:
        if inode == ROOT:
            return os.stat(self.directory)
        for fd in self.files.values():
            if os.fstat(fd).st_ino == inode:
                return os.fstat(fd)
        return os.stat(self.path(self.name_of(inode)))

    # Requests.

    def init(self, request: Request) -> bytes:
        return bytes(wire.init_reply(0)[wire.OUT_HEAD.size :])

    def lookup(self, request: Request) -> bytes:
        if request.name == "die":
            os._exit(9)
        if request.name.startswith("notify-"):
            body = _INVALIDATE.pack(ROOT, 1, 0) + b"x\0"
            self.fuse.send(wire.OUT_HEAD.pack(wire.OUT_HEAD.size + len(body), _NOTIFY_INVAL_ENTRY, 0) + body)
        if request.name.startswith(("sleep-", "notify-")):
            time.sleep(float(request.name.partition("-")[2]))
            raise OSError(errno.ENOENT, "")
        return _entry(os.stat(self.path(request.name)))

    def setattr(self, request: Request) -> bytes:
        valid, _, _, size = _SETATTR.unpack_from(request.body)
        if valid & _SIZE_VALID:
            os.truncate(self.path(self.name_of(request.inode)), size)
        return _attr_out(self.stat(request.inode))

    def new_handle(self) -> int:
        self.next_handle += 1
        return self.next_handle

    def opened(self, fd: int, name: str) -> bytes:
        handle, flags = self.new_handle(), wire.FOPEN_DIRECT_IO
        if not name.startswith("direct"):
            handle, flags = handle | PASSTHROUGH_BIT, 0
            channel.send(self.control, Kind.OFFER, os.fstat(fd).st_ino, fds=[fd])
        self.files[handle] = fd
        return wire.OPEN_OUT.pack(handle, flags, 0)

    def open(self, request: Request) -> bytes:
        flags = struct.unpack_from("<I", request.body)[0]
        name = self.name_of(request.inode)
        return self.opened(os.open(self.path(name), os.O_RDWR | flags & os.O_TRUNC), name)

    def create(self, request: Request) -> bytes:
        flags, mode = struct.unpack_from("<II", request.body)
        request = request._replace(body=request.body[16:])
        exclusive = 0 if (Op.CREATE, os.fsencode(request.name)) in self.again else flags & os.O_EXCL
        fd = os.open(self.path(request.name), os.O_RDWR | os.O_CREAT | exclusive | flags & os.O_TRUNC, mode & 0o777)
        return _entry(os.fstat(fd)) + self.opened(fd, request.name)

    def read(self, request: Request) -> bytes:
        handle, offset, size = _READ.unpack_from(request.body)
        return os.pread(self.files[handle], size, offset)

    def write(self, request: Request) -> bytes:
        handle, offset, size = _READ.unpack_from(request.body)
        return struct.pack("<II", os.pwrite(self.files[handle], request.body[40 : 40 + size], offset), 0)

    def release(self, request: Request) -> bytes:
        fd = self.files.pop(struct.unpack_from("<Q", request.body)[0])
        inode = os.fstat(fd).st_ino
        os.close(fd)
        if not any(os.fstat(other).st_ino == inode for other in self.files.values()):
            channel.send(self.control, Kind.DROP, inode)
        return b""

    def readdir(self, request: Request) -> bytes:
        _, offset, size = _READ.unpack_from(request.body)
        data = b""
        for i, name in enumerate(sorted(os.listdir(self.directory)), 1):
            raw = os.fsencode(name)
            kind = stat.S_IFMT(os.stat(self.path(name)).st_mode) >> 12
            entry = _DIRENT.pack(os.stat(self.path(name)).st_ino, i, len(raw), kind) + raw
            entry += b"\0" * (-len(entry) % 8)
            if i > offset and len(data) + len(entry) <= size:
                data += entry
        return data

    def unlink(self, request: Request) -> bytes:
        try:
            inode = os.stat(self.path(request.name)).st_ino
            held = [fd for fd in self.files.values() if os.fstat(fd).st_ino == inode]
            if held:
                channel.send(self.control, Kind.KEEP, inode, fds=held[:1])
            os.unlink(self.path(request.name))
        except FileNotFoundError:
            if (Op.UNLINK, os.fsencode(request.name)) not in self.again:
                raise
        return b""

    def rename(self, request: Request) -> bytes:
        old, new, *_ = request.body[8:].split(b"\0")
        try:
            os.rename(self.path(os.fsdecode(old)), self.path(os.fsdecode(new)))
        except FileNotFoundError:
            if (Op.RENAME, old) not in self.again:
                raise
        return b""


def _attr(st: os.stat_result) -> bytes:
    inode = ROOT if stat.S_ISDIR(st.st_mode) else st.st_ino
    times = int(st.st_atime), int(st.st_mtime), int(st.st_ctime)
    return _ATTR.pack(inode, st.st_size, st.st_blocks, *times, 0, 0, 0, st.st_mode, 1, 0, 0, 0, 4096, 0)


def _attr_out(st: os.stat_result) -> bytes:
    return _ATTR_HEAD.pack(0, 0, 0) + _attr(st)


def _entry(st: os.stat_result) -> bytes:
    return _ENTRY.pack(st.st_ino, 0, 0, 0, 0, 0) + _attr(st)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--start-delay", type=float, default=0.0)
    parser.add_argument("--mute", action="store_true", help="give no sign of life")
    options = parser.parse_args()
    if options.exit is not None:
        print("told to fail", file=sys.stderr)
        sys.exit(options.exit)
    time.sleep(options.start_delay)
    inheritance = Inheritance.from_environment()
    assert inheritance is not None
    try:
        TinyFs(options.directory, inheritance, mute=options.mute).run()
    except (channel.Closed, BrokenPipeError):  # the keeper is gone
        pass


if __name__ == "__main__":
    main()

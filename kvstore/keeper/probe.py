"""Whether passthrough works here: a trial mount that takes about a millisecond and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.keeper import wire
from kvstore.keeper.device import DEVICE, MAX_MESSAGE_BYTES, Device, Unmounted
from kvstore.keeper.process import SOCKET_BYTES, force_buffers

_INIT_TIMEOUT_S: Final = 2.0


def why_not(fds: Sequence[tuple[str, int]] = ()) -> str | None:
    """None when it works; else one line why not. `fds`: (label, open file), one for each volume to be served."""
    try:
        _check_sockets()
        with _trial_mount() as device:
            _negotiate(device)
            _try_backing(device, fds)
    except _No as no:
        return str(no)
    return None


class _No(Exception):
    """With the line."""


def _check_sockets() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            force_buffers(ours, SOCKET_BYTES)
        except PermissionError:
            raise _No(
                "no CAP_NET_ADMIN: run as root, or give it to the container (the relay's socket buffers)"
            ) from None


@contextlib.contextmanager
def _trial_mount() -> Iterator[Device]:
    directory = tempfile.mkdtemp(prefix="kvstore-probe-")
    try:
        try:
            device = Device(directory)
        except OSError as error:
            raise _No(f"cannot open {DEVICE}: {error.strerror}") from None
        with contextlib.closing(device):
            try:
                device.mount(allow_other=False)
            except PermissionError:
                raise _No("no CAP_SYS_ADMIN: run as root, or give it to the container") from None
            except OSError as error:
                raise _No(f"cannot mount: {error.strerror}") from None
            try:
                yield device
            finally:
                device.unmount(lazy=True)
    finally:
        os.rmdir(directory)


def _negotiate(device: Device) -> None:
    request = _init_request(device)
    if not wire.offers_passthrough(request):
        raise _No(f"kernel {os.uname().release} has no FUSE passthrough (6.9 and later do)")
    unique = wire.IN_START.unpack_from(request)[2]
    reply = wire.init_reply(unique)
    wire.patch_init(request, memoryview(reply))
    if code := device.write(memoryview(reply)):
        raise _No(f"the kernel refuses the negotiation: {os.strerror(code)}")


def _init_request(device: Device) -> bytes:
    """The kernel sends it with the mount."""
    buffer, end = bytearray(MAX_MESSAGE_BYTES), time.monotonic() + _INIT_TIMEOUT_S
    while (left_s := end - time.monotonic()) > 0:
        select.select([device], [], [], left_s)
        try:
            return bytes(buffer[: device.read_into(buffer)])
        except BlockingIOError:
            continue
        except Unmounted:
            break
    raise _No("the kernel sends no FUSE requests")


def _try_backing(device: Device, fds: Sequence[tuple[str, int]]) -> None:
    memory = os.memfd_create("kvstore-probe")
    try:
        for label, fd in [("memory", memory), *fds]:
            try:
                device.backing_close(device.backing_open(fd))
            except OSError as error:
                raise _No(_refusal(label, error)) from None
    finally:
        os.close(memory)


def _refusal(label: str, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return f"overlayfs cannot back (ELOOP): {label}; put it on a file system of its own"
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTTY):
        return (
            f"the kernel allows no passthrough ({os.strerror(error.errno)}): see CAP_SYS_ADMIN, CONFIG_FUSE_PASSTHROUGH"
        )
    return f"the kernel cannot pass through to {label}: {error.strerror}"

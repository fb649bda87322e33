"""The one tree of errors.

Every error the product raises is a `KvError`. A class says with four attributes what a caller may do:

* ``code``: stable number on the wire (`rpc.status` maps it to a gRPC status and back);
* ``errno``: what a FUSE caller gets;
* ``retriable``: whether the same call may be repeated, now or after a back-off;
* ``reason``: one stable word for metrics, logs and ``NotFound.reason``.
"""

from __future__ import annotations

import errno as _errno
from typing import ClassVar


class KvError(Exception):
    """Root of all errors of kvstore; ``str(error)`` is one line that says what to do."""

    code: ClassVar[int] = 1
    errno: ClassVar[int] = _errno.EIO
    retriable: ClassVar[bool] = False
    reason: str = "internal"

    def __init__(
        self, message: str = "", *, reason: str | None = None, fault: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message or self.reason)
        if reason is not None:
            self.reason = reason
        self.fault = fault
        """Whose fault it was (a node id or address), where that is known: breakers belong to links (rule 29)."""
        self.retry_after_s = retry_after_s
        """How long whoever refused wants to be left alone; 0: it did not say."""

    @property
    def message(self) -> str:
        return str(self.args[0])


class InvalidRequest(KvError):
    code, errno, reason = 2, _errno.EINVAL, "invalid"


class NameTooLong(InvalidRequest):
    code, errno, reason = 17, _errno.ENAMETOOLONG, "name_too_long"


class TooLarge(InvalidRequest):
    code, errno, reason = 18, _errno.EFBIG, "too_large"


class OtherPolicy(InvalidRequest):
    """What holds for a directory's blocks would change by its rename: copy it instead, as mv(1) does at EXDEV."""

    code, errno, reason = 19, _errno.EXDEV, "other_policy"


class NotFound(KvError):
    """A miss. ``reason`` says why: no_name, no_replica, corrupt, timeout, unavailable, stale."""

    code, errno, reason = 3, _errno.ENOENT, "no_name"


class AlreadyExists(KvError):
    code, errno, reason = 4, _errno.EEXIST, "exists"


class NotEmpty(KvError):
    code, errno, reason = 5, _errno.ENOTEMPTY, "not_empty"


class NotDirectory(KvError):
    code, errno, reason = 6, _errno.ENOTDIR, "not_directory"


class IsDirectory(KvError):
    code, errno, reason = 7, _errno.EISDIR, "is_directory"


class ReadOnly(KvError):
    code, errno, reason = 8, _errno.EROFS, "read_only"


class Stale(KvError):
    """What the caller knows is out of date: look up again, then retry."""

    code, errno, reason, retriable = 9, _errno.ESTALE, "stale", True


class Unavailable(KvError):
    """Nobody answered, or it was the wrong one: retry elsewhere, or later."""

    code, errno, reason, retriable = 10, _errno.EIO, "unavailable", True


class Overloaded(KvError):
    """A bound was reached, and nothing has happened: back off for `retry_after_s` at least, then retry."""

    code, errno, reason, retriable = 11, _errno.EAGAIN, "overloaded", True


class NoSpace(KvError):
    code, errno, reason = 12, _errno.ENOSPC, "no_space"


class Denied(KvError):
    code, errno, reason = 13, _errno.EACCES, "denied"


class Timeout(KvError):
    """The deadline passed; the operation may or may not have happened."""

    code, errno, reason = 14, _errno.ETIMEDOUT, "timeout"


class Corrupt(KvError):
    """Bytes differ from their recorded hash: quarantine, other replica, or miss."""

    code, errno, reason = 15, _errno.EIO, "corrupt"


class Unsupported(KvError):
    code, errno, reason = 16, _errno.ENOTSUP, "unsupported"


def _all_classes(root: type[KvError]) -> list[type[KvError]]:
    return [root, *(c for sub in root.__subclasses__() for c in _all_classes(sub))]


BY_CODE: dict[int, type[KvError]] = {c.code: c for c in _all_classes(KvError)}
"""Wire code → class. Code 0 means success and has no class."""


def from_wire(code: int, message: str, reason: str = "") -> KvError:
    """The error that a peer named by its code; an unknown code (a newer peer) is a plain `KvError`."""
    return BY_CODE.get(code, KvError)(message, reason=reason or None)


MISSES = (Stale, Unavailable, Timeout, Corrupt, NotFound)
"""What ends as a miss (`NotFound`, ENOENT) for a *reader* once every replica was tried."""

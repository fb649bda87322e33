"""Whether open files are served by FUSE passthrough: the kernel then reads and writes a file of ours by itself, and no
READ or WRITE reaches a handler.
"""

from __future__ import annotations


class Backing:
    """Plain FUSE: every byte passes through the handlers. `fuse.attached` has the other one."""

    passthrough = False

    def offer(self, inode: int, fd: int) -> None:
        """The file behind the passthrough reply that follows for this inode. A read-only fd, which stays the caller's:
        the kernel opens the file anew with the flags of whoever opens the inode.
        """

    def keep(self, id: int, fd: int) -> None:
        """Bytes that a successor of this process needs: the keeper holds a duplicate until `drop`."""

    def drop(self, id: int) -> None: ...


PLAIN = Backing()

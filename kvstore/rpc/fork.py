"""What a forked child must not use of its parent's: sockets, channels, locks that another thread held.

`os.register_at_fork` cannot be undone, so there is one handler for the process and a weak set of those it tells: the
one piece of module state, with what a link leaves to the end of the child's process (`link.py`).
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def forget(self) -> None:
        """Called in the child, before anything else runs there: drop what is the parent's, take no lock."""


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(what: Forkable) -> None:
    _watched.add(what)


def _in_child() -> None:
    for what in list(_watched):
        what.forget()


os.register_at_fork(after_in_child=_in_child)

"""Who owns what is not published yet (rule 11). Pure: times come in, decisions go out.

A session is an SDK client or a mount, not a connection. It lives while it has a connection or a call; after that its
grace runs, and when that is over what it left behind may be dropped. Sessions nobody has seen since the worker's
start began their grace then: the mount behind a staging file that was found may come back.
"""

from __future__ import annotations

import dataclasses

from kvstore.core.errors import Overloaded
from kvstore.core.limits import MAX_SESSIONS, RETRY_AFTER_S


@dataclasses.dataclass(slots=True)
class _Session:
    connections: int = 0
    ended_s: float = 0.0


class Sessions:
    """``_known`` holds every session that has a connection or left one less than a grace ago."""

    def __init__(self, grace_s: float, started_s: float) -> None:
        self.grace_s = grace_s
        self._started_s = started_s
        self._known: dict[int, _Session] = {}

    def __len__(self) -> int:
        """Sessions with a connection."""
        return sum(1 for session in self._known.values() if session.connections)

    def enter(self, session: int) -> None:
        """One more connection (or call) of this session. Raises Overloaded when too many are known already."""
        if session not in self._known and len(self._known) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} sessions are known here; retry later", retry_after_s=RETRY_AFTER_S)
        self._known.setdefault(session, _Session()).connections += 1

    def leave(self, session: int, now_s: float) -> None:
        """One less; with the last one the grace begins."""
        state = self._known[session]
        state.connections -= 1
        state.ended_s = now_s

    def is_over(self, session: int, now_s: float) -> bool:
        """Whether nobody will come back for what the session left."""
        state = self._known.get(session)
        if state is None:
            return now_s >= self._started_s + self.grace_s
        return state.connections == 0 and now_s >= state.ended_s + self.grace_s

    def forget_over(self, now_s: float) -> None:
        """Drop what `is_over` would answer the same for without remembering it."""
        if now_s >= self._started_s + self.grace_s:
            for session in [s for s in self._known if self.is_over(s, now_s)]:
                del self._known[session]

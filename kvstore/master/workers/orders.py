"""What workers are told with the answers to their calls, as plain values: the master never calls anyone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.master.namespace.quotas import Order, Table
from kvstore.master.workers.names import Names
from kvstore.master.workers.reports import Judged


class Orders(NamedTuple):
    """What a worker is told with the answer to its call."""

    register: bool = False
    full_report: bool = False
    unlink: Sequence[bytes] = ()
    report_again: Sequence[bytes] = ()
    send_names: bool = False
    over: Sequence[Order] = ()
    """What the worker is to give up for quotas."""
    policies: Table | None = None
    """Only when it has another one."""


class Answer(NamedTuple):
    """To a report. `gap`: not taken."""

    next_report: int
    gap: bool = False
    held: Judged = Judged()
    full: Judged = Judged()
    orders: Orders = Orders()
    names: Names = Names()

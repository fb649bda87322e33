"""Staging that is given up on the way out of a failure costs no more than the caller's own time."""

from __future__ import annotations

import asyncio
import os
import time

from kvstore.client.blocks import ABANDON_TIMEOUT_S, abandon
from kvstore.client.connection import TOLD_S
from kvstore.client.deadline import Deadline
from kvstore.client.staging import Staging
from kvstore.core.errors import Timeout


class Silent:
    """Blocks of a worker that takes everything and answers nothing."""

    async def abort(self, staging: Staging, *, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        raise Timeout("silent")


async def took_s(deadline: Deadline) -> float:
    blocks, began_s = Silent(), time.monotonic()
    staging = Staging(blocks, os.open(os.devnull, os.O_RDWR), handle=1)
    await abandon(blocks, staging, deadline)  # type: ignore[arg-type]
    return time.monotonic() - began_s


async def test_a_caller_whose_time_is_over_waits_no_longer_than_the_message_takes_to_be_sent() -> None:
    assert TOLD_S <= await took_s(Deadline(0)) < ABANDON_TIMEOUT_S / 2


async def test_a_caller_with_time_left_waits_for_the_answer_within_it() -> None:
    assert 0.2 <= await took_s(Deadline(0.25)) < ABANDON_TIMEOUT_S

"""Who calls: threads as the kernel names them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("pyfuse3")

from kvstore.fuse.translation import thread_group


def test_every_thread_belongs_to_its_process() -> None:
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_native_id).result()
        assert thread != os.getpid()
        assert [thread_group(thread), thread_group(os.getpid())] == [os.getpid()] * 2
    assert thread_group(os.getppid()) == os.getppid()


@pytest.mark.parametrize("thread", [0, -1, 2**31 - 1])
def test_of_a_thread_that_is_not_there_nothing_is_known(thread: int) -> None:
    assert thread_group(thread) == 0

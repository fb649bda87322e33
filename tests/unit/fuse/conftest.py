from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.small_volume import Time


@pytest.fixture
async def runtime() -> AsyncIterator[Time]:
    runtime = Time(1)
    yield runtime
    runtime.close()

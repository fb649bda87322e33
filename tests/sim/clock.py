"""The clocks and the randomness of the whole interpreter, for the time of one simulation."""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Final, ParamSpec, TypeVar
from unittest import mock

from tests.sim.loop import Process, SimLoop

P = ParamSpec("P")
T = TypeVar("T")
EPOCH_NS: Final = 1_700_000_000_000_000_000


class SimRuntime:
    """A process's clock, randomness and threads (`kvstore.runtime.Runtime`)."""

    def __init__(self, process: Process, source: random.Random) -> None:
        self._process, self._random = process, source

    def wall_ns(self) -> int:
        return EPOCH_NS + int(self._process.loop.time() * 1e9) + self._process.skew_ns

    def monotonic_s(self) -> float:
        return self._process.loop.time()

    def random_u64(self) -> int:
        return self._random.getrandbits(64)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._process.loop.run_in_executor(None, partial(function, *args, **kwargs))

    def close(self) -> None:
        pass


@contextmanager
def virtual(loop: SimLoop, seed: int) -> Iterator[None]:
    """`time.monotonic`, `random` and `secrets` are the simulation's: deadlines and back-off ask them directly."""
    source, state = random.Random(seed), random.getstate()
    random.seed(seed)
    real = time.monotonic
    try:
        with (
            mock.patch.object(time, "monotonic", loop.time),
            mock.patch.object(secrets, "randbits", source.getrandbits),
            _defaults(real, loop.time),
        ):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _defaults(real: Callable[[], float], virtual: Callable[[], float]) -> Iterator[None]:
    """Functions of kvstore whose argument's default is the real clock (`clock=time.monotonic`)."""
    found = _with_default(real, len(sys.modules))
    before = [function.__defaults__ for function in found]
    for function in found:
        function.__defaults__ = tuple(virtual if value is real else value for value in function.__defaults__ or ())
    try:
        yield
    finally:
        for function, defaults in zip(found, before, strict=True):
            function.__defaults__ = defaults


@functools.lru_cache(1)
def _with_default(value: object, modules: int) -> list[FunctionType]:
    """`modules`: how many are loaded; with each new one there may be more."""
    return [function for function in _functions() if value in (function.__defaults__ or ())]


def _functions() -> Iterator[FunctionType]:
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("kvstore.")]
    for module in modules:
        for owner in [module, *(value for value in vars(module).values() if isinstance(value, type))]:
            yield from (value for value in vars(owner).values() if isinstance(value, FunctionType))

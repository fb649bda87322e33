"""LMCache's own FSConnector over a directory, as one engine process uses it.

`preload` imports LMCache (4 s) once in the test process; a `Connector` is made in a child (`tests.support.child`), so
that every one has a process, an arena and threads of its own. Chunks are bf16, [2, layers, tokens, hidden]:
`TOKEN_BYTES` a token, at most `CHUNK_TOKENS` tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

LAYERS, HEADS, HEAD_SIZE = 4, 2, 64
CHUNK_TOKENS: Final = 256
TOKEN_BYTES: Final = 2 * LAYERS * HEADS * HEAD_SIZE * 2
CHUNK_BYTES: Final = CHUNK_TOKENS * TOKEN_BYTES
ARENA_GIB: Final = 0.125
ENVIRONMENT: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
}
T = TypeVar("T")


class Setting(NamedTuple):
    """How the connector is configured. `direct` is ignored by LMCache while there is a header."""

    header: bool = True
    """`save_chunk_meta`: 28 bytes in front of the payload, in a write of their own."""
    direct: bool = False
    """`fs_connector_use_odirect`: no O_TRUNC, and one write whose result is ignored."""
    temporary_directory: bool = False
    """`fs_connector_relative_tmp_dir`: .tmp/KEY.data instead of KEY.tmp."""

    @property
    def extra_config(self) -> dict[str, object]:
        return {
            "save_chunk_meta": self.header,
            "fs_connector_use_odirect": self.direct,
            "fs_connector_relative_tmp_dir": ".tmp" if self.temporary_directory else None,
        }

    def __str__(self) -> str:
        header = "header" if self.header else "bare"
        return "-".join([header, *["direct"] * self.direct, *["tmpdir"] * self.temporary_directory])


def preload() -> None:
    """Import LMCache here, for all children. What it deprecates is not for this project's tests to mend."""
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lmcache.v1.storage_backend.connector.fs_connector
        import lmcache.v1.storage_backend.local_cpu_backend  # noqa: F401


def with_connector(directory: Path, setting: Setting, use: Callable[[Connector], Coroutine[Any, Any, T]]) -> T:
    """Run `use` on an event loop with a connector of this process's own."""

    async def run() -> T:
        return await use(Connector(directory, setting))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asyncio.run(run())


class Complaints(logging.Handler):
    """What LMCache logs instead of raising it: its get answers None for a torn file as for a missing one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if "No such file or directory" not in line:
            self.lines.append(line)


class Connector:
    """Puts and gets bytes by number of key. Makes the directory, like LMCache.

    `complaints`: every error but a miss that LMCache met in put or get.
    """

    def __init__(self, directory: Path, setting: Setting) -> None:
        import torch
        from lmcache.v1.storage_backend.connector.fs_connector import FSConnector, logger
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        torch.set_num_threads(1)
        log = Complaints()
        self.complaints = log.lines
        logger.handlers, logger.propagate = [log], False
        if setting.direct:
            directory.mkdir(exist_ok=True)  # it asks for the block size before it makes the directory
        self._config = _config(setting)
        self._backend = LocalCPUBackend(self._config, _metadata(), dst_device="cpu")
        self._connector = FSConnector(
            asyncio.get_running_loop(), self._backend, self._config, base_paths_str=str(directory)
        )

    async def put(self, number: int, data: bytes) -> None:
        """Raises what LMCache's put raises; `len(data)` is a multiple of TOKEN_BYTES."""
        memory_obj = self._allocate(len(data) // TOKEN_BYTES)
        try:
            memoryview(memory_obj.byte_array).cast("B")[:] = data
            await self._connector.put(_key(number), memory_obj)
        finally:
            memory_obj.ref_count_down()

    async def get(self, number: int) -> bytes | None:
        """None for a miss and for whatever LMCache treats as one."""
        memory_obj = await self._connector.get(_key(number))
        if memory_obj is None:
            return None
        try:
            return bytes(memory_obj.byte_array)
        finally:
            memory_obj.ref_count_down()

    async def exists(self, number: int) -> bool:
        return bool(await self._connector.exists(_key(number)))

    def _allocate(self, tokens: int) -> Any:
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        shape = torch.Size([2, LAYERS, tokens, HEADS * HEAD_SIZE])
        memory_obj = self._backend.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD, busy_loop=False)
        assert memory_obj is not None, "the arena is too small for what is in flight"
        return memory_obj


def _config(setting: Setting) -> Any:
    from lmcache.v1.config import LMCacheEngineConfig

    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=False,
        max_local_cpu_size=ARENA_GIB,
        lmcache_instance_id=f"kvstore-test-{os.getpid()}",
        extra_config=setting.extra_config,
    )


def _metadata() -> Any:
    import torch
    from lmcache.v1.metadata import LMCacheMetadata

    return LMCacheMetadata(
        model_name="test/model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_SIZE),
        use_mla=False,
    )


def _key(number: int) -> Any:
    """Every other hash is negative: such names have a minus sign in them."""
    import torch
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey("test/model", 1, 0, -number if number % 2 else number, torch.bfloat16)

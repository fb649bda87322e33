"""One real LMCache engine on CPU tensors, in a process of its own: stores a prompt's KV, or loads and compares it.

    python bench/lmcache_engine.py produce --url fs://localhost:0/DIR --chunks 16
    python bench/lmcache_engine.py consume --url fs://localhost:0/DIR --chunks 16

The last line on stdout is one JSON object; exit code 0 only when everything that was promised happened. Engine,
connector, serializer and allocator are LMCache's own; only the copy between the paged cache and a memory object is
ours, since LMCache's needs a GPU. ``local_cpu=False``: nothing but the remote tier can hit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

CHUNK_TOKENS = 256
SHAPES = {"qwen2-7b": (28, 4, 128), "llama-3-8b": (32, 8, 128), "tiny": (4, 2, 64)}
"""Model → layers, KV heads, head size: 14 MiB, 32 MiB and 0.5 MiB a chunk in bf16."""
CLOSE_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 120.0


class PagedCpuConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Paged tensors, one a layer, [2, slots, hidden] ⇄ LMCache's memory objects, [2, layers, tokens, hidden]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.layers, self.kinds, _, heads, size = shape
        self.hidden = heads * size

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        slots = kwargs["slot_mapping"][start:end]
        for layer, cache in enumerate(kwargs["kvcaches"]):
            memory_obj.tensor[:, layer].copy_(cache[:, slots])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        slots = kwargs["slot_mapping"][start:end]
        for layer, cache in enumerate(kwargs["kvcaches"]):
            cache[:, slots] = memory_obj.tensor[:, layer]

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([self.kinds, self.layers, num_tokens, self.hidden])


class Engine:
    """An LMCache engine with its remote backend, and the KV of one prompt."""

    def __init__(self, args: argparse.Namespace) -> None:
        layers, heads, size = SHAPES[args.model]
        self.metadata = LMCacheMetadata(
            model_name=args.model_name,
            world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(layers, 2, CHUNK_TOKENS, heads, size),
            use_mla=False,
        )  # fmt: skip
        self.name = f"kvstore-{args.role}"
        self.core = LMCacheEngineBuilder.get_or_create(
            self.name, self._config(args), self.metadata, PagedCpuConnector(self.metadata.kv_shape),
            mock_up_broadcast_fn, mock_up_broadcast_object_fn,
        )  # fmt: skip
        self.core.post_init()
        self.tokens = args.chunks * CHUNK_TOKENS
        generator = torch.Generator().manual_seed(args.seed)
        self.prompt = torch.randint(0, 150_000, (self.tokens,), generator=generator).tolist()
        self.slots = torch.randperm(self.tokens, generator=generator)

    def _config(self, args: argparse.Namespace) -> LMCacheEngineConfig:
        return LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=2.0,
            remote_url=args.url,
            remote_serde="naive",
            blocking_timeout_secs=60,
            lmcache_instance_id=f"kvstore-{args.role}-{os.getpid()}",
            extra_config=json.loads(args.extra),
        )

    @property
    def remote(self) -> Any:
        backends = self.core.storage_manager.storage_backends.items()
        return next(backend for name, backend in backends if name.startswith("RemoteBackend"))

    @property
    def chunk_bytes(self) -> int:
        return int(self.remote.connection.getWrappedConnector().full_chunk_size_bytes)

    def paged(self, seed: int | None) -> list[torch.Tensor]:
        """The paged cache: random KV by seed, zeros for None."""
        layers, kinds, _, heads, size = self.metadata.kv_shape
        shape = (kinds, self.tokens, heads * size)
        if seed is None:
            return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]
        base = torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
        return [(base + layer).view(torch.bfloat16).clone() for layer in range(layers)]

    def drain(self) -> None:
        """Puts are asynchronous: wait for the last."""
        end = time.monotonic() + DRAIN_TIMEOUT_S
        while self.remote.put_tasks:
            if time.monotonic() > end:
                raise SystemExit(f"{len(self.remote.put_tasks)} puts did not end in {DRAIN_TIMEOUT_S:g} s")
            time.sleep(0.0005)

    def close(self) -> None:
        """LMCache waits for its connector without a timeout: bounded here."""
        closer = threading.Thread(target=LMCacheEngineBuilder.destroy, args=(self.name,), daemon=True)
        closer.start()
        closer.join(CLOSE_TIMEOUT_S)


def produce(engine: Engine, seed: int) -> dict[str, Any]:
    """Store the prompt. ok: nothing was there before, no put failed, and everything is there after it."""
    source, before = engine.paged(seed), engine.core.lookup(engine.prompt)
    start = time.perf_counter()
    engine.core.store(tokens=engine.prompt, kvcaches=source, slot_mapping=engine.slots)
    engine.drain()
    seconds = time.perf_counter() - start
    after, failed = engine.core.lookup(engine.prompt), int(engine.remote.put_failed_count)
    return {
        "ok": before == 0 and after == engine.tokens and failed == 0,
        "hit_tokens_before": before,
        "stored_tokens": after,
        "put_failed": failed,
        "seconds": seconds,
    }


def consume(engine: Engine, seed: int) -> dict[str, Any]:
    """Load the prompt into an empty cache. ok: every chunk hit, every byte equal, an unknown prompt misses."""
    expected, loaded = engine.paged(seed), engine.paged(None)
    hit = engine.core.lookup(engine.prompt)
    start = time.perf_counter()
    mask = engine.core.retrieve(engine.prompt, kvcaches=loaded, slot_mapping=engine.slots)
    seconds = time.perf_counter() - start
    pairs = zip(expected, loaded, strict=True)
    equal = sum(int((a.view(torch.uint8) == b.view(torch.uint8)).sum()) for a, b in pairs)
    total = sum(tensor.nbytes for tensor in expected)
    unknown = engine.core.lookup([token + 1 for token in engine.prompt])
    retrieved = int(mask.sum())
    return {
        "ok": hit == retrieved == engine.tokens and equal == total and unknown == 0,
        "hit_tokens": hit,
        "retrieved_tokens": retrieved,
        "bytes_compared": total,
        "bytes_equal": equal,
        "unknown_prompt_hits": unknown,
        "seconds": seconds,
    }


def get(engine: Engine, seed: int) -> dict[str, Any]:
    """The connector's own gets, one after the other, without the copy into the paged cache; twice. ok: all came."""
    first_s, first = single_gets(engine)
    again_s, again = single_gets(engine)
    chunks = engine.tokens // CHUNK_TOKENS
    again_rate = engine.chunk_bytes * again / again_s / 1e6
    return {"ok": first == again == chunks, "got": first, "seconds": first_s, "again_MBps": again_rate}


def single_gets(engine: Engine) -> tuple[float, int]:
    """Seconds, and how many came."""
    keys = [key for _, _, key in engine.core.token_database.process_tokens(tokens=engine.prompt)]
    start = time.perf_counter()
    objects = [engine.remote.get_blocking(key) for key in keys]
    seconds = time.perf_counter() - start
    for memory_obj in objects:
        if memory_obj is not None:
            memory_obj.ref_count_down()
    return seconds, sum(o is not None for o in objects)


ROLES = {"produce": produce, "get": get, "consume": consume}
"""What an engine does."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--url", required=True, help="LMCACHE_REMOTE_URL, e.g. fs://localhost:0/mnt/kv/lmcache")
    parser.add_argument("--model", choices=SHAPES, default="qwen2-7b")
    parser.add_argument("--model-name", default="Qwen/Qwen2-7B-Instruct", help="part of every key")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--extra", default="{}", help="LMCache's extra_config, JSON")
    return parser.parse_args()


def run(args: argparse.Namespace) -> bool:
    torch.set_num_threads(1)
    engine = Engine(args)
    result = ROLES[args.role](engine, args.seed)
    size = engine.chunk_bytes * args.chunks
    facts = {"role": args.role, "pid": os.getpid(), "chunks": args.chunks, "chunk_bytes": engine.chunk_bytes}
    print(json.dumps({**facts, **result, "MBps": size / result["seconds"] / 1e6}), flush=True)
    engine.close()
    return bool(result["ok"])


def main() -> None:
    args = arguments()  # leaves by itself on wrong usage
    try:
        code = 0 if run(args) else 1
    except BaseException:  # noqa: BLE001 - os._exit below would hide it
        traceback.print_exc()
        code = 2
    sys.stderr.flush()
    os._exit(code)  # LMCache leaves threads behind that are no daemons


if __name__ == "__main__":
    main()

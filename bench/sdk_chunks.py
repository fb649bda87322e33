"""Chunks through the SDK, in a process of its own: what the demo moves where there is no FUSE.

    python bench/sdk_chunks.py produce --url kvstore://127.0.0.1:7070 --socket DIR/node-1/worker.sock
    python bench/sdk_chunks.py consume --url kvstore://127.0.0.1:7070 --socket DIR/node-2/worker.sock

The last line on stdout is one JSON object with the same fields as `lmcache_engine.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time

from kvstore import Client, KvError, NotFound, connect

PREFIX = "demo"


def chunk(seed: int, index: int, size: int) -> bytes:
    """The same bytes in every process."""
    return random.Random(seed * 1_000_003 + index).randbytes(size)


def name(index: int) -> str:
    return f"{PREFIX}/chunk-{index:04d}.data"


def produce(client: Client, args: argparse.Namespace) -> dict[str, object]:
    values = [(name(i), chunk(args.seed, i, args.chunk_bytes)) for i in range(args.chunks)]
    start = time.perf_counter()
    results = client.put_many(values)
    seconds = time.perf_counter() - start
    stored = sum(client.exists_many([path for path, _ in values]))
    failed = sum(isinstance(result, KvError) for result in results)
    return {
        "ok": stored == args.chunks and not failed,
        "put_failed": failed,
        "stored_chunks": stored,
        "seconds": seconds,
    }


def consume(client: Client, args: argparse.Namespace) -> dict[str, object]:
    buffer, equal, seconds = bytearray(args.chunk_bytes), 0, 0.0
    for index in range(args.chunks):
        start = time.perf_counter()
        size = client.get_into(name(index), buffer)
        seconds += time.perf_counter() - start
        if size == args.chunk_bytes and buffer == chunk(args.seed, index, args.chunk_bytes):
            equal += size
    total = args.chunks * args.chunk_bytes
    unknown = unknown_hits(client)
    return {
        "ok": equal == total and unknown == 0,
        "hit_chunks": equal // args.chunk_bytes,
        "bytes_compared": total,
        "bytes_equal": equal,
        "unknown_prompt_hits": unknown,
        "seconds": seconds,
    }


def unknown_hits(client: Client) -> int:
    try:
        client.get(f"{PREFIX}/never-stored.data")
    except NotFound:
        return 0
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["produce", "consume"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--socket", default="", help="the local worker's; empty = none")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--chunk-bytes", type=int, default=14_680_064)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with connect(args.url, worker_socket=args.socket) as client:
        result = (produce if args.role == "produce" else consume)(client, args)
    size = args.chunks * args.chunk_bytes
    facts = {"role": args.role, "pid": os.getpid(), "chunks": args.chunks, "chunk_bytes": args.chunk_bytes}
    print(json.dumps({**facts, **result, "MBps": size / float(str(result["seconds"])) / 1e6}), flush=True)
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()

"""The client SDK: `aio.AsyncClient` and `sync.Client` over the same pure parts.

`messages` (values ⇄ protobuf), `cache`, `deadline`, `url` decide; `meta` (master), `local` (the worker's
Unix socket), `remote` (frames), `cluster` (cached map, pooled channels) do I/O; `blocks` shows blocks as files and is
what the mount builds on.
"""

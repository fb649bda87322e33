"""The process that owns a mount: `/dev/fuse`, the relay, and what outlives the file system process. Stdlib only."""

"""The whole of kvstore in one process on a seeded event loop with virtual time; see `world`."""

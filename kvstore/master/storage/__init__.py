"""Rows, and how they become durable: RocksDB, its log, the journal, group commit."""

"""Names and blocks: one verb a file, over `tree` and `blocks`."""

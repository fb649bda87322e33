"""One volume and its disk: files, bytes, who holds what."""

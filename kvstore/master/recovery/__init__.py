"""A start, and names taken back from workers after the disk was lost, emptied or replaced."""

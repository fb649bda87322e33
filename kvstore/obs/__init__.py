"""What a process shows of itself: log lines, metrics, and the HTTP port that serves them.

Only the mains set these up. Library modules take a logger (``logging.getLogger(__name__)``) and, where they count
something, a `Metrics`; importing this package configures nothing.
"""

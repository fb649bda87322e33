"""What is told to the master and heard from it."""

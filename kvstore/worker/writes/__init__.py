"""How a block comes: sessions, staging, seal."""

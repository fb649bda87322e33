"""Clients and peers: the Unix socket, gRPC, opening and fetching."""

"""``python -m kvstore …`` is the `kvstore` command."""

from kvstore.cli.main import main

main()

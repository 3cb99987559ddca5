"""`python -m convoy` is `convoy`."""

from convoy.cli.app import main

main()

"""The `tcm` command: each subcommand one thin call into the library."""

from tcm.cli.main import app, main

__all__ = ["app", "main"]

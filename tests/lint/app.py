"""A command line of the lint room's commands alone."""

import typer

from toolkit.lint import commands

app = typer.Typer()
commands.register(app)

"""A command line with the linter's and the migration's commands alone."""

import typer

from toolkit.linting import commands
from toolkit.migration import commands as migration

app = typer.Typer()
commands.register(app)
migration.register(app)

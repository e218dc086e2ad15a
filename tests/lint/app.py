"""A command line with the linter's and the migration's commands alone."""

import typer

from toolkit.linting.commands import explain_command, lint_command
from toolkit.migration.commands import migrate_command

app = typer.Typer()
app.command("lint")(lint_command)
app.command("explain")(explain_command)
app.command("migrate")(migrate_command)

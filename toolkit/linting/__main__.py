"""`python -m toolkit.linting FILE...`: the same as `toolkit lint`."""

import typer

from toolkit.linting.commands import lint_command

if __name__ == "__main__":
    typer.run(lint_command)

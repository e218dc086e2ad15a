"""Entry point of the ``toolkit`` command: user errors become one message and an exit status."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Exit status 0: success, 1: failed, 2: invalid input, 130: interrupted."""
    from toolkit.cli import app
    from toolkit.command_line import name_overrides
    from toolkit.errors import ToolkitError

    try:
        app()
    except ToolkitError as error:
        print(name_overrides(str(error), sys.argv[1:]), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

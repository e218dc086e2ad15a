"""Start of the ``toolkit`` command: user's errors become one message and an exit status."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exits 0 done, 1 not so, 2 input cannot be used, 130 interrupted."""
    from toolkit.cli import app
    from toolkit.errors import ToolkitError

    try:
        app()
    except ToolkitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

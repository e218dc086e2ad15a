"""`python -m tools.lint_keys`: read every key out of the installed packages again."""

from importlib.resources import files
from pathlib import Path

from toolkit.linting import keys
from tools.lint_keys.build import encode
from tools.lint_keys.build_all import build_all

if __name__ == "__main__":
    for name, table in build_all().items():
        target = Path(str(files(keys))) / f"{name}-{table['version']}.json"
        target.write_text(encode(table), encoding="utf-8")
        print(f"wrote {target.name}: {sum(len(section) for section in table['sections'].values())} keys")

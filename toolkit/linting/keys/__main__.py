"""`python -m toolkit.linting.keys`: read every key out of the installed packages again."""

from pathlib import Path

from toolkit.linting.keys.build import encode
from toolkit.linting.keys.build_all import build_all

if __name__ == "__main__":
    for name, table in build_all().items():
        target = Path(__file__).parent / f"{name}-{table['version']}.json"
        target.write_text(encode(table), encoding="utf-8")
        print(f"wrote {target.name}: {sum(len(keys) for keys in table['sections'].values())} keys")

"""`python -m toolkit.lint.keys`: read every key out of the installed packages again."""

from pathlib import Path

from toolkit.lint.keys.build import build_all, encode

if __name__ == "__main__":
    for name, table in build_all().items():
        target = Path(__file__).parent / f"{name}-{table['version']}.json"
        target.write_text(encode(table), encoding="utf-8")
        print(f"wrote {target.name}: {sum(len(keys) for keys in table['sections'].values())} keys")

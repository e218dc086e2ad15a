"""`toolkit config`: the files of a recipe, and why each derived value is what it is."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import InputError
from toolkit.launch.files import launch_files, write_files
from toolkit.recipe.load import load_recipe
from toolkit.recipe.resolve import Resolved
from toolkit.results import Result, write_json
from toolkit.strategies import resolve


def config_command(
    recipe_file: str, overrides: Sequence[str], output: str | None, explain: bool, json_target: str | None
) -> None:
    """Write the launch files of ``recipe_file`` into ``output``; raises InputError."""
    result = Result("config")
    if output is None and not explain and json_target is None:
        raise InputError("toolkit config: give -o DIR to write the files, or --explain to see what they will say")
    resolved = resolve(load_recipe(recipe_file, overrides), recipe_file)
    written: list[str] = []
    if output is not None:
        try:
            paths = write_files(launch_files(resolved, output, recipe_file, overrides), output)
        except OSError as error:
            raise InputError(f"{output}: {error.strerror}") from None
        written = [str(path) for path in paths]
    told = []
    if explain:
        told += explained(resolved)
    if written:
        told.append(f"wrote {', '.join(written)}")
        told.append(f"next: {output}/launch.sh, or toolkit train {' '.join([recipe_file, *overrides])}")
    if json_target != "-":
        print("\n".join(told))
    if json_target:
        decisions = [vars(decision) for decision in resolved.decisions]
        fields = {"files": written, "decisions": decisions}
        write_json(result.finish(recipe_sha256=resolved.sha256, device=resolved.device, **fields), json_target)


def explained(resolved: Resolved) -> list[str]:
    """A line per decision: key, value, reason, in columns."""
    rows = [(decision.key, _shown(decision.value), decision.reason) for decision in resolved.decisions]
    width, value_width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [f"{key:<{width}}  {value:<{value_width}}  {reason}" for key, value, reason in rows]


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)

"""The model card of an export: contents, base model, training and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.recipe.model_facts import looks_local
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter, Recipe
from toolkit.recipe.yaml_text import dump
from toolkit.tasks import task_of


def model_card(kind: str, recipe: Recipe, resolved: Resolved, manifest: dict[str, Any], run: Path) -> str:
    """README.md in the hub's format. ``recipe``: as it was trained; ``resolved``: the same for one process. ``run``:
    the run folder with the metrics and a `toolkit verify` result."""
    path = recipe.model.path
    base = _public(path) if path is not None else f"random {(recipe.model.config or {})['model_type']}"
    head: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    if recipe.model.path and not Path(recipe.model.path).exists():
        head["base_model"] = recipe.model.path
    head["pipeline_tag"] = task_of(recipe.model.task).pipeline
    adapter = recipe.adapter
    everything = "full" if recipe.model.freeze else "full (all weights)"
    trained = everything if adapter is None else _settings(adapter)
    if resolved.base is not None:
        files = "" if resolved.stored is None else "as in its files: "
        trained += f"; base model's linear weights in 4 bits ({files}{resolved.base.card(resolved.stored)})"
    if recipe.model.freeze:
        trained += f"; frozen: names that match {', '.join(map(repr, recipe.model.freeze))}"
    rows = {
        "base model": base,
        "contents": kind,
        "trained": trained,
        "data": f"{_data(recipe)} ({recipe.data.format}, truncated to {recipe.data.max_length} tokens)",
        "classes": ", ".join(manifest["label_names"]) if manifest.get("label_names") else None,
        "optimizer steps": manifest["step"],
        "precision": recipe.precision,
        "strategy": f"{manifest['strategy']}, {manifest['world_size']} processes",
        **_metrics(run, manifest, recipe),
        "verified": _verdict(run),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value is not None)
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items() if version)
    text = dump(_without_places(recipe))
    return (
        f"---\n{dump(head)}---\n\n# {run.name}\n\n| | |\n| --- | --- |\n{table}\n\n"
        f"## Recipe\n\n```yaml\n{text}```\n\nMade with deepspeed-accelerate-toolkit; {versions}.\n"
    )


def _settings(adapter: Adapter) -> str:
    """The method, and its rank and scale where it has them."""
    parts = [adapter.method]
    if adapter.r is not None:
        parts.append(f"r {adapter.r}")
    if adapter.alpha is not None:
        parts.append(f"alpha {adapter.alpha:g}")
    return ", ".join(parts + [f"{key} {value}" for key, value in adapter.options.items()])


def _without_places(recipe: Recipe) -> dict[str, Any]:
    """The recipe for publication: file names instead of paths, and no output folder."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    for section, keys in _PLACES.items():
        part = content.get(section) or {}
        for key in keys:
            if part.get(key):
                part[key] = _named(part[key])
    content.get("run", {}).pop("output_dir", None)
    return content


_PLACES = {
    "model": ("path",), "tokenizer": ("path",), "adapter": ("path",),
    "data": ("train", "eval", "chat_template", "cache"),
}  # fmt: skip
"""Keys that name files and folders of the machine that trained."""


def _named(value: Any) -> Any:
    """A file or folder by its name; one or several sources, each by its own; held-out sets by name."""
    if isinstance(value, str):
        return _public(value)
    if isinstance(value, list):
        return [_named(one) for one in value]
    if isinstance(value, dict):
        if "path" in value:
            return {key: _named(one) if key == "path" else one for key, one in value.items()}
        return {name: _named(one) for name, one in value.items()}
    return value


def _public(path: str) -> str:
    """A path that is of this machine by its last part; a hub id as it is."""
    return Path(path).name if looks_local(path) or Path(path).expanduser().exists() else path


def _data(recipe: Recipe) -> str:
    train = recipe.data.train
    return ", ".join(_public(path) for path in ([train] if isinstance(train, str) else [one.path for one in train]))


def _metrics(run: Path, manifest: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    held_out = "held-out mean squared error" if task_of(recipe.model.task).numbers else "held-out loss"
    found: dict[str, Any] = {"loss, last step": None, held_out: manifest.get("eval_loss")}
    for line in _lines(run / "metrics.jsonl"):
        if line["step"] == manifest["step"]:
            found["loss, last step"] = line["loss"]
    for line in _lines(run / "eval.jsonl"):
        if line["step"] == manifest["step"] and "eval_set" not in line:
            found[held_out] = line["loss"]
            found |= {name: line[key] for key, name in _SCORES.items() if line.get(key) is not None}
    return {key: None if value is None else f"{value:.4f}" for key, value in found.items()}


_SCORES = {"accuracy": "held-out accuracy", "f1": "held-out F1 (macro)", "pearson": "held-out Pearson's r"}


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _verdict(run: Path) -> str | None:
    """The result of `toolkit verify RECIPE --json RUN/verify.json`."""
    try:
        result = json.loads((run / "verify.json").read_text(encoding="utf-8"))
        verdict = str(result["verdict"])
        return f"{verdict} to a plain PyTorch loop" if verdict == "equivalent" else verdict
    except (OSError, ValueError, KeyError, TypeError):
        return None

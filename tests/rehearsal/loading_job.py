"""What a rank of a large job holds while it reads its weights, and what `plan` says of that."""

from __future__ import annotations

import json
import tempfile
import traceback
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rehearsal.cells import Cell
from rehearsal.held import Held
from rehearsal.large import shapes
from rehearsal.rehearse import Outcome, _start, as_rank, watching
from toolkit.model.stored import Stored
from toolkit.planning.skeleton import build
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of
from toolkit.strategies.engines.base import Engine
from toolkit.training import preparation


@dataclass
class Loaded:
    """``device``, ``host``: bytes of tensors at most until the rank has its weights. ``planned``: the same from `plan`.
    ``read``: bytes of the files, of ``stored`` in all; ``stays``: of the weights on the device after it. ``tensors``:
    parameters of the model; ``adapter``: bytes of the whole one, ``rows``: of one row of each of its
    weights. ``whole``: why all were loaded."""

    device: int = 0
    host: int = 0
    stays: int = 0
    read: int = 0
    stored: int = 0
    tensors: int = 0
    adapter: int = 0
    rows: int = 0
    planned: tuple[int, int] = (0, 0)
    whole: str | None = None
    error: str | None = None


def write_model(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> Path:
    """A checkpoint as the hub has it, in files of some weights each, without a byte of values: they are holes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}), encoding="utf-8")
    names, where, of_each = list(shapes), dict[str, str](), 40
    for at in range(0, len(names), of_each):
        file, end = folder / f"model-{at // of_each + 1:05d}.safetensors", 0
        tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name in names[at : at + of_each]:
            begin, end = end, end + 2 * prod(shapes[name])
            tensors[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [begin, end]}
            where[name] = file.name
        header = json.dumps(tensors).encode()
        header += b" " * (-len(header) % 8)
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with file.open("r+b") as opened:
            opened.truncate(8 + len(header) + end)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def loaded(cell: Cell, root: str) -> Loaded:
    """From its start until the engine is made; the weights of the cell's ``model.config`` are in files, whose values
    are not read."""
    config = cell.sections["model"]["config"]
    weights = shapes(config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"])
    found = Loaded(stored=2 * sum(map(prod, weights.values())))
    made = Engine._optimizer_over

    def with_weights(engine: Any, *args: Any, **options: Any) -> Any:
        found.device, found.host, found.stays = held.most["cuda"], held.most["cpu"], held.now["cuda"]
        return made(engine, *args, **options)

    def read(stored: Stored, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=stored.dtype)
        found.read += values.nbytes
        return values

    with tempfile.TemporaryDirectory() as folder, as_rank(cell.rank, cell.world, alone=True):
        path = write_model(Path(folder) / "model", config, weights)
        cell = replace(cell, sections=cell.sections | {"model": {"config": None, "path": str(path)}})
        resolved = resolve(Recipe.model_validate(cell.recipe(root)), "recipe.yaml", device="cuda")
        memory = strategy_of(resolved).memory_model()(build(resolved).holdings, resolved)
        found.planned = memory.loading(), memory.host_loading()[0]
        with (
            watching(Outcome()) as watch,
            mock.patch.object(preparation, "inside_a_mode", return_value=False),
            mock.patch.object(Stored, "read", read),
            # torch swaps no tensors that others refer to weakly, as the rehearsal's own notes do.
            mock.patch("weakref.getweakrefs", return_value=[]),
            mock.patch.object(Engine, "_optimizer_over", with_weights),
        ):
            try:
                with Held() as held:
                    session = _start(cell, root, watch, Outcome())
                found.whole = session.loaded_whole
                found.tensors = len(list(session.engine.model.parameters()))
                if resolved.recipe.adapter is not None:
                    found.adapter = 4 * sum(map(prod, session.engine.shapes.values()))
                    found.rows = 4 * sum(prod(shape[1:]) for shape in session.engine.shapes.values())
            except Exception:
                found.error = traceback.format_exc()
    return found

"""Runs a tool's own training and prints its losses. Started with the Python in which the tool is installed:

python tests/importing/other_tools.py llamafactory FILE
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def _record_trainer() -> list[list[float]]:
    """Keep what the transformers Trainer's micro-batches return, by optimizer step."""
    from transformers import Trainer

    steps: list[list[float]] = []
    original = Trainer.training_step

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        while len(steps) <= self.state.global_step:
            steps.append([])
        steps[self.state.global_step].append(float(loss))
        return loss

    Trainer.training_step = recorded
    return steps


def _stand_in(name: str) -> None:
    """An empty module in place of one that the tool imports and does not use for text."""
    with contextlib.suppress(ImportError, OSError):
        __import__(name)
        return
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module


def llamafactory(file: str) -> list[float]:
    """`llamafactory-cli train FILE`, in one process."""
    os.environ |= {"DISABLE_VERSION_CHECK": "1"}
    _stand_in("torchaudio")
    steps = _record_trainer()
    import yaml
    from llamafactory.train.tuner import run_exp

    with contextlib.suppress(AttributeError):  # of the model card, after the last step
        run_exp(yaml.safe_load(Path(file).read_text()))
    return [sum(parts) for parts in steps]


def swift(file: str) -> list[float]:
    """`swift sft` or `swift pt` with the flags of a script."""
    steps = _record_trainer()
    import shlex

    from swift.pipelines import pretrain_main, sft_main

    words = shlex.split(Path(file).read_text())
    start: Callable[[list[str]], Any] = pretrain_main if words[1] == "pt" else sft_main
    start(words[2:])
    return [sum(parts) for parts in steps]


def axolotl(file: str) -> list[float]:
    """`axolotl train FILE`, in one process."""
    steps = _record_trainer()
    from axolotl.cli.train import do_cli

    do_cli(file)
    return [sum(parts) for parts in steps]


def torchtune(file: str) -> list[float]:
    """`tune run full_finetune_single_device` or `lora_finetune_single_device`, by the model of the file."""
    import importlib

    from omegaconf import OmegaConf
    from torchtune.training import metric_logging

    cfg = OmegaConf.load(file)
    losses: list[float] = []

    def log_dict(self: Any, payload: dict[str, Any], step: int) -> None:
        losses.append(float(payload["loss"]))

    metric_logging.DiskLogger.log_dict = log_dict
    kind = "lora" if "lora" in cfg.model._component_ else "full"
    sys.path.insert(0, str(Path(metric_logging.__file__).parents[2] / "recipes"))
    name = f"{kind}_finetune_single_device"
    module = importlib.import_module(name)
    recipe_class = next(v for k, v in vars(module).items() if k.endswith("RecipeSingleDevice") and isinstance(v, type))
    recipe = recipe_class(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    return losses


if __name__ == "__main__":
    tool, path = sys.argv[1:]
    found = {"llamafactory": llamafactory, "swift": swift, "axolotl": axolotl, "torchtune": torchtune}[tool](path)
    print("LOSSES " + json.dumps(found))

"""What is rehearsed. A cell is one rank of one recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiny import LLAMA

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
WORLD = 8

# Widths that eight ranks divide and float8 takes.
MODEL = LLAMA | {"hidden_size": 64, "intermediate_size": 128}
LORA = {"adapter": {"r": 4, "dropout": 0.1}}
QLORA = {"adapter": {"r": 4, "dropout": 0.1, "method": "qlora"}}
TRAINED: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "qlora": QLORA}


@dataclass(frozen=True)
class Call:
    """A function of this package, named from it on, to be called in the process of ``local_rank``: that of the first
    argument if it is a cell. ``long``: before others."""

    function: str
    args: tuple[Any, ...] = ()
    long: bool = False
    local_rank: int | None = None

    def process(self) -> int:
        """The local rank that the process of this call has for all its life."""
        if self.local_rank is not None:
            return self.local_rank
        cell = self.args[0]
        assert isinstance(cell, Cell), f"{self.function}: say local_rank"
        return cell.rank % 8


@dataclass(frozen=True)
class Cell:
    """One rank of one job. ``sections`` are merged over the recipe that all cells share."""

    strategy: str
    option: str = "plain"
    trained: str = "full"
    precision: str = "bf16"
    rank: int = 0
    world: int = WORLD
    sections: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.trained}-{self.precision}-{self.option}-rank{self.rank}of{self.world}"

    def recipe(self, root: str) -> dict[str, Any]:
        """The recipe over the tests' tiny data at ``root``."""
        recipe: dict[str, Any] = {
            "model": {"config": MODEL},
            "tokenizer": {"path": f"{root}/tokenizer"},
            "data": {"train": f"{root}/train.jsonl", "eval": f"{root}/eval.jsonl", "max_length": 48, "workers": 0},
            "batch": {"micro_size": 2, "accumulation": 2},
            "optimizer": {"lr": 1.0e-3, "weight_decay": 0.1},
            "precision": self.precision,
            "strategy": {"name": self.strategy},
            "machine": {"device": "cuda", "processes": min(8, self.world), "nodes": max(1, self.world // 8)},
            "run": {"max_steps": 3, "seed": 3, "save_every": 0, "eval_every": 0},
            **TRAINED[self.trained],
        }
        for key, value in self.sections.items():
            recipe[key] = recipe.get(key, {}) | value if isinstance(value, dict) else value
        return recipe


ZERO, FSDP = ("zero1", "zero2", "zero3"), ("fsdp1", "fsdp2")
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fused-loss": ({"loss": "fused"}, STRATEGIES),
    "fp8": ({"fp8": True, "activation_checkpointing": "full"}, STRATEGIES),
    "adamw8bit": ({"optimizer": {"name": "adamw8bit"}}, ("single", "ddp", *FSDP)),
    "stochastic": ({"optimizer": {"rounding": "stochastic"}, "precision": "bf16-pure"}, STRATEGIES),
    "foreach": ({"optimizer": {"kernel": "foreach"}}, STRATEGIES),
    "packing": ({"data": {"packing": True}}, STRATEGIES),
    "varlen": ({"data": {"packing": True}, "model": {"attention": "varlen"}}, STRATEGIES),
    "varlen-recomputed": ({"data": {"packing": True}, "model": {"attention": "varlen"},
                           "activation_checkpointing": "selective"}, STRATEGIES),
    "checkpoint-full": ({"activation_checkpointing": "full"}, STRATEGIES),
    "checkpoint-selective": ({"activation_checkpointing": "selective"}, STRATEGIES),
    "activation-offload": ({"activation_checkpointing": "full", "activation_offload": True}, STRATEGIES),
    "offload-optimizer": ({"strategy": {"offload": "optimizer"}}, ZERO),
    "offload-all": ({"strategy": {"offload": "all"}}, ("zero3", *FSDP)),
    "unsharded": ({"strategy": {"unsharded_blocks": 1}, **LORA}, ("zero3", *FSDP)),
    "no-reshard": ({"strategy": {"reshard_after_forward": False}}, FSDP),
    "skip-bad-loss": ({"run": {"on_bad_loss": "skip"}}, STRATEGIES),
    # What goes together, in one cell.
    "fast": ({"loss": "fused", "fp8": True, "data": {"packing": True}, "activation_checkpointing": "full",
              "activation_offload": True}, STRATEGIES),
    "small": ({"optimizer": {"name": "adamw8bit"}, "activation_checkpointing": "selective"},
              ("single", "ddp", *FSDP)),
}  # fmt: skip
"""Sections of the recipe, and the strategies that the toolkit does not refuse them for."""


def _ranks(strategy: str) -> tuple[int, int]:
    """World and last rank; every option is rehearsed as the first and as the last rank."""
    return (1, 0) if strategy == "single" else (WORLD, WORLD - 1)


def every_cell() -> list[Cell]:
    """Every strategy x what trains x precision, and every option, as the first and as the last rank."""
    found = []
    for strategy in STRATEGIES:
        world, last = _ranks(strategy)
        for rank in sorted({0, last}):
            found += [
                Cell(strategy, trained=trained, precision=precision, rank=rank, world=world)
                for trained in TRAINED
                for precision in ("bf16", "fp16")
            ]
            found += [
                Cell(strategy, option, rank=rank, world=world, sections=sections)
                for option, (sections, bearers) in OPTIONS.items()
                if strategy in bearers
            ]
    return found


_QUICK = (
    # What trains, precision, whether as the last rank, the strategies. The first rank writes checkpoints.
    ("full", "bf16", False, None),
    ("lora", "bf16", True, ("zero3", "fsdp2")),
    ("full", "fp16", True, ("ddp", "fsdp1")),
)
_QUICK_OPTIONS = {"fast": ("zero3",), "offload-all": ("fsdp2",), "varlen": ("ddp",)}


def quick_cells() -> list[Cell]:
    """Those of `make test`: for each strategy all weights in bf16 as the first rank; an adapter in bf16 and all weights
    in fp16 as the last, under some; many options together; state that is read back to the host; QLoRA where every rank
    holds a slice of another size."""
    found = []
    for cell in every_cell():
        last = cell.rank == _ranks(cell.strategy)[1]
        if cell.option == "plain":
            wanted = any(
                (cell.trained, cell.precision) == (trained, precision) and (last if as_last else cell.rank == 0)
                for trained, precision, as_last, strategies in _QUICK
                if strategies is None or cell.strategy in strategies
            )
            qlora = cell.trained == "qlora" and cell.precision == "bf16" and last
            wanted = wanted or (qlora and cell.strategy == "fsdp1")
        else:
            wanted = last and cell.strategy in _QUICK_OPTIONS.get(cell.option, ())
        if wanted:
            found.append(cell)
    return found

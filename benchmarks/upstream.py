"""transformers' and accelerate's own loading and saving of a model, for ``python -m benchmarks.loading``: memory of
each process, and bytes that it writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.measuring import MIB, forget_peak, status

Row = dict[str, Any]


def from_pretrained(folder: str, tiny: dict[str, Any]) -> Row:
    """transformers' own loading in every process: peak of memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny))
    before = forget_peak()
    model = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():  # mapped files are read when they are used
        parameter.detach().add_(0)
    return {"weights": status("VmHWM") - before}


def efficient(folder: str, tiny: str, out: str) -> Row:
    """accelerate's FSDP2 with ``cpu_ram_efficient_loading``: rank 0 loads the model, and the others get their parts
    from it. Then what the Trainer does for weights with a full state dict: rank 0 gathers and writes them."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    from toolkit.strategies.engines.connect import connect_without_gpu

    found: Row = {}
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"}
    with mock.patch.dict(os.environ, environment):
        for source in (tiny, folder):  # all is imported after the first
            connect_without_gpu("FSDP")
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, cpu_ram_efficient_loading=True, state_dict_type="FULL_STATE_DICT",
                auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )  # fmt: skip
            accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="no")
            before = forget_peak()
            model = AutoModelForCausalLM.from_pretrained(source)
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))  # it has no state
            for parameter in model.parameters():
                local = parameter.detach()
                (local.to_local() if hasattr(local, "to_local") else local).add_(0)
            found = {"weights": status("VmHWM") - before}
            before = forget_peak()
            whole = accelerator.get_state_dict(model)  # Trainer.save_model, transformers 5.23.0
            if accelerator.is_main_process:
                accelerator.unwrap_model(model).save_pretrained(str(Path(out) / "upstream"), state_dict=whole)
            accelerator.wait_for_everyone()
            files = (Path(out) / "upstream").iterdir() if accelerator.is_main_process else ()
            found |= {"save": status("VmHWM") - before, "written": sum(file.stat().st_size for file in files)}
            del model, whole
    return found


def save_tiny(folder: str, tiny: dict[str, Any]) -> None:
    """The small model that is loaded first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny)).save_pretrained(folder)


def section(rows: list[Row], size: int) -> list[str]:
    """Of the page of docs: the rows whose ``strategy`` is transformers or accelerate."""
    lines = [
        "## transformers and accelerate", "",
        "The same model: `from_pretrained` in each of N processes, every page of its weights used; and accelerate's "
        "FSDP2 with `cpu_ram_efficient_loading`, where rank 0 loads and broadcasts, and "
        "`Accelerator.get_state_dict` with `save_pretrained` on rank 0, as the Trainer saves with a full state dict. "
        "MiB, rank 0 / the largest other. "
        "transformers maps the files: bytes read are not counted.", "",
        "| way | N | model/N | memory, loading | memory, saving | written |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    names = {"transformers": "`from_pretrained`", "accelerate": "`cpu_ram_efficient_loading`"}
    for row in rows:
        if row["strategy"] in names:
            cells = " | ".join(_both(row["ranks"], key) for key in ("weights", "save", "written"))
            world = row["processes"]
            lines.append(f"| {names[row['strategy']]} | {world} | {size / world / MIB:,.0f} | {cells} |")
    return lines


def _both(ranks: list[Row], key: str) -> str:
    if key not in ranks[0]:
        return ""
    numbers = [ranks[0][key]] + ([max(one[key] for one in ranks[1:])] if ranks[1:] else [])
    return " / ".join(f"{number / MIB:,.0f}" for number in numbers)

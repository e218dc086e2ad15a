"""`python autotp_lora.py STAGE`: DeepSpeed's AutoTP on a model with LoRA, on one process that plays rank 0 of two.

Prints how many of the optimizer's weights are the model's, or the error. The process group exchanges nothing, so that
no step is taken.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}


def main(stage: int) -> str:
    import deepspeed
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, tie_word_embeddings=False, **shape))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).to(torch.bfloat16)
    held = [weight for weight in model.parameters() if weight.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": stage},
    }
    try:
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(held), config=config)[0]
    except Exception as error:
        return type(error).__name__
    names = [name for name, _ in engine.module.named_parameters() if "lora_" in name]
    return f"held {len(held)}, adapters of the model {len(names)}"


if __name__ == "__main__":
    print("RESULT", main(int(sys.argv[1])))

"""A loop of one's own: float16 autocast, accumulation by a remainder, the loss alone kept of the outputs."""

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaForCausalLM

ACCUMULATE = 2
device = "cuda"
model = LlamaForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-360M", torch_dtype=torch.float32).to(device)
tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-360M", model_max_length=384)
rows = [tokenizer("text", truncation=True, padding="max_length", return_tensors="pt") for _ in range(64)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler()
for step, batch in enumerate(DataLoader(rows, batch_size=2, shuffle=True)):
    batch = {key: value.squeeze(1).to(device) for key, value in batch.items()}
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(**batch, labels=batch["input_ids"]).loss
    scaler.scale(loss / ACCUMULATE).backward()
    if (step + 1) % ACCUMULATE == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

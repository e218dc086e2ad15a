"""The training loops that plan knows. Imports no torch: their code is imported when it is traced."""

from __future__ import annotations

from toolkit.planning.loops import rules
from toolkit.planning.loops.base import Deferred, Loop

_LINEAR4BIT = Deferred("toolkit.planning.loops.trainer", "linear4bit")
TOOLKIT = Loop(
    Deferred("toolkit.training.loss", "loss_sum"), "toolkit train", "toolkit/training/loss.py", wraps_layers=False
)
TRAINER = Loop(
    Deferred("toolkit.planning.loops.trainer", "trainer_loss"),
    "transformers' Trainer",
    "the model's own loss; transformers 5.23.0 loss/loss_utils.py",
    rules.adapters_in_float32,
    _LINEAR4BIT,
    namesakes=frozenset({"adafactor"}),
    unknown=frozenset({"label_smoothing"}),
)
TRAINER_4_48 = Loop(
    Deferred("toolkit.planning.loops.trainer", "shifted_loss"),
    "transformers' Trainer of version 4.48",
    "transformers 4.48.1 loss/loss_utils.py: float32 logits, then a copy without the last position",
    rules.adapters_in_float32,
    _LINEAR4BIT,
    reentrant=True,
    namesakes=frozenset({"adafactor"}),
    unknown=frozenset({"label_smoothing"}),
)
TRL = Loop(
    Deferred("toolkit.planning.loops.trl", "tiled_loss"),
    "TRL's SFTTrainer",
    "trl 1.16.0 kernels/chunked_logprob.py: tiles of 4,096 x 32,768 logits, the head's gradient in float32; adapters "
    "on 4-bit weights in bfloat16",
    rules.trl_precision,
    _LINEAR4BIT,
    namesakes=frozenset({"adafactor"}),
    unknown=frozenset({"label_smoothing", "activation_offload"}),
    refuses=rules.trl_refused,
)
LOOPS: dict[str, Loop] = {
    "toolkit": TOOLKIT,
    "trainer": TRAINER,
    "trainer-4.48": TRAINER_4_48,
    "trl": TRL,
}

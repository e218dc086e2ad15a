"""The training loops that plan knows. Imports no torch: their code is imported when it is traced."""

from __future__ import annotations

from dataclasses import replace

from toolkit.optimizers import optimizer_names
from toolkit.planning.loops import rules
from toolkit.planning.loops.base import Deferred, Loop, Together

_LINEAR4BIT = Deferred("toolkit.planning.loops.trainer", "linear4bit")
HELD = Deferred("toolkit.planning.loops.bare", "held_outputs")
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
    unknown=frozenset({"label_smoothing"}),
    refuses=rules.trl_refused,
    returns_logits=False,
)
ACCELERATE = replace(
    TRAINER,
    title="a loop with accelerate",
    source="the model's own loss, outputs a variable of the loop; accelerate 1.15.0 utils/operations.py",
    acting=Together(HELD, _LINEAR4BIT),
    concatenates=False,
)
BARE = replace(
    ACCELERATE,
    loss=Deferred("toolkit.planning.loops.trainer", "own_loss"),
    title="a loop of one's own",
    source="outputs = model(**batch); outputs.loss.backward(): outputs stay until the next step; PEFT makes adapters "
    "in float32",
    kernel="foreach",
    namesakes=frozenset(),
    optimizers=tuple(optimizer_names()),
    float32_outputs=False,
)
LOOPS: dict[str, Loop] = {
    "toolkit": TOOLKIT,
    "bare": BARE,
    "accelerate": ACCELERATE,
    "trainer": TRAINER,
    "trainer-4.48": TRAINER_4_48,
    "trl": TRL,
}
VERSIONS: dict[str, dict[str, str]] = {
    "trainer": {"5.23": "trainer", "4.48": "trainer-4.48"},
    "accelerate": {"1.15": "accelerate"},
    "trl": {"1.16": "trl"},
}
"""Of what packages: the loops whose source was read, by version."""

"""Every diagnosis that `toolkit verify` can make: its sentences, where the defect was reported, what to set instead.

``{names}`` in braces are facts of the diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.optimizers import optimizer_kind, optimizer_names
from toolkit.rooms import all_options


@dataclass(frozen=True)
class Known:
    """Templates of a diagnosis. ``reference``: project#number. ``remedy``: the recipe's keys to change."""

    cause: str
    evidence: str
    reference: str = ""
    remedy: str = ""


MISSING = "{claim}: {seen}; expected {expected}"
"""Of a claim without evidence."""

# What the recipe asks for and the run does not show.
_EVIDENCE = {
    "block-inputs-cast": Known(
        "inputs of blocks are cast to the compute dtype", MISSING,
        "torch 2.13.0, FSDP: cast_forward_inputs, True by default in FSDP2",
    ),
    "strategy-not-active": Known(
        "the strategy is not active", MISSING, "accelerate 1.15.0 on a machine without a GPU runs DDP instead",
    ),
    "collectives-missing": Known(
        "the strategy is not active: it never calls its collectives", MISSING,
        "accelerate 1.15.0 on a machine without a GPU runs DDP, or unconnected processes, instead",
    ),
    "sync-not-as-set": Known("gradients are summed over the ranks after other micro-batches than strategy.sync says",
                             MISSING),
    "mesh-not-active": Known("the mesh is not active", MISSING),
    "micro-batches-dropped": Known("micro-batches do not all pass through the stages (strategy.mesh.pipeline)",
                                   MISSING),
    "mesh-copies-differ": Known("ranks that hold copies of the same part hold different ones", MISSING),
    "processes-not-connected": Known(
        "the processes are not connected", MISSING, "accelerate 1.15.0 on a machine without a GPU",
    ),
    "checkpointing-not-applied": Known("activation checkpointing is set but not applied", MISSING),
    "other-parameters-train": Known("other parameters are trainable than the recipe says", MISSING),
    "frozen-weight-changes": Known("a frozen weight changes", MISSING),
    "tied-weights-separate": Known("tied weights have become separate parameters", "{evidence}",
                                   "verl#7834, lingua#75"),
    "wrong-dtype": Known("tensors have another dtype than the recipe's precision says", MISSING,
                         "peft#1706, DeepSpeed#1800"),
}  # fmt: skip

_DATA = {
    "samples-repeated": Known("the last batch is padded with samples of the same epoch", "{measure}",
                              "accelerate#2316"),
    "parts-of-different-rows": Known("ranks that divide rows or layers between them have different rows", "{measure}"),
    "samples-reordered": Known("samples are in other ranks or micro-batches than the seed gives", "{measure}"),
    "remainder-dropped": Known("the remainder of the epoch is dropped", "{measure}"),
    "same-samples-on-every-rank": Known("every rank reads the same samples", "{measure}"),
    "wrong-labels": Known("padding or prompt tokens are supervised, or supervised ones are masked", "{measure}"),
}  # fmt: skip

_SAMPLES = {
    "header-learned": Known("the header of the assistant's turn is supervised", "{measure}"),
    "end-of-turn-not-learned": Known("the token that ends a turn is not supervised", "{measure}"),
    "results-learned": Known("what users or tools write is supervised", "{measure}"),
    "rewritten-turns-learned": Known(
        "earlier turns are supervised in a context that the chat template never shows", "{measure}",
    ),
    "turns-not-learned": Known("assistant turns are not supervised, or twice", "{measure}"),
    "share-wrong": Known("a source has another number of samples in an epoch than its weight or proportion gives",
                         "{measure}"),
    "replaced-draws": Known("samples of a source are drawn with replacement", "{measure}"),
}  # fmt: skip

_PARTS = "step {step}: the losses are those of {parts} parts of each row with this mistake"
_FORWARD = {
    "adapter-initialisation": Known(
        "the adapter does not start from its own initialisation",
        "{count} adapter tensors differ before the first step, first {first}", "peft#1887",
    ),
    "initial-weights-differ": Known("ranks start from different weights",
                                    "{count} tensors differ before the first step, first {first}"),
    "weights-of-an-earlier-step": Known("a step computes with weights of an earlier one",
                                        "step {step}: the losses are those of the first weights; the second copy of "
                                        "the weights (hpZ) is stale"),
    "expert-results-misplaced": Known("results of experts are added to other tokens than they are of "
                                      "(strategy.mesh.expert)", "the losses of step {step} are those of such a run"),
    "positions-restart": Known("positions begin anew in every part of a row (strategy.mesh.context)", _PARTS),
    "predictions-lost-at-edges": Known("the last token of each part of a row predicts nothing", _PARTS,
                                       "labels have to be shifted before rows are divided"),
    "attention-within-parts": Known("each part of a row attends to its own tokens alone", _PARTS),
    "key-heads-of-another-rank": Known("ranks attend with the key heads of another rank's query heads", _PARTS),
    "masks-of-layer-ranks": Known("the {ranks} ranks of a layer draw other dropout masks than one process would "
                                  "(strategy.mesh.tensor)", "losses differ where masks are drawn"),
    "masks-of-another-stage": Known("all {stages} stages draw the same dropout masks (strategy.mesh.pipeline)",
                                    "what differs is equal to what the plain loop computes with the masks of the first "
                                    "stage in every stage"),
    "masks-of-another-part": Known("all parts of a row draw the same dropout masks", _PARTS),
    "loss-not-finite": Known("the loss is not finite, but the plain loop's is", "{measure}"),
    "recipe-diverges": Known("the recipe diverges: the plain loop's loss is not finite either", "{measure}",
                             remedy="lower optimizer.lr, or set optimizer.max_grad_norm"),
    "model-mixes-packed-samples": Known(
        "this model lets packed samples attend to each other",
        "the plain loop's loss of samples that share a row is not that of each sample alone",
        remedy="data.packing: false",
    ),
    "base-unpacked-wrong": Known(
        "the base is not what its 4-bit weights represent",
        "the plain loop computes another loss for the same micro-batches from the dequantised weights",
    ),
    "packed-samples-attend": Known(
        "packed samples attend to each other",
        "step {step}: the losses are those of rows in which every sample attends to those before it",
    ),
    "loss-term-missing": Known(
        "a term of the loss is set and not applied", "step {step}: the losses are those without {term}",
    ),
    "z-loss-of-every-token": Known(
        "the z-loss counts tokens that have no label",
        "step {step}: the losses are those with the z-loss of padding and prompts too",
    ),
    "prompt-missing": Known(
        "micro-batches are computed without the adapter's virtual tokens",
        "step {step}: the losses of rank {rank} are those of the model without them",
    ),
    "dropout-mask-shared": Known(
        "all ranks use the same dropout mask",
        "losses of the first rank agree, those of other ranks do not, and dropout is on", "transformers#31412",
    ),
    "evaluation-not-at-average": Known(
        "evaluations are not at the average of the optimizer's steps",
        "{count} weights differ from it, first {first}",
    ),
    "evaluation-copy-stale": Known(
        "an evaluation computes with other weights than the average that its masters are at", "{measure}",
    ),
    "image-tokens-supervised": Known(
        "tokens that stand for an image are supervised",
        "step {step}: {count} labels of rank {rank} are at places of an image",
    ),
}  # fmt: skip

_SCALED = "every gradient is {factor:.5g} times the right one"
_WEIGHTS = "micro-batches have the weights {weights}, where 1 is right"
_GRADIENT = {
    "loss-scale-left": Known("the loss scale is left in the gradient", _SCALED, "DeepSpeed#7839"),
    "accumulation-summed": Known("the gradient is summed over micro-batches, not averaged", _SCALED,
                                 "transformers#45305"),
    "accumulation-divided-twice": Known("the loss is divided by the accumulation count twice", _SCALED,
                                        "transformers#35808, accelerate#3533"),
    "short-window-divided-by-full": Known("a short window is divided by the full accumulation count", _SCALED,
                                          "transformers#39659"),
    "ranks-summed": Known("the gradient is summed over ranks, not averaged", _SCALED),
    "ranks-divided-twice": Known("the gradient is divided by the number of ranks twice", _SCALED),
    "shards-divided-by-root": Known("the gradient is divided by the root of the number of shards", _SCALED),
    "unpredicted-tokens-counted": Known(
        "the token count includes positions that are never predicted",
        _SCALED + ": {tokens} tokens counted as {counted}", "transformers#46204",
    ),
    "uniform-scale": Known("every gradient is scaled by the same factor", "by {factor:.5g}"),
    "mean-per-micro-batch": Known("the loss is averaged per micro-batch, not per supervised token", _WEIGHTS,
                                  "trl#2175, transformers#34198"),
    "mean-per-rank": Known("ranks have equal weights although their token counts differ", _WEIGHTS,
                           "transformers#34242, transformers#39392"),
    "gradient-not-cleared": Known("the gradient of the step before is still in this one",
                                  "step {step}: optimizer.zero_grad was not called in between"),
    "only-last-micro-batch": Known("only the last micro-batch's gradient is kept", _WEIGHTS,
                                   "DeepSpeed#6550, DeepSpeed#7981"),
    "gradient-of-one-copy": Known("gradients are not reduced over strategy.mesh.replicate: each copy of the model "
                                  "trains on the samples of its own ranks", _WEIGHTS),
    "gradients-of-copies-added": Known("the gradient is scaled by the size of strategy.mesh.replicate", _SCALED),
    "gradients-scaled-by-layers": Known("the gradient is scaled by the size of strategy.mesh.tensor", _SCALED),
    "hidden-gradients-not-summed": Known("the gradient of hidden states is not summed over the {ranks} ranks of a "
                                         "layer (strategy.mesh.tensor)", "{first} has another gradient on each, "
                                         "{count} weights in all"),
    "head-norms-not-summed": Known("the gradient of norms of heads is not summed over the {ranks} ranks of a layer "
                                   "(strategy.mesh.tensor)", "{first} has another gradient on each of them"),
    "hidden-gradients-summed-twice": Known("the gradient of hidden states is summed twice over the ranks of a layer "
                                           "(strategy.mesh.tensor)", "the gradient of {first} is {factor:.5g} times "
                                           "the right one"),
    "expert-copies-not-summed": Known("gradients of experts are not added up over the {ranks} ranks that have the same "
                                      "ones (strategy.mesh.expert)", "{first} has another gradient on each of them, "
                                      "{count} weights in all"),
    "expert-gradients-scaled": Known("the gradients of experts alone are scaled (strategy.mesh.expert)",
                                     "those of {count} weights are {factor:.5g} times the right ones"),
    "expert-adapters-mixed": Known("adapters of experts are applied to other experts than they are of "
                                   "(strategy.mesh.expert)", "the columns of {first}'s gradient are in the order of a "
                                   "matrix whose columns were divided without regard to experts, {count} weights in "
                                   "all"),
    "shared-gradient-of-one-stage": Known("the gradient of a tied head is not added to that of the embedding, which "
                                          "another stage has (strategy.mesh.pipeline)",
                                          "of all gradients that of {first} alone is wrong"),
    "gradients-scaled-by-parts": Known("the gradient is scaled by the size of strategy.mesh.context", _SCALED),
    "ranks-not-reduced": Known("gradients are not reduced over the ranks", _WEIGHTS, "DeepSpeed#4321"),
    "last-micro-batch-not-reduced": Known("the last micro-batch is not reduced over the ranks", _WEIGHTS,
                                          "DeepSpeed#7985"),
    "micro-batch-weights": Known("micro-batches have wrong weights in the gradient", _WEIGHTS),
    "tensors-not-reduced": Known("gradients of {count} of {all} tensors are not reduced over the ranks",
                                 "{first} is the gradient of one rank alone", "DeepSpeed#4321"),
    "frozen-weight-trains": Known("a weight that should be frozen has a gradient", "{first}"),
    "gradient-not-finite": Known("the gradient is not finite", "{count} tensors, first {first}"),
    "plain-gradient-not-finite": Known(
        "the model's gradient is not finite in the plain loop either: nothing can be compared",
        "{count} tensors, first {first}. Among random weights an embedding's row for padding is zero, where a root of "
        "squares has no gradient (Gemma 3n)",
        remedy="toolkit verify --full-size, with the weights of model.path",
    ),
    "sums-rounded-to-16-bits": Known(
        "gradients are rounded to 16 bits during accumulation",
        "each micro-batch has its right weight, {residual:.1e} of the sum is noise",
        "DeepSpeed#1800, DeepSpeed#2768",
    ),
    "dropout-mask-redrawn": Known(
        "recomputation draws new dropout masks",
        "losses agree, {count} of {all} gradients do not, dropout and checkpointing are on",
        "accelerate 1.15.0 with FSDP2 (preserve_rng_state=False), OLMo-core#828",
        "activation_checkpointing: none, or adapter.dropout: 0",
    ),
    "tensors-do-not-train": Known("{count} tensors do not train", "{first} is frozen, or no output depends on it"),
    "reentrant-checkpointing": Known(
        "reentrant checkpointing of blocks whose input needs no gradient",
        "{count} of {all} tensors have no gradient, first {first}", "transformers#26221, trl#3089",
    ),
    "no-gradient": Known("no gradient arrives", "{count} of {all} tensors have none, first {first}"),
    "bias-added-twice": Known(
        "recomputation adds a bias twice: the product that selective checkpointing keeps is changed in place",
        "all {count} wrong gradients are those of a plain loop that does the same",
        "deepspeed 0.19.8, runtime/zero/linear.py (output += bias); torch 2.13.0 does not notice",
        "activation_checkpointing: full",
    ),
    "recomputation-differs": Known(
        "a checkpointed block computes something else in its recomputation",
        "losses agree, and the gradient of {right}, which needs no recomputation; {count} that do are wrong, "
        "first {first}",
    ),
}  # fmt: skip

_STEP = {
    "norm-of-one-shard": Known("each rank clips by the norm of its own shard", "{norm}; {coefficient}",
                               "torch.nn.utils.clip_grad_norm_ over FSDP1's flat parameters"),
    "clips-by-default": Known("the recipe does not clip, but the engine clips at {limit:.3g}", "{coefficient}",
                              "DeepSpeed#8068: its default is 1.0"),
    "clipping-missing": Known("optimizer.max_grad_norm does not reach the engine", "{coefficient}",
                              "axolotl#1381, accelerate#3807"),
    "clips-two-times": Known("gradients are clipped twice: by the loop and by the engine", "{coefficient}"),
    "other-parameters-updated": Known(
        "the optimizer updates other parameters than those of the model", "{count} weights: {what}, first {first}",
        "accelerate#2665, pytorch#149205",
    ),
    "masters-missing": Known("weights are updated in bf16, without float32 masters",
                             "all {count} wrong weights are bf16 numbers", "accelerate#2624, accelerate#3979"),
    "decays-spared-weights": Known("weight decay is applied to weights that the groups exclude",
                                   "{count} of them, first {first}"),
    "weight-decay-missing": Known("weight decay is missing", "{count} weights that should decay, first {first}",
                                  "peft#3503"),
    "moments-in-bf16": Known("Adam's moments are kept in bf16", "all {count} moments are bf16 numbers",
                             "AReaL#1292"),
    "moments-not-nearest": Known("8-bit moments are not the nearest codes of their values",
                                 "{count} moments, first {first}"),
    "rate-of-a-group": Known(
        "the learning rate of a parameter group is ignored",
        "the parameters of optimizer.groups[{group}] have {seen}, the rate of all others, instead of {expected:.6g}",
    ),
    "update-of-a-shard": Known(
        "the optimizer orthogonalises each rank's shard instead of the whole matrix",
        "the changes of all {count} wrong weights are those of {ranks} shards, first {first}",
    ),
    "scheduler-on-skipped-step": Known("the scheduler advances on steps that an overflow skips",
                                       "step {step} has the learning rate of one update later", "accelerate#4242"),
    "learning-rate-of-another-update": Known("the learning rate is that of another update",
                                             "update {update} has the learning rate of update {taken}"),
    "scheduler-per-process": Known("the scheduler advances {times} times a step, once per process",
                                   "update {update} has the learning rate of update {taken}",
                                   "accelerate#1398, accelerate#2142"),
}  # fmt: skip

_AFTER = {
    "skip-disagreement": Known("ranks disagree on skipping a step", "step {step}, {measure}", "DeepSpeed#7580"),
    "rank-gradients-differ": Known("a gradient is not reduced over the ranks", "{first} differs between ranks",
                                   "DeepSpeed#4321, DeepSpeed#7985"),
    "ranks-diverged": Known("ranks have diverged", "{first}: {measure}"),
    "resumed-samples": Known("the resumed run reads other samples", "{differing}"),
    "step-count-not-restored": Known("the optimizer's step count is not restored", "{differing}", "DeepSpeed#4396"),
    "frozen-weights-not-restored": Known("frozen weights are not restored", "{differing}", "DeepSpeed#3090"),
    "export-not-average": Known(
        "exported weights are not the average of the optimizer's steps",
        "{count} weights differ from it, first {first}",
    ),
    "export-differs": Known("the {what} model is not the one that was trained", "{differing}",
                            "peft#2025, peft#2803"),
    "saved-tensors-empty": Known("saved tensors are empty", "{differing}", "trl#4416, peft#2450, peft#2892"),
    "saved-16-bit-copy": Known("the bf16 copy of the float32 masters is saved", "{differing}"),
    "saved-other-weights": Known("saved weights are not those of the run", "{differing}"),
}  # fmt: skip

# Two checkpoints, A and B.
_CHECKPOINTS = {
    "other-step-count": Known("the checkpoints are of different steps", "{a} optimizer steps in A, {b} in B",
                              remedy="compare checkpoints of the same step"),
    "moments-scaled": Known(
        "gradients of B are {factor:.5g} times those of A: the loss is averaged or scaled otherwise",
        "exp_avg of {count} tensors is {factor:.5g} times as large, exp_avg_sq {square:.5g} times",
    ),
    "weights-of-later-step": Known(
        "the weights of {which} are of a later step than its moments",
        "moments agree; {count} weights differ along AdamW's update (cosine {cosine:.2f})",
    ),
    "adapters-missing": Known("{which} has no adapters", "{count} adapter tensors are missing, first {first}"),
    "tensors-missing": Known("{which} lacks tensors", "{count} are missing, first {first}"),
    "tensor-never-trained": Known("{count} tensors never trained in {which}", "the moments of {first} are {how}"),
    "stored-moments-in-16-bits": Known("the moments of {which} are kept in 16 bits",
                                       "they are {dtype} numbers, those of the other checkpoint are not"),
    "weight-decay-differs": Known("weight decay differs", "{evidence}"),
    "sixteen-bits-not-said": Known(
        "if both ran in bf16, this is its rounding: no file says in which dtype the forward pass ran",
        "nearly all moments differ, by no more than correct runs in bf16 do; --tolerance {tolerance:.1e} accepts them",
    ),
    "moments-differ-alone": Known(
        "gradients differ, and the weights do not show it",
        "weights are {how}; moments of {count} of {all} tensors differ, first {first}",
    ),
    "weights-differ-alone": Known(
        "weights were changed by something else than the gradients, or started from others",
        "moments agree; {count} of {all} weights differ, first {first}",
    ),
    "embeddings-padded": Known("embeddings are padded", "{first} has {a} rows in A, {b} in B; the common rows agree"),
    "embeddings-untied": Known("the output layer is a tensor of its own in {which} alone",
                               "{first} differs from {other}, which the other checkpoint has for both"),
    "stored-rate-differs": Known("the learning rate of the next step differs", "{a} in A, {b} in B"),
}  # fmt: skip

_OWN: dict[str, Known] = _EVIDENCE | _SAMPLES | _DATA | _FORWARD | _GRADIENT | _STEP | _AFTER | _CHECKPOINTS


def known() -> dict[str, Known]:
    """Every diagnosis by id, those of options and optimizers too."""
    optimizers = [optimizer_kind(name).diagnoses for name in optimizer_names()]
    of_optimizers = {name: Known(*words) for diagnoses in optimizers for name, words in diagnoses.items()}
    of_options = {name: one for option in all_options().values() for name, one in option.diagnoses().items()}
    return _OWN | of_optimizers | of_options

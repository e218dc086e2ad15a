"""Evidence that each claim of a recipe happened. A claim without it is the verdict `not-exercised`."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.data.collate import sample_spans
from toolkit.layouts import layouts_of
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.mesh import stage_blocks
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import asked_options
from toolkit.strategies import strategy_of
from toolkit.strategies.engines.claims import Claim
from toolkit.verification.cases.case import Case
from toolkit.verification.cases.samples import uneven
from toolkit.verification.compare.measure import Stage
from toolkit.verification.compare.pipeline import schedule_claims
from toolkit.verification.compare.replay import Reference
from toolkit.verification.record.trace import RankTrace


def engagement(
    ranks: Sequence[RankTrace], case: Case, resolved: Resolved, reference: Reference, stages: Sequence[Stage]
) -> list[Claim]:
    """Every claim of the recipe, with what was seen."""
    # What ranks claim of these is held against the plain loop's below.
    compared = {one for option, _ in asked_options(resolved.recipe) for one in option.compared_claims}
    claims = [claim for rank in ranks for claim in rank.claims
              if (rank.rank == 0 and claim.id not in compared) or not claim.ok]  # fmt: skip
    claims += _trainable(ranks, reference)
    claims += _dtypes(ranks, resolved)
    claims += _block_inputs(ranks, reference)
    claims += _recomputation(ranks, resolved, reference)
    claims += _fused(ranks, resolved)
    claims += _options(ranks, resolved, reference)
    claims += _compiled(ranks, resolved)
    claims += _collectives(ranks, resolved)
    claims += schedule_claims(ranks, resolved)
    claims += _ties(ranks, reference)
    claims += _exercised(ranks, case, resolved, reference, stages)
    return claims


def _trainable(ranks: Sequence[RankTrace], reference: Reference) -> list[Claim]:
    right, seen = set(reference.first), set(ranks[0].trainable)
    odd = sorted(right ^ seen)
    found = f"{len(seen)}" + (f", differing in {odd[0]}" if odd else "")
    changed = [name for rank in ranks for name, d in rank.run.frozen.items() if rank.run.frozen_after.get(name) != d]
    claims = [Claim("trainable", "tensors that train", str(len(right)), found, not odd)]
    if ranks[0].run.frozen:
        said = f"{len(set(changed))} changed" + (f", first {changed[0]}" if changed else "")
        claims.append(Claim("frozen", "frozen tensors", f"{len(ranks[0].run.frozen)}, 0 changed",
                            f"{len(ranks[0].run.frozen)}, {said}", not changed))  # fmt: skip
    return claims


def _dtypes(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Claim]:
    precision = resolved.precision
    wanted = {"weight": precision.trainable, "gradient": precision.trainable, "state": precision.trainable}
    if optimizer_kind(resolved.recipe.optimizer.name).packed:
        wanted["state"] = "uint8"
    optimizer = optimizer_kind(resolved.recipe.optimizer.name)
    if not optimizer.tensors(resolved.recipe.optimizer, (1, 1), False):
        del wanted["state"]  # SGD without momentum
    if ranks[0].dtypes.get("frozen"):
        wanted["frozen"] = precision.frozen
    words = {"weight": "trained weights", "gradient": "summed gradients", "state": "optimizer state",
             "frozen": "frozen weights"}  # fmt: skip
    claims = []
    for what, right in wanted.items():
        seen = sorted({name for rank in ranks for name in rank.dtypes.get(what, [])})
        claims.append(Claim("dtype", f"dtype of {words[what]}", right, ", ".join(seen) or "none", seen == [right]))
    return claims


def _block_inputs(ranks: Sequence[RankTrace], reference: Reference) -> list[Claim]:
    """What a block is given has the dtype that the model gave it."""
    seen = {name: names for rank in reversed(ranks) for name, names in rank.inputs.items()}
    if not seen:
        return []
    right = reference.block_inputs()
    # Blocks of one class are given the same; a model's first difference names the block.
    odd = next((name for name in right if seen.get(name) != right[name]), None)
    expected = "; ".join(dict.fromkeys(", ".join(names) for names in right.values()))
    found = expected if odd is None else f"{odd}: {', '.join(seen.get(odd, ()))}"
    return [Claim("block-inputs", "dtypes of blocks' inputs", expected, found, odd is None)]


def _recomputation(ranks: Sequence[RankTrace], resolved: Resolved, reference: Reference) -> list[Claim]:
    kind = resolved.recipe.activation_checkpointing
    if kind == "none":
        return []
    claims = []
    for rank in ranks:
        # Once in the forward, once in the backward: unless nothing trains in the block or before it.
        reaches = _own_blocks(reference.backward_reaches(), rank, resolved)
        right = [rank.forwards * (2 if reached else 1) for reached in reaches]
        ok = bool(rank.recomputed) and rank.recomputed == right
        seen = f"{len(rank.recomputed)} blocks, runs {sorted(set(rank.recomputed))}"
        if rank.rank == 0 or not ok:
            claims.append(Claim("recomputation", "blocks recomputed", f"runs {sorted(set(right))}", seen, ok))
    return claims


def _own_blocks(of_all: list[bool], rank: RankTrace, resolved: Resolved) -> list[bool]:
    """Of all blocks those of a rank's stage."""
    stages = stage_blocks(len(of_all), resolved.mesh.pipeline)
    return [of_all[at] for at in stages[resolved.mesh.stage(rank.rank)]]


def _fused(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Claim]:
    if resolved.loss_kernel == "plain":
        return []
    with_head = [rank for rank in ranks if resolved.mesh.stage(rank.rank) == resolved.mesh.pipeline - 1]
    ok = all(rank.fused == rank.forwards > 0 for rank in with_head)
    seen = ", ".join(f"{rank.fused} of {rank.forwards}" for rank in with_head)
    return [Claim("fused-loss", "losses without logits", "every micro-batch", seen, ok)]


def _options(ranks: Sequence[RankTrace], resolved: Resolved, reference: Reference) -> list[Claim]:
    claims = []
    for option, _ in asked_options(resolved.recipe):
        if option.seen_by == "operators":
            claims += option.engaged(ranks, resolved, reference.counted[option.name])
        if option.seen_by == "store":
            claims += option.engaged(ranks, resolved, reference.backward_reaches())
        if option.claim is None or option.seen_by != "calls":
            continue
        calls = [(rank.options[option.name], rank.forwards) for rank in ranks]
        seen = ", ".join(f"{active} of {forwards}" for active, forwards in calls)
        ok = all(active == forwards > 0 for active, forwards in calls)
        claims.append(Claim(*option.claim, "every micro-batch", seen, ok))
    return claims


def _compiled(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Claim]:
    """Compiled code is counted where it runs: at least one graph for every call of a block, as many calls as forwards
    (and recomputations) make."""
    if not resolved.recipe.compile:
        return []
    each = 2 if resolved.recipe.activation_checkpointing == "full" else 1
    claims = []
    for rank in ranks:
        seen = rank.compiled
        right = each * rank.forwards * (seen.blocks if seen else 0)
        ok = seen is not None and not seen.fell_back and seen.graphs > 0 and seen.calls == right > 0
        ok = ok and seen is not None and seen.runs >= seen.calls
        observed = "none"
        if seen is not None:
            observed = f"{seen.calls} calls, {seen.runs} runs of {seen.graphs} graphs, {seen.breaks} breaks"
            observed = f"{observed}; fell back: {seen.fell_back}" if seen.fell_back else observed
        if rank.rank == 0 or not ok:
            claims.append(
                Claim("compiled", "blocks run compiled", f"{right} calls, a graph or more for each", observed, ok)
            )
    return claims


def _collectives(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Claim]:
    if resolved.world_size == 1:
        return []
    seen = ranks[0].collectives
    observed = ", ".join(f"{count} {kind}" for kind, count in sorted(seen.items())) or "none"
    claims = []
    for kinds in resolved.traits.collectives if _sums_gradients(resolved) else ():
        ok = any(seen.get(kind, 0) > 0 for kind in kinds)
        claims.append(Claim("collectives", "collectives in the first step", " or ".join(kinds), observed, ok))
    return claims + _synchronised(ranks, resolved) + _axes(ranks, resolved)


def _sums_gradients(resolved: Resolved) -> bool:
    """Whether ranks have gradients to sum: where all of them divide every layer, each has all of its part's."""
    return resolved.mesh.columns < resolved.world_size


def _synchronised(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Claim]:
    """What ``strategy.sync`` says: after which micro-batches gradients are summed. Shared batch statistics are summed
    in every backward too."""
    if resolved.recipe.strategy.sync is None or not resolved.traits.other_sync or ranks[0].run.statistics:
        return []
    if not _sums_gradients(resolved):
        return []
    micros = resolved.accumulation
    right = list(range(micros)) if resolved.reduces_each_micro_batch else [micros - 1]
    odd = next((rank for rank in ranks if rank.reducing != right), ranks[0])
    observed = ", ".join(str(micro + 1) for micro in odd.reducing) or "none"
    expected = ", ".join(str(micro + 1) for micro in right)
    what = "micro-batches of the first step that sum gradients over ranks"
    return [Claim("sync", what, expected, observed, odd.reducing == right)]


def _axes(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Claim]:
    """Every rank's collectives run along the axes of the mesh that they belong to. Compiled blocks are watched by the
    profiler, which does not know the groups."""
    if resolved.recipe.strategy.mesh is None or resolved.recipe.compile:
        return []
    claims = []
    asked = [*strategy_of(resolved).collectives_by_axis(resolved)]
    exchanges = [(layout.collective, layout.name) for layout, _ in layouts_of(resolved.mesh)]
    for kind, axis in [*asked, *exchanges]:
        without = [rank for rank in ranks if not rank.axes.get(f"{kind} {axis}")]
        shown = (without or ranks)[0]
        observed = ", ".join(f"{count} {what}" for what, count in sorted(shown.axes.items())) or "none"
        expected = f"{kind} {axis}"
        claims.append(
            Claim("mesh-collectives", f"collectives by axis, rank {shown.rank}", expected, observed, not without)
        )
    return claims


def _ties(ranks: Sequence[RankTrace], reference: Reference) -> list[Claim]:
    if not reference.tied:
        return []
    ok = ranks[0].tied == reference.tied
    seen = "; ".join(" = ".join(names) for names in ranks[0].tied) or "none"
    return [Claim("tied", "tied weights", "; ".join(" = ".join(names) for names in reference.tied), seen, ok)]


def _exercised(
    ranks: Sequence[RankTrace], case: Case, resolved: Resolved, reference: Reference, stages: Sequence[Stage]
) -> list[Claim]:
    """The run met what it was made to meet."""
    claims = []
    steps = ranks[0].run.steps
    if resolved.max_grad_norm > 0:
        norms = [step.norm for step in steps if step.step != case.overflow_step]
        above = sum(norm > resolved.max_grad_norm for norm in norms)
        seen = f"{above} of {len(norms)}"
        claims.append(
            Claim("clipping", "steps that clip, steps that do not", "some of each", seen, 0 < above < len(norms))
        )
    if resolved.token_parts > 1:
        count = uneven(reference.windows, resolved)
        claims.append(Claim("uneven-windows", "windows uneven over ranks", "1 or more", str(count), count > 0))
    if resolved.data_size > 1:
        empty = sum(not micro.sample_ids for window in reference.windows for _, micro in window)
        claims.append(Claim("empty-micro-batches", "micro-batches without samples", "1 or more", str(empty), empty > 0))
    if resolved.recipe.data.packing:
        spans = [row for step in steps for m in step.micros for row in sample_spans(m.tensors["position_ids"])]
        seen = f"{sum(len(row) > 1 for row in spans)} of {len(spans)}"
        claims.append(
            Claim("packed-rows", "rows with several samples", "1 or more", seen, any(len(row) > 1 for row in spans))
        )
    if case.overflow_step is not None:
        skipped = [step.step for step in steps if step.skipped]
        claims.append(Claim("overflow", "overflow skipped", f"step {case.overflow_step + 1}",
                            ", ".join(f"step {s + 1}" for s in skipped) or "none",
                            case.overflow_step in skipped))  # fmt: skip
    if len(ranks[0].run.steps) != case.steps:
        claims.append(Claim("steps", "steps taken", str(case.steps), str(len(ranks[0].run.steps)), False))
    return claims

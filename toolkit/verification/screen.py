"""What `toolkit verify` prints: a screen at most 100 columns wide, readable without colour."""

from __future__ import annotations

from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter
from toolkit.rooms import asked_options
from toolkit.verification.cases.case import STEPS
from toolkit.verification.compare.measure import STAGES, Measure, Stage, also, off_by
from toolkit.verification.outcome import Outcome
from toolkit.verification.passes import Pass

_COLUMN = 31
"""Of a pass: with the stages' names two of them fill 80 columns."""


def headline(resolved: Resolved, twin: Resolved | None = None) -> str:
    """What is verified."""
    recipe = resolved.recipe
    name = recipe.model.path or (recipe.model.config or {}).get("model_type", "model")
    adapter = _describe_adapter(recipe.adapter) if recipe.adapter else "all weights"
    backend = "gloo" if resolved.device == "cpu" else "nccl"
    where = (
        f"{resolved.world_size} processes ({resolved.device}, {backend})"
        if resolved.world_size > 1
        else f"1 process ({resolved.device})"
    )
    parts = [str(name), recipe.strategy.name, where, adapter, recipe.precision]
    if recipe.activation_checkpointing != "none":
        parts.append(f"checkpointing {recipe.activation_checkpointing}")
    parts += filter(None, (option.headline(settings, resolved.device) for option, settings in asked_options(recipe)))
    if resolved.accumulation > 1:
        parts.append(f"accumulation {resolved.accumulation}")
    return _wrapped("verify  ", parts)


def _describe_adapter(adapter: Adapter) -> str:
    name = {"lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA"}.get(adapter.method, adapter.method)
    return f"{name} r{adapter.r}" if adapter.r is not None else name


def twin_line(outcome: Outcome) -> str:
    """On what it was verified."""
    config = outcome.twin.facts.config or {}
    own = outcome.resolved.facts.config or {}
    width = outcome.twin.facts.hidden_size
    layers = next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config), "?")
    what = "itself" if config == own else "same architecture and recipe"
    steps = outcome.passes[0].reference.windows if outcome.passes and outcome.passes[0].reference else []
    counts = [
        sum(m.supervised for r, m in window if r == rank)
        for window in steps
        for rank in range(outcome.twin.token_parts)
    ]
    tokens = f", {min(counts)} to {max(counts)} supervised tokens per rank and step" if counts else ""
    return f"twin    {config.get('model_type', '')} {layers} layers × {width} wide, {what}; {STEPS} steps{tokens}"


def engaged_lines(outcome: Outcome) -> list[str]:
    """The evidence, the claims of the last pass, which runs in the recipe's own precision."""
    claims = outcome.passes[-1].claims
    good = [f"{claim.claim} {claim.seen}" for claim in claims if claim.ok and len(claim.seen) < 48]
    lines = _wrapped("active    ", list(dict.fromkeys(good))).splitlines() if good else []
    for claim in outcome.unproven:
        lines.append(f"NOT SEEN  {claim.claim}: {claim.seen[:400]}; expected {claim.expected}")
    return lines


def table(passes: list[Pass]) -> list[str]:
    """A line per stage, a column per pass."""
    heads = {"logic": "logic (fp32)"}
    lines = [
        "",
        "stage             " + "".join(f"{heads.get(one.name, one.name):<{_COLUMN}}" for one in passes).rstrip(),
    ]
    for name in STAGES:
        cells = []
        for one in passes:
            stage = next((s for s in one.stages if s.name == name), None)
            cells.append(f"{_cell(stage):<{_COLUMN}}")
        if any(cell.strip() for cell in cells):
            lines.append(f"{name:<18}{''.join(cells)}".rstrip())
    return lines


def _cell(stage: Stage | None) -> str:
    if stage is None:
        return ""
    if not stage.ok:
        wrong = sum(not m.ok for m in stage.measures)
        return f"FAIL {wrong} of {len(stage.measures)}"
    if stage.name in ("forward", "gradient", "update", "optimizer-state"):
        counted = [m for m in stage.measures if m.tolerance > 0]
        worst = max(counted, key=lambda m: m.ratio, default=None)
        return f"ok   {worst.error:.1e} of {worst.tolerance:.1e}" if worst else "ok"
    return f"ok   {stage.summary}"[: _COLUMN - 1].rstrip()


def ending(outcome: Outcome, seconds: float, command: str) -> list[str]:
    """The verdict, and the next command."""
    if outcome.verdict == "equivalent":
        limits = []
        for one in outcome.passes:
            limit = next(s.detection_limit for s in one.stages if s.name == "gradient")
            if limit:
                limits.append(f"{limit:.1e} ({one.name})")
        caught = f" · detects gradient errors from {', '.join(limits)}" if limits else ""
        verdict = f"equivalent{caught} · {seconds:.0f} s"
        return ["", verdict, *deviation_line(outcome), f"next: toolkit train {command} --dry-run"]
    lines = [""]
    if outcome.failure:
        words = "the run failed" if outcome.verdict == "different" else "nothing to compare"
        lines.append(f"{outcome.verdict}  {words}: {outcome.failure}")
    if outcome.verdict == "not-exercised":
        lines.append(f"not-exercised  {len(outcome.unproven)} expected effects were not observed (listed above)")
    elif outcome.difference:
        lines += _describe(*outcome.difference)
        for one, stage, measure in outcome.differences[1:]:
            lines += also(f", {one.name} pass, step {measure.step + 1}", stage, measure, _short(measure.tensor))
    for cause in outcome.diagnoses:
        lines += [f"likely     {cause.cause}", f"           {cause.evidence}"]
        lines += [f"seen in    {cause.reference}"] if cause.reference else []
        lines += [f"try        {cause.remedy}"] if cause.remedy else []
    lines += deviation_line(outcome)
    return [*lines, f"next: toolkit verify {command} --json -    every tensor's numbers · {seconds:.0f} s"]


def deviation_line(outcome: Outcome) -> list[str]:
    """Beside the verdict: what options that round and another order of sums change (what is proven is equality with a
    plain loop that rounds and adds up alike), and why tolerances are as wide as correct runs differ."""
    lines = []
    asked = asked_options(outcome.resolved.recipe) if outcome.deviations else []  # a recorded run has no recipe
    rounding = " and ".join(option.name for option, _ in asked if option.rounds)
    for what, found in ((f"{rounding:<11}from bf16", outcome.deviations),
                        ("order      from the plain loop's own order of sums", outcome.reorderings)):  # fmt: skip
        if found:
            loss, gradient = max(one.loss for one in found), max(one.gradient for one in found)
            lines.append(f"{what}: loss {loss:.1e}, gradient {gradient:.1%} off (informational)")
    why = next((one.measured_because for one in outcome.passes if one.measured_because), None)
    if why:
        lines.append(f"tolerance  measured, because {why}")
        chance = f"{outcome.false_alarm_bound:.0e}"
        lines.append(f"           false alarm: chance below {chance} in {outcome.comparisons:,} comparisons")
    return lines


def _describe(one: Pass, stage: Stage, measure: Measure) -> list[str]:
    place = f"step {measure.step + 1}"
    if measure.micro is not None:
        place += f", micro-batch {measure.micro + 1}"
    if measure.rank is not None:
        place += f", rank {measure.rank}"
    noise = f" (noise {measure.noise:.1e})" if measure.noise else ""
    lines = [
        f"different  at {stage.name}, {one.name} pass, {place}: {_short(measure.tensor)}",
        f"           {off_by(measure)}{noise}",
    ]
    if measure.sentence:
        lines.append(f"           {measure.sentence}")
    tensors = {m.tensor for m in stage.measures}
    wrong = {m.tensor for m in stage.measures if not m.ok}
    if len(tensors) > 1:
        lines.append(f"           {len(wrong)} of {len(tensors)} comparisons fail in {stage.name}")
    return lines


def _short(tensor: str) -> str:
    """A parameter's name without what PEFT puts around every one."""
    return tensor.replace("base_model.model.", "", 1).replace(".default.weight", "")


def _wrapped(head: str, parts: list[str]) -> str:
    """``parts`` joined by dots, in lines of at most 100 columns."""
    lines, line = [], head
    for part in parts:
        more = part if line.strip() == head.strip() or not line.strip() else f" · {part}"
        if len(line) + len(more) > 100:
            lines.append(line)
            line = " " * len(head) + part
        else:
            line += more
    return "\n".join([*lines, line])

"""What of a rendered conversation is supervised, checked from the definition: nothing of ``toolkit/data`` is used but
the form in which a template takes its messages.

The rule: at each of its turns, the assistant learns what it would have generated there, given what the chat template
would have shown it: the conversation before the turn, with the generation prompt. Each turn is learned once, to its
end and no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Turn:
    """One assistant turn. ``prompts``: what the template may show before it; ``text``: the conversation to its end;
    ``words``: what it says."""

    index: int
    prompts: tuple[str, ...]
    text: str
    words: tuple[str, ...]


@dataclass
class Findings:
    """By kind of mistake, how many supervised stretches or turns have it.

    ``header``: begins before the turn. ``unended``: without what ends the turn. ``shown``: with what somebody else
    wrote. ``beyond``: further than the turn otherwise. ``elsewhere``: no turn as it would have been generated.
    """

    header: int = 0
    unended: int = 0
    shown: int = 0
    beyond: int = 0
    elsewhere: int = 0
    missing: int = 0
    repeated: int = 0


def stretches(offsets: Offsets, supervised: Sequence[bool]) -> list[tuple[int, int]]:
    """(first character, end) of each maximal run of supervised tokens."""
    found: list[tuple[int, int]] = []
    running = False
    for (start, end), on in zip(offsets, supervised, strict=True):
        if on and running:
            found[-1] = (found[-1][0], end)
        elif on:
            found.append((start, end))
        running = on
    return found


def check(
    samples: Sequence[tuple[str, list[tuple[int, int]]]], turns: Sequence[Turn], others: Sequence[str]
) -> Findings:
    """Compare the supervised stretches of a conversation's samples with its turns. ``others``: what users, systems and
    tools say in it."""
    found, learned = Findings(), []
    for text, runs in samples:
        for start, end in runs:
            said = text[start:end]
            found.shown += any(other in said for other in others)
            turn = next((t for t in turns if text[:start] in t.prompts and _says(said, t)), None)
            if turn is None:
                turn = next((t for t in turns if _begins_early(text, start, t) and _says(said, t)), None)
                if turn is None:
                    found.elsewhere += 1
                    continue
                found.header += 1
            learned.append(turn.index)
            last = max((said.rfind(word) + len(word) for word in turn.words), default=0)
            closes = turn.text[max((turn.text.rfind(word) + len(word) for word in turn.words), default=0) :]
            found.unended += bool(closes.strip()) and not said[last:].strip()
            # White space behind the token that ends a turn is the template's.
            found.beyond += bool(said[last:].strip()) and said != said.rstrip()
            written = any(turn.text.startswith(prompt) for prompt in turn.prompts)
            found.beyond += written and text[:start] in turn.prompts and said not in turn.text
    found.missing = sum(turn.index not in learned for turn in turns)
    found.repeated = len(learned) - len(set(learned))
    return found


def _begins_early(text: str, start: int, turn: Turn) -> bool:
    return any(prompt.startswith(text[:start]) and text.startswith(prompt) for prompt in turn.prompts)


def _says(text: str, turn: Turn) -> bool:
    return all(word in text for word in turn.words)


def epoch_counts(
    sizes: Sequence[int], weights: Sequence[float | None], proportions: Sequence[float | None]
) -> list[tuple[int, int]]:
    """By source, the fewest and the most samples that an exact epoch of a mixture may have."""
    if all(share is None for share in proportions):
        exact = [(1.0 if weight is None else weight) * size for size, weight in zip(sizes, weights, strict=True)]
        return [(_down(value + 0.5 - 1e-9), _down(value + 0.5)) for value in exact]
    shares = [share or 0.0 for share in proportions]
    total = min(_down(size / share + 1e-9) for size, share in zip(sizes, shares, strict=True))
    # A share is off by less than one sample, and not off where it is whole.
    return [(_down(share * total + 1e-9), -_down(-(share * total - 1e-9))) for share in shares]


def _down(value: float) -> int:
    return int(value // 1)

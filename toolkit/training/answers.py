"""``run.sample_prompts``: greedy answers of the model that trains.

A token at a time from a forward over the whole rows, padded on the right and without a cache: the forward of an
evaluation, which every strategy has. All ranks compute the same rows, since sharded weights are gathered by all of
them, and go on with the tokens of rank 0.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from toolkit.data.formats import Example, Formatter
from toolkit.data.messages import unanswered
from toolkit.data.prompts import prompt_rows
from toolkit.model.bounds import bounds_arguments
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels
from toolkit.training.average import evaluation_weights
from toolkit.training.loss import first_token
from toolkit.training.session import Session


class Answers:
    """The prompts of a run, encoded once. Every rank has one; raises InputError for a prompt that cannot be used."""

    def __init__(self, session: Session) -> None:
        self.session, self._prompts = session, list[list[int]]()
        recipe = session.resolved.recipe
        if not recipe.run.sample_prompts:
            return
        formatter, config = Formatter(recipe, session.tokenizer), session.engine.config
        self._prompts = encoded_prompts(recipe, formatter)
        self._tokenizer, self._pad = formatter.tokenizer, formatter.pad_id
        apart = task_of(recipe.model.task).labels is Labels.TARGET
        self._start = first_token(config) if apart else None
        own = getattr(config, "eos_token_id", None)
        self._ends = formatter.ends | {*([] if own is None else [own] if isinstance(own, int) else own)}

    @torch.no_grad()
    def now(self, moving: Callable[[str, range, int], Iterable[int]]) -> list[dict[str, Any]]:
        """Each prompt with the answer of the weights as they are: ``prompt`` and ``answer``. Every rank calls it,
        between steps. An optimizer that averages the weights answers with the average. ``moving``: shows how many of
        the numbers, as ``Screen.moving``."""
        engine, recipe = self.session.engine, self.session.resolved.recipe
        prompts, many = self._prompts, self.session.resolved.micro_size
        found: list[list[int]] = []
        engine.model.eval()
        try:
            with evaluation_weights(engine), _uncompiled(recipe.compile):
                for start in moving("answering", range(0, len(prompts), many), -(-len(prompts) // many)):
                    found += self._answers(prompts[start : start + many])
        finally:
            engine.model.train()
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
        pairs = zip(recipe.run.sample_prompts, texts, strict=True)
        return [{"prompt": prompt, "answer": text} for prompt, text in pairs]

    def _answers(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The new ids of each row, at most ``run.sample_max_new_tokens``, and no more than fit the longest row."""
        most, new = self.session.resolved.recipe.data.max_length, self.session.resolved.recipe.run.sample_max_new_tokens
        rows = [[*prompt] if self._start is None else [self._start] for prompt in prompts]
        begin, ended = [len(row) for row in rows], [False] * len(rows)
        for _ in range(new):
            ended = [over or len(row) >= most for over, row in zip(ended, rows, strict=True)]
            if all(ended):
                break
            following = self._following(prompts, rows)
            for at, token in enumerate(following):
                if not ended[at]:
                    ended[at] = token in self._ends
                    rows[at] += [] if ended[at] else [token]
        return [row[start:] for row, start in zip(rows, begin, strict=True)]

    def _following(self, prompts: Sequence[list[int]], rows: Sequence[list[int]]) -> list[int]:
        """The likeliest next token of each row."""
        engine = self.session.engine
        apart = self._start is not None
        inputs = self._tensors(prompts if apart else rows)
        if apart:
            inputs["decoder_input_ids"] = self._tensors(rows)["input_ids"]
        with engine.autocast():
            logits = engine.model(**inputs, **bounds_arguments(engine.config, inputs, None)).logits
        width = max(len(row) for row in rows)
        logits = logits[:, -width:]  # an adapter's virtual tokens are before the row
        last = torch.tensor([len(row) - 1 for row in rows], device=logits.device)
        found = logits[torch.arange(len(rows), device=logits.device), last].float().argmax(-1)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(found, 0)
        answer: list[int] = found.tolist()
        return answer

    def _tensors(self, rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        width, device = max(len(row) for row in rows), self.session.engine.device
        ids = [row + [self._pad] * (width - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def encoded_prompts(recipe: Recipe, formatter: Formatter) -> list[list[int]]:
    """The prompts' ids, as samples of the data begin; raises InputError for one that leaves no room for an answer
    within ``data.max_length``."""
    most = recipe.data.max_length
    apart = task_of(recipe.model.task).labels is Labels.TARGET
    found = []
    for row, prompt in zip(prompt_rows(recipe), recipe.run.sample_prompts, strict=True):
        if formatter.chat is not None:
            messages = unanswered(row, "messages")
            ids = formatter.chat.prompt(row, {"messages": messages, "tools": None, "chat_template_kwargs": {}})
        elif apart:
            ids = formatter.ending(formatter.encode(str(prompt)))
        else:
            ids = formatter.encode.open(str(prompt))
        if not ids:
            raise row.error(None, "the tokenizer makes no token of it")
        if len(ids) > most - (not apart):
            raise row.error(None, f"has {len(ids)} tokens, and data.max_length is {most}; shorten it")
        formatter.check(row, Example(ids, []), None)
        found.append(ids)
    return found


def _uncompiled(compiles: bool) -> contextlib.AbstractContextManager[Any]:
    """No graph is compiled for rows of every length, nor counted towards the most that torch keeps of a block."""
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def shown(prompt: str | list[dict[str, Any]], answer: str, longest: int = 60) -> str:
    """Prompt and answer in one line, control characters escaped; of a conversation what was said last."""
    said = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    said = said if len(said) <= longest else f"{said[: longest - 1]}…"
    line = " → ".join(json.dumps(text, ensure_ascii=False) for text in (said, answer))
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in line)  # json escapes those below 32

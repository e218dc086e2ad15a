"""The plain loop against arithmetic done by hand (numpy, float64) and against float64 torch on a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from cases import every_case
from tiny import LLAMA
from toolkit.data.collate import MicroBatch, Slot, collate
from toolkit.data.formats import Example
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.reference.loop import PlainLoop, Window
from toolkit.reference.model import plain_decayed, plain_model
from toolkit.reference.optimizers.adamw import adamw_step
from toolkit.reference.schedule import plain_learning_rate
from toolkit.strategies import resolve

# Ragged on purpose, one row with its start unsupervised, and one micro-batch without samples.
ROWS = [[([3, 4, 5, 6, 2], 0), ([7, 2], 0)], [([4, 4, 9, 2], 2)], [], [([5, 3, 2], 0), ([8, 6, 7, 3, 9, 2], 3)]]


def train_plainly(
    loop: PlainLoop, steps: Iterable[Window], learning_rate: Callable[[int], float]
) -> list[tuple[float, float]]:
    """Run ``loop`` over windows; returns each step's mean loss and gradient norm before clipping."""
    loop.model.train()
    messages = []
    for step, window in enumerate(steps):
        losses = loop.backward(step, window)
        loop.update(learning_rate(step))
        messages.append((sum(losses) / max(1, sum(micro.supervised for _, micro in window)), loop.norm))
    return messages


def recipe(**sections: dict) -> Resolved:
    values: dict = {
        "model": {"config": LLAMA},
        "tokenizer": {"path": "none"},
        "data": {"train": "none"},
        "optimizer": {"lr": 0.1, "weight_decay": 0.2, "max_grad_norm": 0.05},
        "run": {"max_steps": 4},
    }
    values |= sections
    return resolve(Recipe.model_validate(values), device="cpu")


def window() -> list[tuple[int, MicroBatch]]:
    micros = []
    for index, rows in enumerate(ROWS):
        examples = [Example(ids, [-100] * hidden + ids[hidden:]) for ids, hidden in rows]
        slot = Slot(list(range(len(rows))), 0, 0, index // 2, 2)
        micros.append((index % 2, collate(examples, slot, "causal-lm", 0)))
    return micros


def no_seed(step: int, micro: int, rank: int) -> None:
    """Nothing here draws random numbers."""


class Bigram(nn.Module):
    """Logits of the next token are a row of a table: gradients can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 100).view(10, 10).clone())

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def bigram_gradient(table: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean loss and its gradient by hand: softmax minus one-hot at every supervised position, over their number."""
    gradient, loss, count = np.zeros_like(table), 0.0, 0
    for rows in ROWS:
        for ids, hidden in rows:
            for at in range(1, len(ids)):
                if at < hidden:
                    continue
                logits = table[ids[at - 1]]
                chances = np.exp(logits) / np.exp(logits).sum()
                loss -= np.log(chances[ids[at]])
                gradient[ids[at - 1]] += chances
                gradient[ids[at - 1], ids[at]] -= 1
                count += 1
    return loss / count, gradient / count


def test_two_steps_of_a_table_are_those_done_by_hand() -> None:
    resolved = recipe()
    loop = PlainLoop(Bigram(), resolved, frozenset({"table"}), no_seed)
    message = train_plainly(loop, [window(), window()], lambda step: 0.1)

    table = np.linspace(-1, 1, 100).reshape(10, 10)
    m = v = np.zeros_like(table)
    for step in (1, 2):
        loss, gradient = bigram_gradient(table)
        norm = np.sqrt((gradient**2).sum())
        assert message[step - 1] == pytest.approx((loss, norm), rel=1e-6)
        assert norm > 0.05, "the step clips"
        gradient = gradient * 0.05 / (norm + 1e-6)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        table = table * (1 - 0.1 * 0.2) - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    assert loop.coefficient == pytest.approx(0.05 / (norm + 1e-6), rel=1e-6)
    np.testing.assert_allclose(loop.weights["table"].detach().numpy(), table, rtol=2e-6, atol=1e-7)


def test_without_a_limit_nothing_is_clipped() -> None:
    resolved = recipe(optimizer={"lr": 0.1, "max_grad_norm": None})
    loop = PlainLoop(Bigram(), resolved, frozenset(), no_seed)
    train_plainly(loop, [window()], lambda step: 0.1)
    assert loop.coefficient == 1.0
    assert loop.norm > 0.05


def test_the_gradient_is_the_whole_batchs_in_float64() -> None:
    resolved = recipe()
    model = plain_model(resolved)
    loop = PlainLoop(model, resolved, plain_decayed(model, resolved), no_seed)
    loop.backward(0, window())

    exact = plain_model(resolved).double()
    rows = [row for micro in ROWS for row in micro]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([[-100] * hidden + row[hidden:] + [-100] * (width - len(row)) for row, hidden in rows])
    logits = exact(input_ids=ids, attention_mask=mask).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        error = (loop.gradients[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name


def test_a_16_bit_copy_leaves_the_sum_of_gradients_in_float32() -> None:
    resolved = recipe(precision="bf16")
    model = plain_model(resolved)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    loop = PlainLoop(model, resolved, frozenset(), no_seed, compute="copy")
    loop.backward(0, window())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {g.dtype for g in loop.gradients.values()} == {torch.float32}
    assert all(torch.equal(whole[name], weight) for name, weight in loop.weights.items())
    # A sum of several 16-bit gradients does not fit in 16 bits: were it rounded, nothing would be left over.
    rounded = [g.bfloat16().float().equal(g) for g in loop.gradients.values()]
    assert not any(rounded)
    before = {name: p.clone() for name, p in loop.trained.items()}
    loop.update(0.1)
    assert all(torch.equal(p, loop.weights[name].bfloat16()) for name, p in loop.trained.items())
    assert not any(torch.equal(p, before[name]) for name, p in loop.trained.items())


def test_a_loss_scale_leaves_no_trace_in_the_gradient() -> None:
    resolved = recipe()
    loop = PlainLoop(plain_model(resolved), resolved, frozenset(), no_seed)
    loop.backward(0, window())
    plain = loop.gradients
    loop.backward(0, window(), loss_scale=1024.0)
    assert all(torch.equal(loop.gradients[name], plain[name]) for name in plain)


def test_one_adamw_step_by_hand() -> None:
    step = adamw_step(
        torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([4.0]),
        step=3, lr=0.5, betas=(0.5, 0.75), eps=1.0, weight_decay=0.1,
    )  # fmt: skip
    # m = .5*1 + .5*3 = 2, over 1 - 1/8 = 16/7; v = .75*4 + .25*9 = 5.25, over 1 - 27/64 = 9.081081
    assert step.exp_avg.item() == 2.0
    assert step.exp_avg_sq.item() == 5.25
    expected = 2.0 - 0.5 * 0.1 * 2.0 - 0.5 * (16 / 7) / ((5.25 * 64 / 37) ** 0.5 + 1.0)
    assert step.weight.item() == pytest.approx(expected, rel=1e-15)


def test_adamw_is_torchs_in_float64() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    ours, m, v = weight.detach().clone(), None, None
    for step in range(1, 6):
        weight.grad = torch.randn(50, dtype=torch.float64)
        one = adamw_step(ours, weight.grad, m, v, step=step, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
        ours, m, v = one.weight, one.exp_avg, one.exp_avg_sq
        optimizer.step()
    torch.testing.assert_close(ours, weight.detach(), rtol=1e-13, atol=0)


@every_case(("name", "warmup"), product(["cosine", "linear", "constant"], [0, 1, 4]))
def test_the_schedule_is_transformers(name: str, warmup: int) -> None:
    from transformers import get_scheduler

    resolved = recipe(schedule={"name": name, "warmup_steps": warmup})
    kind = "constant_with_warmup" if name == "constant" else name
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=10)
    for update in range(11):
        expected = scheduler.get_last_lr()[0]
        assert plain_learning_rate(resolved, update, 10) == pytest.approx(expected, rel=1e-12, abs=1e-17)
        optimizer.step()
        scheduler.step()


def test_decay_spares_norms_biases_and_embeddings() -> None:
    resolved = recipe()
    model = plain_model(resolved)
    decayed = plain_decayed(model, resolved)
    assert "model.layers.0.mlp.up_proj.weight" in decayed
    assert "lm_head.weight" in decayed
    assert not {"model.embed_tokens.weight", "model.norm.weight"} & decayed
    everything = recipe(optimizer={"decay": "all"})
    assert plain_decayed(model, everything) == {name for name, _ in model.named_parameters()}

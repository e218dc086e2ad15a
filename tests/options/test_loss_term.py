"""A term of the loss from a single file, which nothing in the package knows: the penalty of confident predictions of
Pereyra et al. (arXiv:1701.06548), strength x sum p log p."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.plugins import VARIABLE, load_plugins
from toolkit.recipe.schema import Recipe
from toolkit.rooms import REGISTERED
from toolkit.strategies import resolve
from toolkit.verification.run import verify

PENALTY = '''
import sys

from toolkit.rooms import Keys, Option


class PenaltyKeys(Keys):
    strength: float


class Penalty(Option):
    name = "penalty"
    title = "confident predictions are penalised by the negative entropy of the softmax"
    keys = PenaltyKeys
    claim = None
    missing = ""
    adds_loss = True

    def apply(self, model, settings):
        """No forward changes."""

    def loss_term(self, settings):
        return lambda logits, targets: settings.strength * negative_entropy(logits, targets)

    def plain(self, settings):
        return plain_penalty(settings.strength)

    def faults(self):
        return [ignored()]

    def diagnoses(self):
        from toolkit.verification.diagnose.known import Known

        return {"penalty-missing": Known("confident predictions are not penalised", "step {step}: without it")}


def negative_entropy(logits, targets):
    logarithms = logits.log_softmax(-1)
    return (logarithms.exp() * logarithms).sum(-1).masked_fill(targets == -100, 0.0).sum()


def plain_penalty(strength):
    import torch

    from toolkit.reference.option import PlainOption

    class Plain(PlainOption):
        def loss_term(self, logits, targets):
            entropies = [torch.distributions.Categorical(logits=row).entropy() for row in logits[targets != -100]]
            return -strength * sum(entropies)

        def mistakes(self):
            return [("penalty-missing", {}, plain_penalty(0.0))] if strength else []

    return Plain()


def ignored():
    from toolkit.verification.faults.base import Fault

    class Ignored(Fault):
        id = "penalty-ignored"
        title = "a penalty is set and not added"
        stages = ("forward",)
        diagnoses = ("penalty-missing",)
        needs = {"options": {"penalty": {"strength": 0.1}}, "loss": "plain"}

        def inject(self, patch, case):
            @self.breaking(patch, sys.modules[__name__], "negative_entropy")
            def nothing(right, logits, targets):
                return 0.0 * right(logits, targets)

    return Ignored
'''


@pytest.mark.usefixtures("launches")
def test_it_is_added_proven_and_missed(
    tmp_path: Path, tiny_root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "penalty.py"
    file.write_text(PENALTY, encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(file))
    load_plugins()
    request.addfinalizer(lambda: REGISTERED.pop("penalty"))
    values = recipe_dict(tiny_root, options={"penalty": {"strength": 0.1}})
    with pytest.raises(InputError, match=r"loss: fused computes no logits for the term that options\.penalty adds"):
        resolve(Recipe.model_validate(values | {"loss": "fused"}), device="cpu")
    resolved = resolve(Recipe.model_validate(values), device="cpu")
    with WorkerGroup(2) as group:  # after the variable is set
        right = verify(resolved, group=group, time_limit=120)
        assert right.verdict == "equivalent", (right.difference, right.failure, right.unproven)
        wrong = verify(resolved, group=group, fault="penalty-ignored", time_limit=120, stop_early=True)
    assert wrong.verdict == "different"
    assert wrong.diagnosis is not None
    assert wrong.diagnosis.id == "penalty-missing"

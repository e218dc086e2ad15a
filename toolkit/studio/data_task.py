"""`toolkit data` as a page: samples as the model sees them, lengths, what padding costs."""

from __future__ import annotations

from typing import Any

from toolkit.errors import InputError
from toolkit.studio.recipe_task import checked_recipe
from toolkit.studio.worker import Settings

_ROWS = 10_000


def data(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """``text``: the recipe. ``only``: None, cut, unsupervised or duplicate."""
    if settings.public:
        raise InputError("this server reads no data")
    from toolkit.inspection.command import Request, inspect
    from toolkit.report.data_page import data_page

    recipe = checked_recipe(arguments["text"], settings)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": False})})
    found = inspect(Request(recipe, only=arguments["only"], evaluation=arguments["evaluation"], rows=_ROWS))
    return {"page": data_page(found), "refused": len(found.to_json().get("refused", ()))}

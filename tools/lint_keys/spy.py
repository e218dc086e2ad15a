"""A dict and a namespace that record which keys are read, to find the keys that a package uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class _Keys:
    """`d.keys()` of a spy: packages ask `name in d.keys()`."""

    def __init__(self, spy: SpyDict) -> None:
        self.spy = spy

    def __contains__(self, key: object) -> bool:
        return key in self.spy

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.keys(self.spy))


class SpyDict(dict):
    """A dict that notes every key asked for; its copies note into the same set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: set[str] = set()

    def __copy__(self) -> SpyDict:
        twin = SpyDict(self)
        twin.asked = self.asked
        return twin

    copy = __copy__

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.asked.add(key)
        return super().pop(key, *default)

    def keys(self) -> Any:
        return _Keys(self)


class SpyNamespace:
    """An argparse namespace that notes every attribute read from it."""

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "values", dict(values))
        object.__setattr__(self, "asked", set())

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value

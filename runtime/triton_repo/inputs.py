"""A Triton request's input tensors as Python values; errors name the tensor."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class InputError(ValueError):
    """An input that cannot be served; names it, its value and what is allowed."""


class Inputs:
    """One prompt's inputs by name, without the batch dimension."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    @classmethod
    def rows(cls, arrays: Mapping[str, Array]) -> list["Inputs"]:
        """Of a batch of prompts: each tensor's first dimension is the batch."""
        sizes = {name: len(array) for name, array in arrays.items()}
        count = max(sizes.values(), default=0)
        if uneven := [f"{name} {size}" for name, size in sizes.items() if size != count]:
            raise InputError(f"the batch has {count} prompts, but {', '.join(uneven)}")
        return [cls({name: array[i] for name, array in arrays.items()}) for i in range(count)]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def without(self, name: str) -> "Inputs":
        return Inputs({key: array for key, array in self._arrays.items() if key != name})

    def array(self, name: str) -> Array | None:
        return self._arrays.get(name)

    def texts(self, name: str) -> list[str]:
        """All strings of a tensor; none if it is not there."""
        array = self._arrays.get(name)
        values = [] if array is None else array.reshape(-1).tolist()
        try:
            return [v.decode() if isinstance(v, bytes) else str(v) for v in values]
        except UnicodeDecodeError:
            raise InputError(f"{name} is not UTF-8") from None

    def text(self, name: str) -> str | None:
        texts = self.texts(name)
        self._check_one(name, texts)
        return texts[0] if texts else None

    def value(self, name: str) -> Any:
        """A tensor's one number or flag; None if it is not there."""
        array = self._arrays.get(name)
        if array is None:
            return None
        self._check_one(name, array.reshape(-1))
        return array.reshape(-1)[0].item() if array.size else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.value(name)
        return default if value is None else bool(value)

    def integers(self, name: str) -> list[int]:
        array = self._arrays.get(name)
        return [] if array is None else [int(v) for v in array.reshape(-1).tolist()]

    def accept_only(self, name: str, *allowed: float | bool) -> None:
        """Refuse what this server does not do, unless the value asks for nothing.

        Raises:
            InputError: the value is not one of ``allowed``.
        """
        value = self.value(name)
        if value is not None and value not in allowed:
            one_of = " or ".join(str(one).lower() for one in allowed)
            raise InputError(f"{name} {str(value).lower()} is not supported; only {one_of} is")

    @staticmethod
    def _check_one(name: str, values: Sequence[Any] | Array) -> None:
        if len(values) > 1:
            raise InputError(f"{name} has {len(values)} values; expected one")

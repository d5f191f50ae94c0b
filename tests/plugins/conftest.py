"""Makes Triton's interpreter fast enough for tests, without changing what it computes."""

from typing import Any

import numpy as np
import pytest
import triton
from triton import language as tl
from triton.runtime import interpreter

_PATCHED: set[int] = set()
_reduce = interpreter.ReduceOps.apply_impl


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel's call of a helper. The interpreter patches triton.language at each of them
    (milliseconds) and never takes that back, so once per module is enough."""
    module = id(self.fn.__globals__)
    if module not in _PATCHED:
        interpreter._patch_lang(self.fn)
        _PATCHED.add(module)
    return self.rewrite()(*args, **kwargs)


def _apply(self: Any, operands: Any) -> Any:
    """Sorting networks reduce by xor, which the interpreter does element by element."""
    if self.combine_fn is tl.standard._xor_combine:
        data = operands[0].handle.data
        result = np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(result, operands[0].dtype)
    return _reduce(self, operands)


@pytest.fixture(autouse=True)
def _fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton.knobs.runtime.interpret, "something imported triton before tests/conftest.py"
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", _call)
    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", _apply)

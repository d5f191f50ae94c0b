"""Input tensors as values: errors name the tensor."""

import numpy as np
import pytest

from trtree.runtime.triton_repo.inflight_batcher import words_list
from trtree.runtime.triton_repo.inputs import InputError, Inputs


def test_values() -> None:
    inputs = Inputs(
        {
            "text": np.array([["snow ☃".encode()]], np.object_),
            "count": np.array([3], np.int32),
            "yes": np.array([[True]]),
            "many": np.array([1, 2], np.int32),
            "none": np.zeros((0,), np.int32),
        }
    )
    assert inputs.text("text") == "snow ☃"
    assert inputs.value("count") == 3
    assert inputs.flag("yes")
    assert not inputs.flag("absent")
    assert inputs.flag("absent", True)
    assert inputs.integers("many") == [1, 2]
    assert inputs.value("none") is None
    assert inputs.text("absent") is None
    assert "count" not in inputs.without("count")
    with pytest.raises(InputError, match="many has 2 values; expected one"):
        inputs.value("many")
    with pytest.raises(InputError, match="count 3 is not supported; only 0 or 1 is"):
        inputs.accept_only("count", 0, 1)
    inputs.accept_only("count", 3)
    inputs.accept_only("absent", 3)
    bad = Inputs({"text": np.array([b"\xff"], np.object_)})
    with pytest.raises(InputError, match="text is not UTF-8"):
        bad.text("text")


def test_a_batch_is_one_of_prompts() -> None:
    rows = Inputs.rows({"a": np.arange(4).reshape(2, 2), "b": np.array([[5], [6]])})
    assert [row.integers("a") for row in rows] == [[0, 1], [2, 3]]
    assert [row.value("b") for row in rows] == [5, 6]
    with pytest.raises(InputError, match="the batch has 2 prompts, but b 1"):
        Inputs.rows({"a": np.zeros((2, 1)), "b": np.zeros((1, 1))})


def test_words_as_these_clients_write_them() -> None:
    assert words_list([[7, 8], [9]], 4).tolist() == [[7, 8, 9, 0], [2, 3, -1, -1]]
    assert words_list([], 0).shape == (2, 0)

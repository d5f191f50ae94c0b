"""Reading config.json: typed access whose errors name the field and its value."""

from collections.abc import Mapping
from typing import Any

from trtree.build.network.network import NetworkError
from trtree.build.network.rope import positive_number

# Families go through the layers before any tensor is looked at: more than any model has.
MAX_LAYERS = 10_000


class ConfigReader:
    """Typed reads from one configuration dictionary; ``where`` names it in errors."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NetworkError(f"{self._where}: {key} must be a positive integer, not {value!r}")
        return value

    def layers(self) -> int:
        """``num_hidden_layers``, of a network that can be listed layer by layer."""
        layers = self.positive("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise NetworkError(
                f"{self._where}: num_hidden_layers must be at most {MAX_LAYERS}, not {layers}"
            )
        return layers

    def count(self, key: str, default: int | None = None) -> int:
        """A non-negative integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise NetworkError(
                f"{self._where}: {key} must be a non-negative integer, not {value!r}"
            )
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of non-negative integers; empty where it is missing."""
        values = self._get(key, [])
        fits = isinstance(values, list) and all(
            isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values
        )
        if not fits:
            raise NetworkError(
                f"{self._where}: {key} must be a list of non-negative integers, not {values!r}"
            )
        return tuple(values)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        return positive_number(self._where, key, self._get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise NetworkError(f"{self._where}: {key} must be true or false, not {value!r}")
        return value

    def present(self, *keys: str) -> str:
        """The first of several names of one field that is there; the first of all if none is."""
        return next((key for key in keys if self._config.get(key) is not None), keys[0])

    def require(self, key: str, supported: str | float) -> None:
        """Refuse any value but the one supported."""
        value = self._get(key, supported)
        if value != supported:
            raise NetworkError(
                f"{self._where}: {key} {value!r} is not supported; only {supported!r} is"
            )

    def attention_windows(self) -> tuple[int | None, ...]:
        """Per layer, the sliding window in tokens, or None for full attention.

        Read from ``layer_types`` and ``sliding_window``; ``use_sliding_window`` false
        turns windows off, as in the Qwen families. Without ``layer_types``, layers from
        ``max_window_layers`` on slide if ``use_sliding_window`` asks for it; the rule and
        its defaults are transformers' (configuration_qwen3.py).
        """
        layers = self.layers()
        kinds = self._config.get("layer_types")
        if kinds is None:
            return self._derived_windows(layers)
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise NetworkError(
                f"{self._where}: layer_types must list num_hidden_layers {layers} layers, "
                f"not {kinds!r}"
            )
        unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
        if unknown:
            raise NetworkError(f"{self._where}: layer_types {unknown} are not supported")
        if "sliding_attention" not in kinds or not self.flag("use_sliding_window", True):
            return (None,) * layers
        window = self.positive("sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def one_window(self) -> int | None:
        """``sliding_window`` where ``use_sliding_window`` asks for it."""
        # An explicit null means no window, even where windows are turned on.
        explicit_none = self._config.get("sliding_window", 0) is None
        if self.flag("use_sliding_window", False) and not explicit_none:
            return self.positive("sliding_window", 4096)
        return None

    def _derived_windows(self, layers: int) -> tuple[int | None, ...]:
        window = self.one_window()
        first = self.count("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(layers))

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise NetworkError(f"{self._where}: {key} is missing")
        return value

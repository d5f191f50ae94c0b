"""Reading config.json: typed access whose errors name the field and its value."""

from collections.abc import Mapping
from typing import Any

from trtree.build.network.network import NetworkError


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

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise NetworkError(f"{self._where}: {key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise NetworkError(f"{self._where}: {key} must be true or false, not {value!r}")
        return value

    def require(self, key: str, supported: str) -> None:
        """Refuse any value but the one supported."""
        value = self._get(key, supported)
        if value != supported:
            raise NetworkError(
                f"{self._where}: {key} {value!r} is not supported; only {supported!r} is"
            )

    def attention_windows(self) -> tuple[int | None, ...]:
        """Per layer, the sliding window in tokens, or None for full attention.

        Read from ``layer_types`` and ``sliding_window``; ``use_sliding_window`` false
        turns windows off, as in the Qwen families.
        """
        layers = self.positive("num_hidden_layers")
        kinds = self._config.get("layer_types") or ["full_attention"] * layers
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise NetworkError(
                f"{self._where}: layer_types has {len(kinds)} entries, "
                f"num_hidden_layers is {layers}"
            )
        unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
        if unknown:
            raise NetworkError(f"{self._where}: layer_types {unknown} are not supported")
        if "sliding_attention" not in kinds or not self.flag("use_sliding_window", True):
            return (None,) * layers
        window = self.positive("sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise NetworkError(f"{self._where}: {key} is missing")
        return value

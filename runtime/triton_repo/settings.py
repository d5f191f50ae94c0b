"""What a model's parameters say of its engine: strings in ``config.pbtxt``, typed here."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args, get_type_hints

from trtree.build.engine_dir import EngineDir
from trtree.runtime.executor import ExecutorConfig, KvCacheConfig, executor_config


class SettingsError(ValueError):
    """A parameter that cannot be; names it and its value."""


@dataclass(frozen=True)
class EngineSettings:
    """Parameters of a model that owns an engine.

    Args:
        engine_dir: relative to the model's folder, so that both can be moved together.
        threads: of the CPU engine on each rank; None: the processors it may use.
        medusa_choices: rank paths of the static tree; none: the engine's own, if it has one.
        mpirun: the launcher for an engine of several ranks.
        job_socket: of a job that runs already; empty: the model starts one.
        start_seconds: how long that job may take to load the engine.
        cancellation_check_period_ms: how often clients that left are looked for.
    """

    engine_dir: str = "../.."
    threads: int | None = None
    prefix_cache: bool = True
    max_queue_size: int = 1024
    medusa_choices: list[list[int]] | None = None
    speculative_mode: str | None = None
    speculative_tree: str | None = None
    speculative_tree_budget: int | None = None
    mpirun: str = "mpirun"
    job_socket: str = ""
    start_seconds: int = 600
    cancellation_check_period_ms: int = 100

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "EngineSettings":
        """From ``config.pbtxt``; parameters that are not here are another reader's.

        Raises:
            SettingsError: a value of another type.
        """
        types = get_type_hints(cls)
        names = {field.name for field in fields(cls)}
        found = {name: value for name, value in parameters.items() if name in names}
        return cls(**{name: _typed(name, value, types[name]) for name, value in found.items()})

    def to_parameters(self) -> dict[str, str]:
        """For ``config.pbtxt``: what is None is left out."""
        return {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in self.to_json_dict().items()
            if value is not None
        }

    @classmethod
    def from_json(cls, text: str) -> "EngineSettings":
        """Raises: SettingsError where it is none."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise SettingsError(f"settings {text!r:.200}: {error}") from None

    def to_json_dict(self) -> dict[str, Any]:
        return asdict(self)

    def speculation(self) -> dict[str, str | int]:
        """What requests that say nothing draft."""
        values = {
            "mode": self.speculative_mode,
            "tree": self.speculative_tree,
            "tree_budget": self.speculative_tree_budget,
        }
        return {name: value for name, value in values.items() if value is not None}

    def executor_config(self, engine: EngineDir) -> ExecutorConfig:
        config = executor_config(engine)
        if self.medusa_choices is not None:
            config.medusa_choices = self.medusa_choices
        config.max_queue_size = self.max_queue_size
        config.kv_cache_config = KvCacheConfig(enable_block_reuse=self.prefix_cache)
        return config


def flag(parameters: Mapping[str, str], name: str) -> bool:
    """A parameter that is true or false. Raises: SettingsError where it is neither."""
    return bool(_typed(name, parameters.get(name, "false"), bool))


def parameters_of(model_config: str) -> dict[str, str]:
    """The parameters in the configuration that Triton hands to a model, as JSON."""
    parameters = json.loads(model_config).get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}


def _typed(name: str, text: str, annotation: Any) -> Any:
    kinds = get_args(annotation) or (annotation,)
    if str in kinds:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    allowed = [list if str(kind).startswith("list") else kind for kind in kinds]
    if type(value) not in allowed:
        expected = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
        raise SettingsError(f"parameter {name} {text!r:.80}: expected {expected}")
    return value

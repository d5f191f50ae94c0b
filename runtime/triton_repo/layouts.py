"""The models of each layout, for an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtree.runtime.triton_repo import inflight_batcher, llmapi
from trtree.runtime.triton_repo.model_config import ModelConfig
from trtree.runtime.triton_repo.settings import EngineSettings

Layout = Literal["llmapi", "inflight_batcher", "both"]
LAYOUTS: tuple[Layout, ...] = ("llmapi", "inflight_batcher", "both")


@dataclass(frozen=True)
class RepositoryModel:
    """A model and the class that runs it; None for an ensemble."""

    config: ModelConfig
    runs: str | None


def engine_settings(
    settings: EngineSettings, manifest: Mapping[str, Any], tables: Mapping[str, Any] | None
) -> EngineSettings:
    """With what the engine was built for, where the settings do not say otherwise.

    Args:
        tables: the engine's static tree, if it has one.
    """
    built = manifest["speculative_config"]
    if built is None:
        return replace(settings, speculative_mode="plain")
    return replace(
        settings,
        speculative_mode=settings.speculative_mode or "tree",
        speculative_tree=settings.speculative_tree or built["tree"],
        speculative_tree_budget=(
            built["tree_budget"]
            if settings.speculative_tree_budget is None
            else settings.speculative_tree_budget
        ),
        medusa_choices=tables["medusa_choices"] if tables else settings.medusa_choices,
    )


def models_of(
    layout: Layout, settings: EngineSettings, *, decoupled: bool, max_batch_size: int
) -> list[RepositoryModel]:
    """The models of a layout; each that owns an engine has the settings as parameters.

    Args:
        max_batch_size: prompts in one request of the older layout.
    """
    models = []
    if layout in ("llmapi", "both"):
        config = ModelConfig(
            "trtree",
            llmapi.INPUTS,
            llmapi.OUTPUTS,
            decoupled=decoupled,
            parameters=settings.to_parameters(),
        )
        models.append(RepositoryModel(config, "TextModel"))
    if layout in ("inflight_batcher", "both"):
        found = inflight_batcher.configs(
            settings, decoupled=decoupled, max_batch_size=max_batch_size
        )
        models += [RepositoryModel(*one) for one in found]
    return models

"""A model's ``config.pbtxt`` as typed data, its text, and Triton's own schema to check it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

DataType = Literal["TYPE_STRING", "TYPE_BOOL", "TYPE_INT32", "TYPE_UINT64", "TYPE_FP32"]


class ModelConfigError(ValueError):
    """A configuration that Triton would not take, or not as it was meant."""


@dataclass(frozen=True)
class Tensor:
    """An input or output; ``dims`` without the batch, -1 for any size."""

    name: str
    data_type: DataType
    dims: tuple[int, ...] = (1,)
    optional: bool = False  # inputs only


@dataclass(frozen=True)
class Step:
    """One model of an ensemble: its tensors' names to the ensemble's."""

    model_name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class ModelConfig:
    """A model of the python backend, or an ensemble where there are ``steps``.

    Args:
        max_batch_size: 0 where tensors have no batch dimension.
        decoupled: a request may have several responses.
        instances: processes that run the model.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_size: int = 0
    decoupled: bool = False
    instances: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    def to_text(self) -> str:
        """The protobuf text of ``inference.ModelConfig``."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        kind = "platform" if self.steps else "backend"
        yield f"name: {_quoted(self.name)}"
        yield f"{kind}: {_quoted('ensemble' if self.steps else 'python')}"
        yield f"max_batch_size: {self.max_batch_size}"
        if not self.steps:  # an ensemble is what its models are
            yield f"model_transaction_policy {{ decoupled: {_bool(self.decoupled)} }}"
            yield f"instance_group [ {{ count: {self.instances} kind: KIND_CPU }} ]"
        for section, tensors in (("input", self.inputs), ("output", self.outputs)):
            for tensor in tensors:
                dims = ", ".join(map(str, tensor.dims))
                optional = " optional: true" if tensor.optional else ""
                yield (
                    f"{section} {{ name: {_quoted(tensor.name)} data_type: {tensor.data_type} "
                    f"dims: [ {dims} ]{optional} }}"
                )
        for key, value in self.parameters.items():
            yield (
                f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }}"
            )
        if self.steps:
            yield "ensemble_scheduling {"
            for step in self.steps:
                yield f"  step {{ model_name: {_quoted(step.model_name)} model_version: -1"
                for section, tensor_map in (("input", step.inputs), ("output", step.outputs)):
                    for key, value in tensor_map.items():
                        yield f"    {section}_map {{ key: {_quoted(key)} value: {_quoted(value)} }}"
                yield "  }"
            yield "}"


def can_check() -> bool:
    """Whether Triton's schema is here to check with: the ``triton`` extra."""
    return find_spec("tritonclient") is not None and find_spec("grpc") is not None


def check(config: ModelConfig, text: str) -> None:
    """Parse the text with Triton's own schema and compare it with what was meant.

    Raises:
        ModelConfigError: it does not parse, says something else, or still has a placeholder.
        ImportError: the ``triton`` extra is not installed.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    if "${" in text:
        at = text.index("${")
        raise ModelConfigError(f"{config.name}: a placeholder is left: {text[at : at + 40]!r}")
    message = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise ModelConfigError(f"{config.name}: config.pbtxt does not parse: {error}") from None
    for what, meant, read in (
        ("name", config.name, message.name),
        ("max_batch_size", config.max_batch_size, message.max_batch_size),
        ("decoupled", config.decoupled, message.model_transaction_policy.decoupled),
        ("inputs", _described(config.inputs), _read_tensors(message.input)),
        ("outputs", _described(config.outputs), _read_tensors(message.output)),
        (
            "parameters",
            dict(config.parameters),
            {key: value.string_value for key, value in message.parameters.items()},
        ),
        (
            "steps",
            [(s.model_name, dict(s.inputs), dict(s.outputs)) for s in config.steps],
            [
                (s.model_name, dict(s.input_map), dict(s.output_map))
                for s in message.ensemble_scheduling.step
            ],
        ),
    ):
        if meant != read:
            raise ModelConfigError(f"{config.name}: {what} is read as {read}, {meant} was meant")
    _check_names(config)


def _check_names(config: ModelConfig) -> None:
    """What the schema does not say: each tensor once, and steps joined to something."""
    for section, tensors in (("input", config.inputs), ("output", config.outputs)):
        names = [tensor.name for tensor in tensors]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ModelConfigError(f"{config.name}: {section} {sorted(twice)} is there twice")
    if not config.steps:
        return
    known = {tensor.name for tensor in config.inputs}
    for step in config.steps:
        if unknown := set(step.inputs.values()) - known:
            raise ModelConfigError(
                f"{config.name}: step {step.model_name} takes {sorted(unknown)}, which nothing gives"
            )
        known |= set(step.outputs.values())
    if missing := {tensor.name for tensor in config.outputs} - known:
        raise ModelConfigError(f"{config.name}: no step gives the output {sorted(missing)}")


def _described(tensors: tuple[Tensor, ...]) -> list[tuple[str, str, list[int], bool]]:
    return [(t.name, t.data_type, list(t.dims), t.optional) for t in tensors]


def _read_tensors(tensors: object) -> list[tuple[str, str, list[int], bool]]:
    from tritonclient.grpc import model_config_pb2

    name_of = model_config_pb2.DataType.Name
    return [
        (t.name, name_of(t.data_type), list(t.dims), getattr(t, "optional", False))
        for t in tensors  # type: ignore[attr-defined]
    ]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _quoted(text: str) -> str:
    """A string of the protobuf text format: JSON's escapes are among its own."""
    return json.dumps(text, ensure_ascii=False)

"""From a lowered network to an engine file, for SMs that need not be here."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtree.build.lowering.tensorrt.context import Profile
from trtree.build.lowering.tensorrt.library import Library
from trtree.build.lowering.tensorrt.lower import LoweredNetwork
from trtree.build.network.network import NetworkError

log = logging.getLogger(__name__)


class BuildMessages:
    """What the library said while it built: errors for our message, figures of memory."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.notes: list[str] = []

    def logger(self, trt: Any) -> Any:
        """An ILogger of the library that writes here."""
        messages = self

        class Logger(trt.ILogger):  # type: ignore[misc]
            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    messages.errors.append(message)
                elif severity == trt.ILogger.INFO:
                    messages.notes.append(message)
                elif severity == trt.ILogger.WARNING:
                    log.debug("%s", message)

        return Logger()


def compile_engine(
    library: Library,
    builder: Any,
    messages: BuildMessages,
    lowered: LoweredNetwork,
    profiles: Sequence[Profile],
    sms: Sequence[int],
    path: Path,
    *,
    plugins: bool = False,
) -> int:
    """Build ``lowered`` and stream the engine to ``path``; returns its size in bytes.

    ``plugins``: some layers are, and update KV in place.

    Raises:
        NetworkError: TensorRT could not build it; the message is TensorRT's first error.
        OSError: the file cannot be written.
    """
    trt = library.module
    config = _config(library, builder, sms)
    if plugins:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    for profile in profiles:
        config.add_optimization_profile(_profile(builder, lowered, profile))
    messages.errors.clear()
    with path.open("xb") as file:
        writer = _stream_writer(trt, file)
        done = builder.build_serialized_network_to_stream(lowered.definition, config, writer)
        if writer.error is not None:
            raise writer.error
        size = file.tell()
    if not done or size == 0:
        why = " ".join((messages.errors or ["no reason given"])[0].split())
        names = ", ".join(map(str, sms))
        raise NetworkError(
            f"{lowered.definition.name}: TensorRT cannot build for SM {names}: {why}"
        )
    return size


def _config(library: Library, builder: Any, sms: Sequence[int]) -> Any:
    trt = library.module
    config = builder.create_builder_config()
    # The inspection below reads layer names from the plan.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if hasattr(trt, "BuilderFlag") and "TF32" in trt.BuilderFlag.__members__:
        config.clear_flag(trt.BuilderFlag.TF32)
    if library.sms is not None:
        config.num_compute_capabilities = len(sms)
        for index, sm in enumerate(sms):
            capability = getattr(trt.ComputeCapability, f"SM{sm}")
            config.set_compute_capability(capability, index)
    return config


def _profile(builder: Any, lowered: LoweredNetwork, profile: Profile) -> Any:
    made = builder.create_optimization_profile()
    for binding in lowered.inputs:
        shapes = [
            tuple(
                profile.sizes[dim][which] if isinstance(dim, str) else dim for dim in binding.dims
            )
            for which in range(3)
        ]
        made.set_shape(binding.name, *shapes)
    return made


def _stream_writer(trt: Any, file: Any) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return int(file.write(data))
            except OSError as error:  # an exception cannot cross the library
                self.error = error
                return 0

    return Writer()

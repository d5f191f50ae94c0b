"""Device memory of one TensorRT engine: its bindings, sized by a manifest, reused by all runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "bool": torch.bool,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


class Executable(Protocol):
    """A loaded engine: the one part of the runner that needs CUDA."""

    def run(self, profile: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compute the outputs among ``tensors`` from the inputs, in the memory given.

        Every binding is there. A KV output is the same memory as its input, which is
        updated in place.
        """


@dataclass(frozen=True)
class Binding:
    """An input or output as the manifest tells it; dims may name sizes such as "rows"."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]
    alias: str | None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "Binding":
        return cls(entry["name"], _DTYPES[entry["dtype"]], tuple(entry["dims"]), entry["alias"])

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        return [sizes[dim] if isinstance(dim, str) else dim for dim in self.dims]


@dataclass(frozen=True)
class WorkPlan:
    """Work items that a step brings to the attention plugins, in the inputs ``work`` and (if
    their results are ``merged``) ``row_splits`` with this suffix; the other fields are
    plan_attention's arguments."""

    suffix: str
    kv_heads: int
    group: int
    block_m: int
    window: int | None
    top_k: int | None
    merged: bool
    max_items: int


@dataclass(frozen=True)
class EngineSpec:
    """What the manifest says of one engine file."""

    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    profiles: Mapping[str, Mapping[str, int]]  # largest sizes, by profile
    plans: tuple[WorkPlan, ...] = ()
    branches: Mapping[str, str] = field(default_factory=dict)  # inputs that are state, by kind

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "EngineSpec":
        return cls(
            tuple(map(Binding.read, entry["inputs"])),
            tuple(map(Binding.read, entry["outputs"])),
            {p["name"]: {n: s[2] for n, s in p["sizes"].items()} for p in entry["profiles"]},
            tuple(WorkPlan(**plan) for plan in entry["plans"]),
            entry.get("branches", {}),  # no engine before these were had any
        )

    @property
    def caches(self) -> dict[str, Binding]:
        """KV inputs by name."""
        aliased = {binding.alias for binding in self.outputs}
        return {b.name: b for b in self.inputs if b.name in aliased}

    def largest(self, binding: Binding) -> int:
        """Most numbers that a run has of it."""
        return max(torch.Size(binding.shape(sizes)).numel() for sizes in self.profiles.values())


def allocate_caches(
    spec: EngineSpec, sizes: Mapping[str, int], device: torch.device
) -> dict[tuple[str, ...], torch.Tensor]:
    """All cache inputs, those of one shape in one piece of memory [names, ...], so that a
    commit can move all of its layers at once.

    Keys and values of all layers have one shape; latents and an indexer's keys each have
    theirs. Zeros, not just any memory: what is hidden has weight zero, but zero times NaN is NaN.
    """
    alike: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
    for name, binding in spec.caches.items():
        alike.setdefault((tuple(binding.shape(sizes)), binding.dtype), []).append(name)
    return {
        tuple(names): torch.zeros(len(names), *shape, dtype=dtype, device=device)
        for (shape, dtype), names in alike.items()
    }


class BoundEngine:
    """An engine and its memory.

    Each binding has one allocation of the largest size, whose front serves every run: the
    addresses never change, so that a captured CUDA graph stays valid.

    Args:
        caches: memory of what requests keep: of every KV input [slots, heads, S, D] and every
            state that branches [slots, ...], of which a run is bound to a range of slots; or
            all pages.
        outputs: flat memory of outputs that somebody else looks after.
    """

    def __init__(
        self,
        spec: EngineSpec,
        executable: Executable,
        caches: Mapping[str, torch.Tensor],
        device: torch.device,
        outputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self._executable = executable
        self._caches = caches
        own = {
            binding.name: torch.zeros(spec.largest(binding), dtype=binding.dtype, device=device)
            for binding in (*spec.inputs, *spec.outputs)
            if binding.name not in {*caches, *(outputs or ())} and binding.alias is None
        }
        self._memory = own | dict(outputs or {})

    def run(
        self,
        profile: str,
        sizes: Mapping[str, int],
        inputs: Mapping[str, torch.Tensor],
        slots: slice = slice(None),
    ) -> dict[str, torch.Tensor]:
        """Run on the caches' ``slots``; returns the outputs by role.

        The results lie in this engine's memory until its next run.

        Raises:
            ValueError: sizes beyond the profile's, or inputs that are not the engine's.
        """
        for name, size in sizes.items():
            largest = self.spec.profiles[profile][name]
            if not 1 <= size <= largest:
                raise ValueError(f"profile {profile}: {name} {size}, the engine takes 1..{largest}")
        tensors = {name: cache[slots] for name, cache in self._caches.items()}
        for binding in self.spec.inputs:
            if binding.name in self._caches:
                continue
            view = self._view(binding, sizes)
            view.copy_(inputs[binding.name])  # in place, where a graph reads it
            tensors[binding.name] = view
        results = {}
        for binding in self.spec.outputs:
            if binding.alias is not None:
                tensors[binding.name] = tensors[binding.alias]
                continue
            tensors[binding.name] = self._view(binding, sizes)
            results[binding.name.removeprefix("output.")] = tensors[binding.name]
        self._executable.run(profile, tensors)
        return results

    def _view(self, binding: Binding, sizes: Mapping[str, int]) -> torch.Tensor:
        shape = binding.shape(sizes)
        count = torch.Size(shape).numel()
        return self._memory[binding.name][:count].view(shape)

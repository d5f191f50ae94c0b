"""What the checkpoints of a build hold, as the network's weight source."""

from dataclasses import dataclass

from trtree.build.checkpoint import Checkpoint
from trtree.build.network.graph import WeightInfo
from trtree.build.network.network import Activations, Owner


@dataclass(frozen=True)
class CheckpointSource:
    """Describes modules from the headers of the target's and the drafter's checkpoints.

    ``activations`` overrides what the checkpoints' quantization asks for.
    """

    target: Checkpoint
    drafter: Checkpoint | None = None
    activations: Activations | None = None

    def checkpoint(self, owner: Owner) -> Checkpoint:
        """The checkpoint that ``owner`` names."""
        if owner == "target":
            return self.target
        if self.drafter is None:
            raise ValueError("this build has no drafter")
        return self.drafter

    def describe(self, module: str, owner: Owner) -> WeightInfo:
        """From headers only.

        Raises:
            CheckpointError: the module has no weight, or an inconsistent one.
        """
        checkpoint = self.checkpoint(owner)
        info = checkpoint.info(f"{module}.weight")
        if len(info.shape) == 1:
            return WeightInfo("dense", tuple(info.shape), _name(info.dtype))
        linear = checkpoint.linear_info(module)
        shape = (linear.out_features, linear.in_features)
        if linear.kind == "dense":
            return WeightInfo("dense", shape, _name(linear.dtype), linear.has_bias)
        quantization = checkpoint.quantization
        assert quantization is not None  # an NVFP4 linear has one
        activations = self.activations or quantization.activations
        return WeightInfo("nvfp4", shape, "nvfp4", linear.has_bias, activations)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")

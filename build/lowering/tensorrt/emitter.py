"""A thin layer over INetworkDefinition: named layers, and constants that stay alive.

``trt.Weights`` borrows memory and cannot be read back for FP4, FP8 and BF16, so every
constant's tensor is kept here by its layer's name, for the build and for whoever
evaluates the network.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trtree.build.network.network import NetworkError

TRT_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.bool: "bool",
}


class Emitter:
    """Adds layers to one network; their names start with the current op's.

    Args:
        trt: the library's module, ``tensorrt`` or ``tensorrt_rtx``.
        network: an empty, strongly typed INetworkDefinition.
    """

    def __init__(self, trt: Any, network: Any) -> None:
        self.trt = trt
        self.network = network
        self.constants: dict[str, torch.Tensor] = {}
        self._shared: dict[str, Any] = {}
        self._scope = ""
        self._names: dict[str, int] = {}

    @contextmanager
    def op(self, name: str) -> Iterator[None]:
        """Name the layers added inside ``name/...``."""
        outer, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = outer

    # Constants

    def constant(self, name: str, tensor: torch.Tensor) -> Any:
        """A constant that several ops may share; one name stands for one tensor.

        uint8 stands for packed FP4, two elements a byte, the even one in the low nibble.
        """
        if name not in self._shared:
            tensor = tensor.detach()
            if not tensor.is_contiguous():
                raise NetworkError(f"constant {name} is not contiguous")
            shape = tuple(tensor.shape)
            if tensor.dtype == torch.uint8:
                shape = (*shape[:-1], shape[-1] * 2)
                dtype = self.trt.fp4
            else:
                dtype = getattr(self.trt, TRT_DTYPES[tensor.dtype])
            count = 1
            for size in shape:
                count *= size
            weights = self.trt.Weights(dtype, tensor.data_ptr(), count)
            layer = self.network.add_constant(shape, weights)
            if layer is None:
                raise NetworkError(f"constant {name}: TensorRT refused {list(shape)} of {dtype}")
            layer.name = name
            layer.get_output(0).name = name
            self.constants[name] = tensor
            self._shared[name] = layer.get_output(0)
        return self._shared[name]

    def scalar(self, value: float, rank: int, dtype: torch.dtype = torch.float32) -> Any:
        """``value`` of shape [1] * rank."""
        name = f"constant/{str(dtype).removeprefix('torch.')}/{value!r}/{rank}"
        return self.constant(name, torch.full([1] * rank, value, dtype=dtype))

    # Layers

    def layer(self, name: str, layer: Any) -> Any:
        """Name a layer just added; refuses None, TensorRT's way to say no."""
        path = f"{self._scope}/{name}" if self._scope else name
        if layer is None:
            raise NetworkError(f"{path}: TensorRT refused the layer; its log says why")
        count = self._names.get(path, 0)
        self._names[path] = count + 1
        layer.name = path if count == 0 else f"{path}.{count}"
        for index in range(layer.num_outputs):
            output = layer.get_output(index)
            output.name = layer.name if layer.num_outputs == 1 else f"{layer.name}:{index}"
        return layer

    def cast(self, x: Any, dtype: Any) -> Any:
        """x in ``dtype``; x itself where it already is."""
        if x.dtype == dtype:
            return x
        return self.layer("cast", self.network.add_cast(x, dtype)).get_output(0)

    def wide(self, x: Any) -> Any:
        """x in float32."""
        return self.cast(x, self.trt.float32)

    def binary(self, name: str, op: str, a: Any, b: Any) -> Any:
        """An element-wise operation of two tensors of one rank, broadcasting ones."""
        kind = getattr(self.trt.ElementWiseOperation, op)
        return self.layer(name, self.network.add_elementwise(a, b, kind)).get_output(0)

    def unary(self, name: str, op: str, x: Any) -> Any:
        kind = getattr(self.trt.UnaryOperation, op)
        return self.layer(name, self.network.add_unary(x, kind)).get_output(0)

    def sigmoid(self, name: str, x: Any) -> Any:
        kind = self.trt.ActivationType.SIGMOID
        return self.layer(name, self.network.add_activation(x, kind)).get_output(0)

    def reduce(self, name: str, op: str, x: Any, *, keep: bool, axis: int | None = None) -> Any:
        """Over one axis, by default the last."""
        kind = getattr(self.trt.ReduceOperation, op)
        axes = 1 << (len(x.shape) - 1 if axis is None else axis)
        return self.layer(name, self.network.add_reduce(x, kind, axes, keep)).get_output(0)

    def shuffle(
        self,
        name: str,
        x: Any,
        shape: Sequence[int] | None = None,
        *,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
    ) -> Any:
        """Transpose by ``before``, reshape (0 copies a size, -1 infers), transpose by ``after``."""
        layer = self.network.add_shuffle(x)
        if before is not None:
            layer.first_transpose = tuple(before)
        if shape is not None:
            layer.reshape_dims = tuple(shape)
        if after is not None:
            layer.second_transpose = tuple(after)
        return self.layer(name, layer).get_output(0)

    def gather(self, name: str, x: Any, indices: Any, axis: int, *, batch_dims: int = 0) -> Any:
        """Along ``axis``; the first ``batch_dims`` axes of x and indices go together."""
        layer = self.network.add_gather_v2(x, indices, self.trt.GatherMode.DEFAULT)
        layer.axis = axis
        layer.num_elementwise_dims = batch_dims
        return self.layer(name, layer).get_output(0)

    def size(self, name: str, x: Any, axis: int) -> Any:
        """int32 [1]: how large ``axis`` of x is in this run."""
        shape = self.layer(f"{name}.shape", self.network.add_shape(x)).get_output(0)
        index = self.constant(f"constant/int64/{axis}/index", torch.tensor([axis]))
        return self.cast(self.gather(name, shape, index, 0), self.trt.int32)

    def matmul(self, name: str, x: Any, weight: Any) -> Any:
        """x [B, W, K] @ weight [O, K].T -> [B, W, O]."""
        rows, columns = weight.shape
        weight = self.shuffle(f"{name}.weight", weight, (1, rows, columns))
        op = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, op.NONE, weight, op.TRANSPOSE)
        return self.layer(name, layer).get_output(0)

    def collective(self, name: str, x: Any, op: str, reduce: str | None, ranks: int) -> Any:
        """ALL_REDUCE (with SUM, MAX or MIN) or ALL_GATHER (along axis 0) over all ranks.

        The layer keeps no readable attributes, so its metadata says what it does.
        """
        import numpy as np

        kind = getattr(self.trt.CollectiveOperation, op)
        reduction = getattr(self.trt.ReduceOperation, reduce or "NONE")
        groups = np.arange(ranks, dtype=np.int64)
        added = self.network.add_dist_collective(x, kind, reduction, -1, groups)
        layer = self.layer(name, added)
        layer.num_ranks = ranks
        layer.metadata = " ".join(filter(None, (op, reduce)))
        return layer.get_output(0)

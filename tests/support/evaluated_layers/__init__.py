"""What each type of TensorRT's layers computes, one module per kind of layer."""

from evaluated_layers import attention, linear, moving, pointwise

LAYERS = pointwise.LAYERS | moving.LAYERS | linear.LAYERS | attention.LAYERS

"""The CPU kernels of NVFP4 linears: accuracy, equal bits, memory, refusals."""

import ctypes
import importlib.util
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
import trtree._core as _core
from hypothesis import given, settings
from hypothesis import strategies as st
from trtree.plugins import nvfp4_linear
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.plugins.nvfp4_linear.reference import Activations

"""A depthwise convolution over a row and its last ancestors; see README.md."""

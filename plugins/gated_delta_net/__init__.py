"""The gated delta rule over tree rows; see README.md."""

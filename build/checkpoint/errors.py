"""What a checkpoint that cannot be used is reported as."""


class CheckpointError(ValueError):
    """One line that names the file, the tensor or field, both values, and what to do."""


class NoWeightsError(CheckpointError):
    """A directory without any weights: configuration files at most."""

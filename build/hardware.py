"""Hardware files: what a plan is checked against."""

from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from trtree.build.options import OptionError


@dataclass(frozen=True)
class Hardware:
    """A machine of equal GPUs. memory_gb: what an engine may take of one, in 10^9 bytes."""

    name: str
    sm: int
    memory_gb: float
    gpus: int

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 1e9)

    @classmethod
    def read(cls, file: Path) -> "Hardware":
        """Read a file such as configs/hardware/rtx_pro_6000.yaml.

        Raises:
            OptionError: not readable, or a key is missing, unknown or of the wrong type.
        """
        try:
            data = yaml.safe_load(file.read_text())
        except (OSError, yaml.YAMLError, ValueError) as error:
            raise OptionError(f"{file}: {' '.join(str(error).split())}") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            raise OptionError(f"{file}: expected the keys {', '.join(sorted(names))}")
        for key in ("sm", "memory_gb", "gpus"):
            value = data[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise OptionError(f"{file}: {key} must be a positive number, not {value!r}")
        return cls(**data)

    def check(self, sms: tuple[int, ...], ranks: int) -> None:
        """Refuse a build that this machine cannot run.

        Raises:
            OptionError: names the option and both values.
        """
        if self.sm not in sms:
            built = ",".join(map(str, sms))
            raise OptionError(f"sm {built}: {self.name} is SM {self.sm}; pass --sm {self.sm}")
        if ranks > self.gpus:
            raise OptionError(f"tp {ranks}: the machine has {self.gpus} {self.name}")

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
            what = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise OptionError(f"{file}: {what}") from None
        names = {field.name for field in fields(cls)}
        expected = f"expected the keys {', '.join(sorted(names))}"
        if not isinstance(data, dict):
            raise OptionError(f"{file}: {expected}, not {data!r:.80}")
        for what, keys in (("lacks", names - set(data)), ("has", set(data) - names)):
            if keys:
                raise OptionError(f"{file}: {what} {', '.join(sorted(map(str, keys)))}; {expected}")
        if not isinstance(data["name"], str):
            raise OptionError(f"{file}: name must be text, not {data['name']!r}")
        for key in ("sm", "memory_gb", "gpus"):
            value, number = data[key], "number" if key == "memory_gb" else "integer"
            kinds = int | float if number == "number" else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e9:
                raise OptionError(f"{file}: {key} must be a positive {number}, not {value!r}")
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

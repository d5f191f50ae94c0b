"""Plants a fault in a module: its source with one passage changed, imported under a new name."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

_numbers = itertools.count()


def plant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """``old`` must stand in the module exactly once, so that a fault cannot go stale."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    count = source.count(old)
    assert count == 1, f"{old!r} stands {count} times in {module.__file__}"
    name = f"planted_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    sys.modules[name] = faulty
    spec.loader.exec_module(faulty)
    return faulty

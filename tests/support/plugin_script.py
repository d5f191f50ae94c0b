"""Adds plugin layers to a network of tensorrt_stub.py, in a process of its own: the stub replaces
the module tensorrt, and kernels are compiled, not interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_BEFORE = """
import json, sys
from pathlib import Path
import tensorrt_stub
from trtree.plugins.registry import register_plugins

trt, trtp = tensorrt_stub.load()
register_plugins(trt, trtp, Path(sys.argv[1]))
attribute, network, T = sys.argv[2], tensorrt_stub.Network(trt), tensorrt_stub.ITensor
"""
_BEHIND = """
layers = [
    {
        "name": added.name, "entry": added.entry, "grid": added.grid, "block": added.block,
        "shared_bytes": added.shared_bytes, "scalars": added.scalars,
        "parameters": added.ptx.decode().split(".entry")[1].split(")")[0].count(".param"),
        "outputs": [[o.dtype.name, list(o.shape)] for o in added.outputs],
    }
    for added in network.layers
]
print(json.dumps({"layers": layers, **result}))
"""


def run_plugins(script: str, attribute: str, folder: Path) -> dict[str, Any]:
    """``script`` adds layers to ``network`` with ``trt`` and ``trtp``, on tensors made by
    ``T(type, shape)``, and leaves a dict ``result``; with it comes what the builder kept of each
    layer."""
    path = folder / "script.py"
    path.write_text(_BEFORE + script + _BEHIND)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, str(path), str(folder / "kernels"), attribute]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result

"""Streaming: reading a large checkpoint keeps little more than one tensor in memory."""

import json
import subprocess
import sys
from pathlib import Path

COUNT, ROWS, COLUMNS = 20, 2048, 5120  # bf16: 20 tensors of 20 MiB, 400 MiB in all
TENSOR = ROWS * COLUMNS * 2
MIB = 1 << 20

# Runs in a process of its own. Peaks: anonymous pages (RssAnon) sampled while each
# result is alive; all resident pages, mapped files included, as the kernel's
# high-water mark.
READER = r"""
import json, re, sys
from pathlib import Path
from trtree.build.checkpoint import Checkpoint

def status(field):
    return int(re.search(field + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

checkpoint = Checkpoint.open(Path(sys.argv[1]))
reads = {
    "tensor": checkpoint.tensor,
    "linear": lambda name: checkpoint.linear([name.removesuffix(".weight")]).weight,
}
for read in reads.values():
    read("layer.0.weight")  # the first use of torch allocates memory of its own
result = {}
for how, read in reads.items():
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    anon, resident = status("RssAnon"), status("VmHWM")
    peak = total = 0
    for name in checkpoint.names():
        tensor = read(name)
        total += tensor.nbytes
        peak = max(peak, status("RssAnon"))
        del tensor
    result[how] = {"total": total, "anon": peak - anon, "resident": status("VmHWM") - resident}
print(json.dumps(result))
"""


def write_sparse(directory: Path) -> None:
    """A checkpoint of zeros that takes no disk: reading it brings in all its pages."""
    header = {
        f"layer.{i}.weight": {
            "dtype": "BF16",
            "shape": [ROWS, COLUMNS],
            "data_offsets": [i * TENSOR, (i + 1) * TENSOR],
        }
        for i in range(COUNT)
    }
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + COUNT * TENSOR)


def test_peak_memory_is_near_the_largest_tensor(tmp_path: Path) -> None:
    write_sparse(tmp_path / "model")
    run = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "model")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for how, measured in json.loads(run.stdout).items():
        assert measured["total"] == COUNT * TENSOR
        assert measured["anon"] < 4 * MIB, (how, measured)
        # The whole process, mapped files included: the tensor in use and no other.
        assert abs(measured["resident"] - TENSOR) < 4 * MIB, (how, measured)


# Packs every linear into a file.
PACKER = (
    READER.split("reads = {")[0]
    + r"""
from trtree.build.lowering.packing import append_linear
from trtree.build.resumable import ResumableFile

peaks = []
with ResumableFile(Path(sys.argv[2])) as file:
    def pack(name):
        module = name.removesuffix(".weight")
        append_linear(file, checkpoint.stored_linear([module]), [module], checkpoint)
    pack("layer.0.weight")
    Path("/proc/self/clear_refs").write_text("5")
    anon, resident = status("RssAnon"), status("VmHWM")
    for name in checkpoint.names()[:6]:
        pack(name)
        peaks.append(status("RssAnon") - anon)
    print(json.dumps({"anon": max(peaks), "resident": status("VmHWM") - resident}))
"""
)


def test_packing_takes_a_few_pieces_whatever_a_tensors_size(tmp_path: Path) -> None:
    write_sparse(tmp_path / "model")
    run = subprocess.run(
        [sys.executable, "-c", PACKER, str(tmp_path / "model"), str(tmp_path / "packed")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured = json.loads(run.stdout)
    assert measured["anon"] < 12 * MIB, measured
    assert measured["resident"] < TENSOR - 4 * MIB, measured
    assert (tmp_path / "packed").stat().st_size == (6 + 1) * TENSOR

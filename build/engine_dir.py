"""The engine directory: the one place that knows its files.

A directory appears complete or not at all: it is written beside its final path and
renamed. ``config.json`` is the manifest; its vocabulary is TensorRT-LLM's
(``pretrained_config``, ``build_config``, ``mapping``, ``speculative_config``). Every
file is listed with its size and SHA-256, but for ``calibration.json``, which belongs to
the machine it was measured on.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trtree.build.network.network import Network
from trtree.build.resumable import ResumableFile, remove_journals, staging_directory

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
MANIFEST = "config.json"
NETWORKS = "network.json"
PLAN = "plan.json"
TREE_TABLES = "tree_tables.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer"
CALIBRATION = "calibration.json"

# What is read of the manifest, by section, where the section is there.
_KEYS: dict[str, dict[str, type]] = {
    "pretrained_config": {"vocab_size": int},
    "build_config": {
        "activations": str,
        "kv_cache": dict,
        "page_size": int,
        "num_pages": int,
        "max_batch_size": int,
        "max_num_rows": int,
        "max_seq_len": int,
    },
    "mapping": {"world_size": int, "tp_size": int},
    "speculative_config": {
        "mask_token_id": int,
        "block_size": int,
        "tree": str,
        "tree_budget": int,
        "max_verify_width": int,
        "top_k": int,
    },
}
_NO_DRAFTER = "speculative_config"  # the section that may be null
_FROM_ZERO = ("mask_token_id", "tree_budget")  # other counts are at least 1
_RANK_FILE = re.compile(r"\.rank(\d+)\.")  # weights, plans and engines of one rank
_ENTRY = {"bytes": int, "sha256": str}  # of a file
_TENSORRT = {
    "library": str,
    "version": str,
    "attention": str,
    "cache_length": int,
    "engines": dict,
}


class EngineDirError(ValueError):
    """An engine directory that cannot be written or must not be loaded."""


def weights_file(owner: str, rank: int, suffix: str) -> str:
    """The name of a rank's weights: ``target.rank0.safetensors``."""
    return f"{owner}.rank{rank}.{suffix}"


def plan_file(rank: int, ranks: int) -> str:
    """The name of a rank's plan: ``plan.json`` where there is but one."""
    return PLAN if ranks == 1 else f"plan.rank{rank}.json"


class EngineDir:
    """A complete engine directory, opened for reading."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> "EngineDir":
        """Read the manifest and check every file against it, before any weight is loaded.

        Raises:
            EngineDirError: no engine there, another format version, or a file that is
                missing, of another size, or (with ``verify``) of another hash.
        """
        manifest_path = path / MANIFEST
        if not manifest_path.is_file():
            raise EngineDirError(
                f"{path}: no engine here ({MANIFEST} is missing); build one with build_engine.py"
            )
        try:
            manifest = json.loads(manifest_path.read_text())
            version = manifest["format_version"]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise EngineDirError(f"{manifest_path}: not the manifest of a trtree engine") from None
        if version != FORMAT_VERSION:
            raise EngineDirError(
                f"{manifest_path}: format version {version}, this trtree reads {FORMAT_VERSION}; "
                "rebuild the engine"
            )
        if faults := list(_manifest_faults(manifest)):
            raise EngineDirError(f"{manifest_path}: {'; '.join(faults)}. Rebuild the engine")
        for name, entry in manifest["files"].items():
            _check_file(path / name, entry)
        engine = cls(path, manifest)
        if verify:
            engine.verify()
        return engine

    def verify(self, rank: int | None = None) -> None:
        """Check every file's hash; with a rank, but for the files of other ranks.

        Raises:
            EngineDirError: a file's hash is not the manifest's.
        """
        for name, entry in self.manifest["files"].items():
            owner = _RANK_FILE.search(name)
            if rank is None or owner is None or int(owner[1]) == rank:
                _check_hash(self.path / name, entry)

    def networks(self) -> dict[str, Network]:
        """The stored networks by name."""
        data = json.loads((self.path / NETWORKS).read_text())
        return {name: Network.from_dict(network) for name, network in data.items()}

    def plan(self, rank: int = 0) -> dict[str, Any]:
        """A rank's plan of the CPU engine.

        Raises:
            EngineDirError: there is none.
        """
        name = plan_file(rank, self.manifest["mapping"]["tp_size"])
        plan = self._json(name)
        if plan is None:
            raise EngineDirError(f"{self.path / name}: missing; rebuild the engine")
        return plan

    def tree_tables(self) -> dict[str, Any] | None:
        """The static tree, if the engine was built with one."""
        return self._json(TREE_TABLES)

    def generation_config(self) -> dict[str, Any]:
        """Default stop ids and sampling defaults."""
        return self._json(GENERATION_CONFIG) or {}

    def calibration(self) -> dict[str, Any]:
        """What was measured of this engine, by whatever machine; empty before that.

        Raises:
            EngineDirError: the file is no JSON object.
        """
        file = self.path / CALIBRATION
        try:
            data = json.loads(file.read_text()) if file.is_file() else {}
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise EngineDirError(f"{file}: not a calibration; delete it and calibrate again")
        return data

    def write_calibration(self, data: Mapping[str, Any]) -> Path:
        """Replace the calibration, whole or not at all; returns its file.

        Raises:
            EngineDirError: it cannot be written.
        """
        file = self.path / CALIBRATION
        staging = file.with_name(f".{CALIBRATION}.{os.getpid()}")
        try:
            staging.write_text(json.dumps(data, indent=1) + "\n")
            staging.replace(file)
        except OSError as error:
            raise EngineDirError(f"{file}: cannot write: {error.strerror or error}") from None
        finally:
            staging.unlink(missing_ok=True)
        return file

    def fingerprint(self) -> str:
        """Of the engine, its calibration aside: the manifest's hash, which has all others in it."""
        return sha256(self.path / MANIFEST)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    def _json(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        return json.loads(file.read_text()) if file.is_file() else None


class EngineDirWriter:
    """Fills a directory that does not exist yet; see ``writing``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hashes: dict[str, str] = {}

    @contextmanager
    def resumable(self, name: str) -> Iterator[ResumableFile]:
        """A file that a later build goes on with if this one is killed."""
        with ResumableFile(self.path / name) as file:
            yield file
        self._hashes[name] = file.sha256

    def json(self, name: str, data: Any) -> None:
        (self.path / name).write_text(json.dumps(data, indent=1) + "\n")

    def networks(self, networks: Mapping[str, Network]) -> None:
        self.json(NETWORKS, {name: network.to_dict() for name, network in networks.items()})

    def copy(self, source: Path, name: str) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Hash everything and write the manifest."""
        remove_journals(self.path)
        files = {}
        for file in sorted(self.path.rglob("*")):
            if file.is_file() and file.name not in (CALIBRATION, MANIFEST):
                name = str(file.relative_to(self.path))
                digest = self._hashes.get(name) or sha256(file)
                files[name] = {"bytes": file.stat().st_size, "sha256": digest}
        self.json(MANIFEST, {"format_version": FORMAT_VERSION, **manifest, "files": files})


@contextmanager
def writing(
    path: Path, *, force: bool = False, key: str | None = None
) -> Iterator[EngineDirWriter]:
    """Write an engine directory: complete at ``path`` when the block ends, or not at all.

    Args:
        key: stands for all that decides the files' bytes; where a process was killed, the
            next with the same key finds the files it had written. None: never resume.

    Raises:
        EngineDirError: ``path`` exists and ``force`` is false, or is no engine directory,
            or cannot be written (no space, no permission).
    """
    try:
        _check_target(path, force)
        made = [parent for parent in path.parents if not parent.exists()]  # innermost first
    except OSError as error:  # a name too long, a folder that may not be read
        raise _unwritable(path, error) from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging_directory(path, key or uuid.uuid4().hex[:12]) as (staging, resumed):
            if resumed:
                log.warning("%s: going on with what a killed build has left", path)
            yield EngineDirWriter(staging)
            _move_into_place(staging, path)
    except BlockingIOError:
        raise EngineDirError(f"{path}: another process is building this engine now") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        if not path.exists():
            for parent in made:
                with suppress(OSError):  # not there, or not empty
                    parent.rmdir()


def _move_into_place(staging: Path, path: Path) -> None:
    if not path.exists():
        staging.replace(path)
        return
    # Two renames: the old engine stays whole until the new one is.
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        path.replace(old)
        staging.replace(path)
    except BaseException:
        with suppress(OSError):
            if not path.exists():
                old.replace(path)
            else:
                old.rmdir()  # still empty: the first rename failed
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_target(path: Path, force: bool) -> None:
    if not path.exists():
        return
    if not force:
        raise EngineDirError(f"{path} exists; pass --force to replace it, or another --output")
    is_engine = path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir()))
    if not is_engine:
        raise EngineDirError(f"{path} exists and is no engine directory; not replacing it")


def _unwritable(path: Path, error: OSError) -> EngineDirError:
    where = f" ({error.filename})" if error.filename else ""
    return EngineDirError(f"{path}: cannot write the engine: {error.strerror or error}{where}")


def sha256(file: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
            if progress:
                progress(len(piece))
    return digest.hexdigest()


def _manifest_faults(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What the rest of this package could not read of a manifest."""
    yield from _faults("", manifest, {"backend": str, "files": dict})
    for section, keys in _KEYS.items():
        if section == _NO_DRAFTER and manifest.get(section, 0) is None:
            continue
        yield from _faults("", manifest, {section: dict})
        yield from _faults(section, manifest.get(section), keys)
    if str(manifest.get("backend")).startswith("tensorrt"):
        yield from _faults("", manifest, {"sm": list, "tensorrt": dict})
        yield from _faults("tensorrt", manifest.get("tensorrt"), _TENSORRT)
    files = manifest.get("files")
    if not isinstance(files, dict):
        return
    for name in (NETWORKS, f"{TOKENIZER}/tokenizer.json"):
        if name not in files:
            yield f"files does not list {name}"
    for name, entry in files.items():
        if not isinstance(entry, dict):
            yield f"files.{name} must be of type dict, not {entry!r:.40}"
        yield from _faults(f"files.{name}", entry, _ENTRY)


def _faults(section: str, found: Any, expected: Mapping[str, type]) -> Iterator[str]:
    """Keys of a section that are missing or of another type; none if it is no section."""
    for key, kind in expected.items() if isinstance(found, dict) else ():
        name = f"{section}.{key}" if section else key
        if key not in found:
            yield f"{name} is missing"
        elif type(found[key]) is not kind:
            yield f"{name} must be of type {kind.__name__}, not {found[key]!r:.40}"
        elif kind is int and key != "bytes":
            least = 0 if key in _FROM_ZERO else 1
            if not least <= found[key] < 2**31:
                yield f"{name} must be from {least} to {2**31 - 1}, not {found[key]}"


def _check_file(file: Path, entry: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise EngineDirError(f"{file}: missing; the manifest lists it. Rebuild the engine")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise EngineDirError(
            f"{file}: {size} bytes, the manifest says {entry['bytes']}; rebuild the engine"
        )


def _check_hash(file: Path, entry: Mapping[str, Any]) -> None:
    if (found := sha256(file)) != entry["sha256"]:
        raise EngineDirError(
            f"{file}: SHA-256 {found[:16]}..., the manifest says {entry['sha256'][:16]}...; "
            "rebuild the engine"
        )

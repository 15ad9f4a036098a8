"""The prompts file: every form it may have, and one sentence for each way it can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.errors import PromptsError
from eagle_trace.manifest import Manifest
from eagle_trace.prompts import Prompt, check_tokens, content_key, read_prompts, tokenize
from eagle_trace.writer import TraceWriter, prepare_output


class Words:
    """A tokenizer that counts letters, enough to see what it was given."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, conversation: object, **options: object) -> list[int]:
        assert options == {"add_generation_prompt": True, "return_dict": False}
        if conversation[0]["role"] == "nobody":  # type: ignore[index]
            raise ValueError("no such role")
        return [1, 2, 3]


def write(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_all_three_forms_are_read_and_empty_lines_passed_over(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '{"prompt": "Hello you"}',
        "",
        '{"messages": [{"role": "user", "content": "Hi"}]}',
        '{"input_ids": [4, 5]}',
    )
    prompts = read_prompts(file)
    assert [tokenize(prompt, Words()) for prompt in prompts] == [[5, 3], [1, 2, 3], [4, 5]]


def test_keys_depend_on_content_and_tell_repeats_apart(tmp_path: Path) -> None:
    prompts = read_prompts(
        write(tmp_path, '{"prompt": "a"}', '{"prompt": "a"}', '{"prompt": "b"}', '{"id": "x", "prompt": "a"}')
    )
    keys = [prompt.key for prompt in prompts]
    assert keys[1] == f"{keys[0]}#2"
    assert len(set(keys)) == 4
    assert keys[3] == "x"


def test_an_id_pairs_lines_whose_content_differs_and_without_one_they_are_strangers(tmp_path: Path) -> None:
    trained, served = '"input_ids": [35, 7, 9]', '"messages": [{"role": "user", "content": "Hi"}]'
    (tmp_path / "train").mkdir()
    (tmp_path / "serve").mkdir()

    def keys(head: str) -> list[str]:
        files = (write(tmp_path / "train", f"{{{head}{trained}}}"), write(tmp_path / "serve", f"{{{head}{served}}}"))
        return [read_prompts(file)[0].key for file in files]

    assert keys('"id": "c1", ') == ["c1", "c1"]
    assert len(set(keys(""))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2 is not JSON"),
        ("[1, 2]", "line 2 needs exactly one of"),
        ('{"text": "a"}', "line 2 needs exactly one of"),
        ('{"prompt": "a", "input_ids": [1]}', "line 2 needs exactly one of"),
        ('{"prompt": ""}', "line 2: .* not empty"),
        ('{"prompt": 5}', "line 2: .* not empty"),
        ('{"messages": [{"role": "user"}]}', "line 2: .*role"),
        ('{"input_ids": []}', "line 2: .*not empty"),
        ('{"input_ids": [1, -2]}', "line 2: .*token ids"),
        ('{"input_ids": [true]}', "line 2: .*token ids"),
        (r'{"prompt": "\ud800"}', "line 2 holds half a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "line 2 holds half a surrogate pair"),
        (f'{{"prompt": {"[" * 100_000}{"]" * 100_000}}}', "line 2 is nested too deep"),
        (f'{{"messages": {"[" * 900}{"]" * 900}}}', "line 2"),
        (f'{{"input_ids": [{"9" * 5000}]}}', "line 2 is not JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(PromptsError, match=message):
        read_prompts(write(tmp_path, '{"prompt": "fine"}', line))


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "image_url"),
        ({"type": "image", "image": "cat.png"}, "image"),
        ({"image": "cat.png"}, "image"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video_url"),
        ({"type": "input_audio", "input_audio": {"data": "x"}}, "input_audio"),
    ],
)
def test_a_message_with_something_else_than_text_is_refused_by_its_kind(
    tmp_path: Path, part: dict[str, Any], kind: str
) -> None:
    """A chat template writes a placeholder for it, and two traces of a prompt without its image would agree."""
    said = {"type": "text", "text": "What is this?"}
    for content in ([said, part], [part]):
        line = json.dumps({"messages": [{"role": "user", "content": content}]})
        with pytest.raises(PromptsError, match=rf"line 1 holds a part of type {kind} beside its text"):
            read_prompts(write(tmp_path, line))


@pytest.mark.parametrize("content", ["Hi", [{"type": "text", "text": "Hi"}], [{"text": "Hi"}], ["Hi"], None, []])
def test_messages_of_text_alone_are_taken_in_any_spelling(tmp_path: Path, content: Any) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": content}]})
    assert read_prompts(write(tmp_path, line))[0].messages == ({"role": "user", "content": content},)


def test_no_file_and_no_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="cannot read"):
        read_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(PromptsError, match="holds no prompt"):
        read_prompts(write(tmp_path, "", " "))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptsError, match="cannot read"):
        read_prompts(binary)


def write_trace(out: Path, *prompts: list[int]) -> Path:
    prepare_output(out)
    writer = TraceWriter(out, Manifest("train", "values", "speculators"))
    for n, ids in enumerate(prompts):
        record = {"prompt_id": n, "prompt_key": f"key-{n}", "request_id": "", "token_ids": [*ids, 99]}
        writer.put_record("prompts", record | {"num_prompt_tokens": len(ids), "text": "", "output_ids": []})
    return writer.seal()


def test_the_prompts_of_a_trace_are_read_under_their_keys_and_without_their_answers(tmp_path: Path) -> None:
    assert read_prompts(write_trace(tmp_path / "t.trace", [1, 2, 3], [4, 5])) == [
        Prompt("key-0", input_ids=(1, 2, 3)),
        Prompt("key-1", input_ids=(4, 5)),
    ]


def test_a_trace_whose_prompts_are_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"first token of prompt key-1 \(1 of 2 lack it\)"):
        read_prompts(write_trace(tmp_path / "shifted", [1, 2], [-1, 5]))
    with pytest.raises(PromptsError, match="holds no prompt"):
        read_prompts(write_trace(tmp_path / "empty"))
    with pytest.raises(PromptsError, match="no finished trace"):
        read_prompts(tmp_path)
    next((tmp_path / "shifted" / "prompts.parquet").iterdir()).write_bytes(b"PAR1")
    with pytest.raises(PromptsError, match="cannot read the prompts of the trace"):
        read_prompts(tmp_path / "shifted")


def test_a_prompt_without_an_id_is_named_by_its_content(tmp_path: Path) -> None:
    (prompt,) = read_prompts(write(tmp_path, '{"input_ids": [1, 2]}'))
    assert prompt.key == content_key("input_ids", [1, 2])


def test_text_without_a_tokenizer_and_a_template_that_refuses_are_named() -> None:
    with pytest.raises(PromptsError, match="no tokenizer"):
        tokenize(Prompt("k", text="a"), None)
    with pytest.raises(PromptsError, match="chat template refuses"):
        tokenize(Prompt("k", messages=({"role": "nobody", "content": ""},)), Words())
    with pytest.raises(PromptsError, match="no tokens"):
        tokenize(Prompt("k", text=" "), Words())


def test_tokens_that_the_target_cannot_take_are_named() -> None:
    config = {"vocab_size": 10, "max_position_embeddings": 5}
    check_tokens("k", [9, 0, 1], config, 2)
    with pytest.raises(PromptsError, match=r"prompt k has token id 10, .* ends at 9"):
        check_tokens("k", [10], config)
    with pytest.raises(PromptsError, match="6 with its answer"):
        check_tokens("k", [1, 2, 3], {"text_config": config}, 3)

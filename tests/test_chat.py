"""Prompts (G1): one BOS at most, and the ids of context + question are those of the one-string prompt."""

import pytest
from tokenizers.processors import TemplateProcessing

from kvcore.chat import build_prompt
from kvcore.tiny import CHAT_TEMPLATE, byte_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = CHAT_TEMPLATE + ("{% if add_generation_prompt and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}")
SMOLLM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
)
TEMPLATES = {"llama3": LLAMA3, "mistral": MISTRAL, "qwen": CHAT_TEMPLATE, "smollm": SMOLLM}
PARTS = {
    "two parts": ("A long context. It ends here.", "\n\nWhat does it say?"),
    "no question": ("A long context that ends in blanks.  \n", ""),
    "no context": ("", "\n  What is two and two?"),
    "blank borders": ("  context ", "   question  "),
    "not ascii": ("Ein Häuschen — 東京 🙂", "¿Qué?"),
}


def tokenizer_with(template: str, adds_bos: bool):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if adds_bos:
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
        )
    return tokenizer


def one_string_ids(tokenizer, text: str, answer_prefix: str = "") -> list[int]:
    """Ids of transformers' own chat prompt of one user message."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer(rendered + answer_prefix, add_special_tokens=False).input_ids


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("adds_bos", [False, True], ids=["no_bos", "adds_bos"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_g1_a_chat_prompt_has_the_ids_of_the_one_string_prompt(template, adds_bos, parts):
    tokenizer = tokenizer_with(TEMPLATES[template], adds_bos)
    context, question = PARTS[parts]
    prompt = build_prompt(tokenizer, context, question, chat=True)
    assert prompt.ids == one_string_ids(tokenizer, context + question)
    assert prompt.ids.count(tokenizer.bos_token_id) == int("bos_token" in TEMPLATES[template])
    assert tokenizer.bos_token_id not in prompt.ids[1:]
    assert prompt.question_ids


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("adds_bos", [False, True], ids=["no_bos", "adds_bos"])
def test_g1_a_plain_prompt_has_the_ids_of_the_one_string_prompt(adds_bos, parts):
    tokenizer = tokenizer_with(CHAT_TEMPLATE, adds_bos)
    context, question = PARTS[parts]
    prompt = build_prompt(tokenizer, context, question, chat=False)
    assert prompt.ids == tokenizer(context + question).input_ids
    assert prompt.ids.count(tokenizer.bos_token_id) == int(adds_bos)


@pytest.mark.parametrize("template", TEMPLATES)
def test_g1_a_bos_written_into_the_text_is_not_doubled(template):
    tokenizer = tokenizer_with(TEMPLATES[template], adds_bos=True)
    plain = build_prompt(tokenizer, "<bos>context", "question", chat=False)
    assert plain.ids.count(tokenizer.bos_token_id) == 1
    assert plain.ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("chat", [False, True])
def test_g8_the_context_part_does_not_depend_on_the_question(chat):
    tokenizer = tokenizer_with(LLAMA3, adds_bos=True)
    prompts = [build_prompt(tokenizer, "The context.", question, chat=chat) for question in (" Why?", "\n\nWho?", "x")]
    assert len({tuple(prompt.context_ids) for prompt in prompts}) == 1
    assert tokenizer.decode(prompts[0].context_ids).endswith("The context.")


def test_a_token_across_the_border_belongs_to_the_question():
    tokenizer = tokenizer_with(CHAT_TEMPLATE, adds_bos=False)
    # the second byte of a two-byte character cannot be cut off the first
    prompt = build_prompt(tokenizer, "caf", "é", chat=False)
    assert tokenizer.decode(prompt.context_ids) == "caf"
    assert tokenizer.decode(prompt.question_ids) == "é"


@pytest.mark.parametrize("template", ["llama3", "qwen"])
def test_g2_the_answer_prefix_stands_after_the_assistant_header(template):
    tokenizer = tokenizer_with(TEMPLATES[template], adds_bos=True)
    prompt = build_prompt(tokenizer, "context", " question", chat=True, answer_prefix=" The answer is")
    assert tokenizer.decode(prompt.ids).split("assistant")[-1].strip("\n") == " The answer is"
    assert prompt.ids == one_string_ids(tokenizer, "context question", " The answer is")


def test_a_system_message_stands_before_the_users():
    tokenizer = tokenizer_with(CHAT_TEMPLATE, adds_bos=False)
    prompt = build_prompt(tokenizer, "context", "?", chat=True, system="Be brief.")
    assert tokenizer.decode(prompt.ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_g7_thinking_is_switched_through_the_template():
    tokenizer = tokenizer_with(QWEN3, adds_bos=False)
    without = tokenizer.decode(build_prompt(tokenizer, "context", "?", chat=True).ids)
    thinking = tokenizer.decode(build_prompt(tokenizer, "context", "?", chat=True, enable_thinking=True).ids)
    assert without.endswith("<think>\n\n</think>\n\n")
    assert "<think>" not in thinking


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        build_prompt(byte_tokenizer(), "", "", chat=False)


def test_chat_without_a_template_names_the_remedy():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; use an instruct model, or backbone\.instruct=false"):
        build_prompt(tokenizer, "context", "?", chat=True)

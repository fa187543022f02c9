"""The embedded engine with its scripted policy: the engine's laws, held by the real tokenizer and template."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from polar_gym.chat import ChatRequest, Completion
from polar_gym.chat.messages import assistant_message, canonical_json
from polar_gym.engines import ENGINES, EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.engines.embedded.answers import TAGS, opens_thinking, parse_answer, split_tags
from polar_gym.engines.embedded.chatml import TURN_TOKENS, ChatML
from polar_gym.schema import Message, PluginSpec, Sampling, ToolDefinition

CHATML = ChatML()
END_OF_TURN = 1


def tool(name: str, properties: dict[str, Any], required: list[str]) -> ToolDefinition:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


BASH = tool("bash", {"command": {"type": "string"}}, ["command"])
READ = tool("read", {"path": {"type": "string"}, "lines": {"type": "integer", "maximum": 10}}, ["path", "lines"])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def request(messages: list[Message], **fields: Any) -> ChatRequest:
    return ChatRequest(model="policy", messages=messages, **{"tools": [BASH], **fields})


async def engine(**options: Any) -> EmbeddedEngine:
    made = EmbeddedEngine(EmbeddedOptions(**options))
    await made.start()
    return made


async def answer(messages: list[Message], *, options: dict[str, Any] | None = None, **fields: Any) -> Completion:
    return await (await engine(**(options or {}))).chat(request(messages, **fields), Sampling())


def arguments_of(completion: Completion) -> dict[str, Any]:
    return json.loads(completion.message["tool_calls"][0]["function"]["arguments"])


# The prefix law -------------------------------------------------------------------------------------------------------

words = st.one_of(
    st.text(max_size=30),
    st.sampled_from([*TURN_TOKENS, *TAGS, "\n", "\n\n", " ", "a\n", "\nb", '</tool_call>{"name": "x"}', "\U0001f600é"]),
    st.builds(
        lambda parts: "".join(parts), st.lists(st.sampled_from(["x", " ", "\n", *TURN_TOKENS, *TAGS]), max_size=6)
    ),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": canonical_json(arguments)}},
    words,
    st.dictionaries(words, json_values, max_size=3),
)
with_calls = st.builds(
    assistant_message, st.none() | words.filter(str.strip), words, st.lists(calls, min_size=1, max_size=3)
)
without_calls = st.builds(assistant_message, words, words, st.just([]))
histories = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "user"]), words),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(history=histories, said=with_calls | without_calls, result=words, follow_up=words)
def test_next_prompt_starts_with_prompt_and_answer(
    history: list[Message], said: Message, result: str, follow_up: str
) -> None:
    prompt = CHATML.prompt_ids(history, [BASH])
    sampled = CHATML.answer_ids(said)
    parsed = parse_answer(CHATML.pieces(sampled), calls=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in parsed.get("tool_calls", [])]
    following = CHATML.prompt_ids([*history, parsed, *results, user(follow_up)], [BASH])
    assert following[: len(prompt) + len(sampled)] == prompt + sampled


@settings(max_examples=40, deadline=None)
@given(commands=st.lists(words, max_size=3), final=words, texts=st.lists(words, min_size=6, max_size=6))
def test_a_scripted_session_never_forks(commands: list[str], final: str, texts: list[str]) -> None:
    async def session() -> None:
        made = await engine(scripts=[Script(commands=commands, final_message=final)])
        messages: list[Message] = [{"role": "system", "content": texts[0]}, user(texts[1])]
        seen: list[int] = []
        for turn in range(len(commands) + 2):
            completion = await made.chat(request(messages), Sampling())
            prompt, sampled = completion.prompt_ids.tolist(), completion.response_ids.tolist()
            assert prompt[: len(seen)] == seen
            assert sampled[-1] == END_OF_TURN
            seen = prompt + sampled
            messages.append(completion.message)
            if turn < len(commands):
                assert arguments_of(completion) == {"command": commands[turn]}
                identity = completion.message["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": identity, "content": texts[2 + turn]})
            else:
                assert completion.message["content"] == final
                messages.append(user(texts[5]))

    asyncio.run(session())


@settings(max_examples=200, deadline=None)
@given(words)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    pieces = CHATML.pieces(CHATML.answer_ids(assistant_message(text, None, [])))
    assert "".join(piece.text for piece in pieces) == text
    assert not any(piece.is_tag for piece in pieces)


def test_special_tokens_in_content_stay_text() -> None:
    spelled = "".join((*TURN_TOKENS, *TAGS))
    plain = CHATML.prompt_ids([user("x"), {"role": "tool", "content": "x"}], [])
    injected = CHATML.prompt_ids([user(spelled), {"role": "tool", "content": spelled}], [])
    added = range(len(TURN_TOKENS) + len(TAGS))
    assert [token for token in injected if token in added] == [token for token in plain if token in added]


def test_half_an_emoji_does_not_break_the_template() -> None:
    """Harnesses cut tool output by UTF-16 units."""
    assert CHATML.prompt_ids([user("cut \ud83d")], []) == CHATML.prompt_ids([user("cut ?")], [])


def test_a_later_system_message_stays_in_its_place() -> None:
    first, later = {"role": "system", "content": "first"}, {"role": "system", "content": "later"}
    before = CHATML.prompt_ids([first, user("hello")], [BASH])
    after = CHATML.prompt_ids([first, user("hello"), later], [BASH])
    generation_prompt = len(CHATML.prompt_ids([], []))
    assert after[: len(before) - generation_prompt] == before[:-generation_prompt]


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names"),
    [
        ("Hello.", "Hello.", None, []),
        ("<think>\nhm\n</think>\n\nHello.", "\n\nHello.", "\nhm\n", []),
        ("\n<think>hm</think>Hello.", "Hello.", "hm", []),
        ("The tag </think> ends it.", "The tag </think> ends it.", None, []),
        ("<think>cut off", "", "cut off", []),
        ('Look:\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', "Look:\n", None, ["a"]),
        ('<think>x</think>\n<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>', None, "x", ["a"]),
        (
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>lost<tool_call>{"name": "b", "arguments": {}}',
            None,
            None,
            ["a", "b"],
        ),
        ('Oh <tool_call>{"name": "a", "argum', 'Oh <tool_call>{"name": "a", "argum', None, []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, None, []),
        ('<tool_call>["a"]</tool_call>', None, None, []),
        ('<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', None, None, []),
    ],
)
def test_parsing(text: str, content: str | None, reasoning: str | None, names: list[str]) -> None:
    message = parse_answer(split_tags(text), calls=True)
    found = [call["function"]["name"] for call in message.get("tool_calls", [])]
    assert found == names
    assert message.get("reasoning") == reasoning
    assert message["content"] == (text if content is None and not names else content)


def test_half_an_emoji_in_sampled_arguments_can_be_recorded() -> None:
    """Guards against an answer that is sampled and cannot be written to the journal: it has no UTF-8 form."""
    text = '<tool_call>{"name": "a", "arguments": {"b": "\\ud83d \\ud83d\\ude00"}}</tool_call>'
    (call,) = parse_answer(split_tags(text), calls=True)["tool_calls"]
    assert call["function"]["arguments"] == '{"b": "\\ud83d 😀"}'
    assert json.loads(orjson.dumps(call["function"]["arguments"])) == call["function"]["arguments"]


@pytest.mark.parametrize(
    ("prompt", "text", "content", "reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", "hm</think>Hello.", "Hello.", "hm"),
        ("<|im_start|>assistant\n<think>\n", "cut off", "", "cut off"),
        ("<|im_start|>assistant\n<think>\n", " <think>hm<think></think>Hello.", "Hello.", " hm"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hello.", "Hello.", None),
        ("<think><|im_end|>\n<|im_start|>assistant\n", "Hello.", "Hello.", None),
    ],
)
def test_a_prompt_may_open_the_thinking(prompt: str, text: str, content: str, reasoning: str | None) -> None:
    message = parse_answer(split_tags(text), calls=True, thinking=opens_thinking(split_tags(prompt)))
    assert message == assistant_message(content, reasoning, [])


def test_calls_stay_text_where_no_tools_are_offered() -> None:
    text = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert parse_answer(split_tags(text), calls=False) == {"role": "assistant", "content": text}


async def test_max_tokens_cuts_the_answer() -> None:
    options = {"scripts": [Script(commands=["ls -la"])]}
    whole = await answer([user("go")], options=options)
    cut = await answer([user("go")], options=options, max_tokens=8)
    assert whole.finish_reason == "tool_calls"
    assert cut.finish_reason == "length"
    assert cut.response_ids.tolist() == whole.response_ids[:8].tolist()
    assert cut.message["content"].startswith("<tool_call>")
    assert "tool_calls" not in cut.message
    assert cut.sampling["max_tokens"] == 8


async def test_max_tokens_of_exactly_the_answer_is_no_cut() -> None:
    whole = await answer([user("go")])
    again = await answer([user("go")], max_tokens=len(whole.response_ids))
    assert again.finish_reason == "stop"


async def test_stop_strings_cut_text_and_never_ids() -> None:
    options = {"scripts": [Script(final_message="one two three four")]}
    whole = await answer([user("go")], options=options)
    stopped = await answer([user("go")], options=options, stop=["five", "hre"])
    assert stopped.message["content"] == "one two t"
    assert stopped.finish_reason == "stop"
    ids = stopped.response_ids.tolist()
    assert ids == whole.response_ids[: len(ids)].tolist()
    text = "".join(piece.text for piece in CHATML.pieces(ids))
    assert "hre" in text
    assert len(ids) < len(whole.response_ids)
    assert "hre" not in "".join(piece.text for piece in CHATML.pieces(ids[:-1]))


async def test_scripted_logprobs_are_those_of_a_certain_event() -> None:
    completion = await answer([user("go")])
    assert completion.logprobs.tolist() == [0.0] * len(completion.response_ids)
    assert completion.sampling == Sampling().model_dump(exclude={"seed"})


async def test_a_prompt_that_fills_the_context_is_refused_in_vllms_words() -> None:
    made = await engine(max_model_len=100)
    wanted = request([user("word " * 100)])
    with pytest.raises(
        EngineError, match=r"maximum context length is 100 tokens\. However, .* \d+ input tokens"
    ) as refusal:
        await made.chat(wanted, Sampling())
    assert (refusal.value.status, refusal.value.kind) == (400, "context_length")
    assert f" {len(await made.template(wanted.messages, wanted.tools))} input tokens" in refusal.value.message


async def test_max_tokens_beyond_the_room_is_clamped() -> None:
    prompt = len((await answer([user("go")])).prompt_ids)
    completion = await answer([user("go")], options={"max_model_len": prompt + 1}, max_tokens=1000)
    assert (len(completion.response_ids), completion.finish_reason) == (1, "length")


async def test_count_tokens_is_the_length_of_the_prompt() -> None:
    made = await engine()
    wanted = request([user("count me")])
    assert len(await made.template(wanted.messages, wanted.tools)) == len(
        (await made.chat(wanted, Sampling())).prompt_ids
    )


async def test_text_parts_are_joined_and_images_refused_by_name() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = await answer([{"role": "user", "content": parts}])
    assert joined.prompt_ids.tolist() == (await answer([user("a\nb")])).prompt_ids.tolist()
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(EngineError, match=r"messages\[0\]\.content\[2\].*image_url"):
        await answer([{"role": "user", "content": [*parts, image]}])


# The script -----------------------------------------------------------------------------------------------------------

SHELLS = {
    "codex": (tool("exec_command", {"cmd": {"type": "string"}}, ["cmd"]), {"cmd": "ls"}),
    "codex, older": (
        tool("shell", {"command": {"type": "array", "items": {"type": "string"}}}, ["command"]),
        {"command": ["bash", "-lc", "ls"]},
    ),
    "claude": (
        tool("Bash", {"command": {"type": "string"}, "timeout": {"type": "number"}}, ["command"]),
        {"command": "ls"},
    ),
    "gemini": (
        tool("run_shell_command", {"command": {"type": "string"}, "description": {"type": "string"}}, ["command"]),
        {"command": "ls"},
    ),
    "qwen": (
        tool(
            "run_shell_command",
            {"command": {"type": "string"}, "is_background": {"type": "boolean"}},
            ["command", "is_background"],
        ),
        {"command": "ls", "is_background": False},
    ),
    "opencode": (
        tool("bash", {"command": {"type": "string"}, "description": {"type": "string"}}, ["command", "description"]),
        {"command": "ls", "description": "Run a scripted command"},
    ),
    "cline": (
        tool("run_commands", {"commands": {"type": "array", "items": {"type": "string"}}}, ["commands"]),
        {"commands": ["ls"]},
    ),
    "nullable": (
        tool(
            "local_shell",
            {
                "command": {"anyOf": [{"type": "null"}, {"type": "string"}]},
                "timeout": {"type": "integer", "maximum": 600},
            },
            ["command", "timeout"],
        ),
        {"command": "ls", "timeout": 600},
    ),
}


@pytest.mark.parametrize("harness", SHELLS)
async def test_the_shell_tool_is_found_by_its_schema(harness: str) -> None:
    shell, expected = SHELLS[harness]
    look_alikes = [tool("bash_output", {"id": {"type": "string"}}, ["id"]), READ]
    completion = await answer([user("go")], options={"scripts": [Script(commands=["ls"])]}, tools=[*look_alikes, shell])
    function = completion.message["tool_calls"][0]["function"]
    assert (function["name"], arguments_of(completion)) == (shell["function"]["name"], expected)


async def test_without_a_shell_the_script_ends_and_says_why() -> None:
    """Guards against "Resolved" from a policy that could do nothing with the tools that it was offered."""
    options = {"scripts": [Script(commands=["ls"], final_message="No shell.")]}
    said = (await answer([user("go")], options=options, tools=[READ])).message["content"]
    name = READ["function"]["name"]
    assert said == f"the scripted policy knows no tool that runs commands among those offered: {name}"
    assert (await answer([user("go")], options=options, tool_choice="none")).message["content"] == "No shell."


async def test_the_longest_match_wins_in_any_user_message() -> None:
    matches = {"": "any", "fix the bug": "long", "fix": "short"}
    made = await engine(scripts=[Script(match=match, final_message=said) for match, said in matches.items()])

    async def says(*texts: str) -> str:
        return (await made.chat(request([user(text) for text in texts]), Sampling())).message["content"]

    assert await says("hello") == "any"
    assert await says("fix it") == "short"
    assert await says("please fix the bug", "and hurry") == "long"


async def test_no_script_says_so() -> None:
    options = {"scripts": [Script(match="something else")]}
    assert "No script matches" in (await answer([user("go")], options=options)).message["content"]


async def test_a_forced_tool_is_called() -> None:
    named = {"type": "function", "function": {"name": "read"}}
    completion = await answer([user("go")], tools=[BASH, READ], tool_choice=named)
    assert arguments_of(completion) == {"path": "Run a scripted command", "lines": 10}
    required = await answer([user("go")], tools=[READ, BASH], tool_choice="required")
    assert arguments_of(required) == {"command": "true"}
    with pytest.raises(EngineError, match="'write', which is not among the tools: bash"):
        await answer([user("go")], tool_choice={"type": "function", "function": {"name": "write"}})
    with pytest.raises(EngineError, match="needs tools"):
        await answer([user("go")], tools=[], tool_choice="required")


async def test_a_json_schema_is_answered_with_an_instance() -> None:
    schema = {
        "type": "object",
        "properties": {"done": {"type": "boolean"}, "next": {"enum": ["user", "model"]}, "why": {"type": "string"}},
        "required": ["done", "next"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    completion = await answer([user("go")], tools=[], response_format=wanted)
    assert completion.message["content"] == '{"done": false, "next": "user"}'


async def test_delay_is_waited_for_and_can_be_cancelled() -> None:
    made = await engine(delay_seconds=60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await made.chat(request([user("go")]), Sampling())


def test_the_registry_finds_it_and_checks_its_options() -> None:
    assert ENGINES.get("embedded") is EmbeddedEngine
    spec = PluginSpec.model_validate({"name": "embedded", "scripts": [{"match": "a", "commands": ["ls"]}]})
    assert ENGINES.options(spec).scripts == [Script(match="a", commands=["ls"])]
    with pytest.raises(ValidationError, match=r"engine\.model_path"):
        EmbeddedOptions(policy="transformers")

"""Messages in, messages out."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.chat import ids
from polar_gym.providers import BadRequestError
from polar_gym.providers.anthropic import PROVIDER
from polar_gym.providers.anthropic.input import TOOL_ERROR
from tests.unit.providers.anthropic_requests import GO, PNG, RUN, parse, result, said, text, tool_use, user
from tests.wire.stand_in import assistant

CHAT_PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


# Messages -------------------------------------------------------------------------------------------------------------


def test_results_are_messages_of_their_own_and_come_before_the_users():
    request = parse(
        GO, said(tool_use("a"), tool_use("b")), user(result("b"), text("and"), result("a", None), text("so"))
    )
    assert request.messages[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "tool", "tool_call_id": "b", "content": "ok"},
        {"role": "user", "content": [text("and"), text("so")]},
    ]


def test_results_stand_in_the_order_of_their_calls():
    """Guards against the result of one call under the template's place of another: Claude Code sends them in the order
    in which the tools ended, and few templates print ids."""
    first, second = said(tool_use("a"), tool_use("b"), tool_use("c")), said(tool_use("d"), tool_use("e"))
    results = user(result("c"), result("other"), result("a")), user(result("b")), user(result("e"), result("d"))
    request = parse(GO, first, *results[:2], second, results[2], GO)
    assert [message["tool_call_id"] for message in request.messages if message["role"] == "tool"] == [
        *("a", "b", "c", "other"),
        *("d", "e"),
    ]


@pytest.mark.parametrize(("given", "arguments"), [([1], "[1]"), ("{}", '"{}"'), (3, "3"), (False, "false")])
def test_arguments_that_are_json_and_no_object_come_back(given: Any, arguments: str):
    """Guards against a session that ends because the policy encoded its arguments twice: Claude Code hands back the
    value that it read, and tells the policy of its mistake."""
    request = parse(GO, said(tool_use("a") | {"input": given}), user(result("a")))
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_moving_cache_marker_changes_nothing():
    """Claude Code sends the marked message as a block, and the same message later as a string."""
    marked = user(text("go", cache_control={"type": "ephemeral"}))
    assert parse(marked).messages == parse(GO).messages == [GO]


def test_the_system_prompt_has_no_billing_block():
    billing = text("x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=sdk-cli;")
    system = [billing, text("You are.", cache_control={"type": "ephemeral"}), text("Be brief.")]
    assert parse(GO, system=system).messages == [{"role": "system", "content": "You are.\n\nBe brief."}, GO]
    assert parse(GO, system="You are.").messages[0] == {"role": "system", "content": "You are."}
    assert parse(GO, system=[billing]).messages == [GO]


def test_a_system_message_in_mid_conversation_stays_where_it_is():
    later = {"role": "system", "content": [text("Remember.")]}
    assert parse(GO, later, GO, system="s").messages == [
        {"role": "system", "content": "s"},
        GO,
        {"role": "system", "content": "Remember."},
        GO,
    ]
    assert parse(later, GO, system="s").messages == [{"role": "system", "content": "s\n\nRemember."}, GO]


def test_images_and_documents():
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    request = parse(user(text("see"), {"type": "image", "source": PNG}, url, document))
    assert request.messages[0]["content"] == [
        text("see"),
        CHAT_PNG,
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        text("T\n\nD"),
    ]
    shown = parse(GO, said(tool_use("a")), user(result("a", [{"type": "image", "source": PNG}])))
    assert shown.messages[2] == {"role": "tool", "tool_call_id": "a", "content": [CHAT_PNG]}


def test_the_model_is_told_of_a_document_that_it_cannot_read():
    """Guards against a session that ends when the policy reads a PDF: Claude Code sends it whole."""
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    request = parse(user(text("see"), {"type": "document", "source": pdf}))
    assert request.messages[0]["content"][1] == text("[application/pdf document left out: it cannot be read here]")


def test_a_search_result_becomes_its_text():
    """Guards against a session that ends when a search tool answers in this form."""
    found = {"type": "search_result", "source": "https://example.org", "title": "T"}
    found |= {"content": [text("a"), text("b")], "citations": {"enabled": True}}
    request = parse(user(found), said(tool_use("a")), user(result("a", [found])))
    assert request.messages[0] == {"role": "user", "content": "T\n\nhttps://example.org\n\na\n\nb"}
    assert request.messages[2]["content"] == request.messages[0]["content"]


def test_the_model_sees_that_a_tool_failed():
    request = parse(GO, said(tool_use("a")), user(result("a", "no", is_error=True), result("b", is_error=False)))
    assert [message["content"] for message in request.messages[2:]] == [f"{TOOL_ERROR}no", "ok"]
    shown = parse(GO, said(tool_use("a")), user(result("a", [{"type": "image", "source": PNG}], is_error=True)))
    assert shown.messages[2]["content"] == [text(TOOL_ERROR), CHAT_PNG]


def test_what_was_carried_wins_over_what_was_shown():
    ours = {"type": "thinking", "thinking": "trimmed", "signature": ids.carrier("x", 0, " exactly this\n")}
    assert parse(GO, said(ours), GO).messages[1]["reasoning"] == " exactly this\n"
    redacted = {"type": "redacted_thinking", "data": ids.carrier("x", 0, "hidden")}
    assert parse(GO, said(redacted), GO).messages[1]["reasoning"] == "hidden"
    assert parse(GO, said(ours, text("Hi."), redacted), GO).messages[1]["reasoning"] == " exactly this\nhidden"
    foreign = {"type": "thinking", "thinking": "shown", "signature": "EqQB"}
    assert parse(GO, said(foreign, foreign), GO).messages[1]["reasoning"] == "shown\n\nshown"


def test_a_turns_thinking_names_the_call_that_it_came_from():
    """Where a turn has no tool calls, nothing else does. Leading system messages that become one move the others up."""
    ours = {"type": "thinking", "thinking": "t", "signature": ids.carrier("x", 0, "t")}
    foreign = {"type": "thinking", "thinking": "t", "signature": "EqQB"}
    later = {"role": "system", "content": "s"}
    request = parse(later, GO, said(ours, text("a")), GO, said(foreign), GO, said(ours), GO, system="s")
    assert request.origins == {2: "x", 6: "x"}
    assert [message["role"] for message in request.messages][:3] == ["system", "user", "assistant"]


def test_thinking_that_was_not_ours_is_taken_as_shown():
    for signature in ("EqQB", "", None):
        foreign = {"type": "thinking", "thinking": "shown", "signature": signature}
        assert parse(GO, said(foreign, text("a"), text("b")), GO).messages[1] == assistant("ab", "shown")
    unreadable = {"type": "redacted_thinking", "data": "EqQB"}
    assert parse(GO, said(unreadable, text("a")), GO).messages[1] == assistant("a")


# Tools ----------------------------------------------------------------------------------------------------------------


def test_tools_become_functions_or_are_withheld():
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9}
    withheld = ["web_search_20250305", "code_execution_20250825", "computer_20250124", "mcp_toolset"]
    request = parse(
        GO,
        tools=[
            {**RUN, "type": "custom", "description": "Runs.", "cache_control": {"type": "ephemeral"}},
            {"type": "bash_20250124", "name": "bash"},
            editor,
            *({"type": kind, "name": kind.partition("_2")[0]} for kind in withheld),
        ],
        mcp_servers=[{"type": "url", "name": "tracker", "url": "https://example.org"}],
    )
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["run", "bash", "str_replace_based_edit_tool"]
    assert request.tools[0]["function"] == {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}
    assert "command" in request.tools[1]["function"]["parameters"]["properties"]
    assert request.tools[2]["function"]["parameters"]["required"] == ["command", "path"]
    assert request.withheld_tools == [*withheld, "mcp:tracker"]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "none"}, "none", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", True),
        ({"type": "tool", "name": "run"}, {"type": "function", "function": {"name": "run"}}, None),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any, parallel: bool | None):
    request = parse(GO, tools=[RUN], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)


def test_the_other_fields():
    schema = {"type": "object"}
    request = parse(
        GO,
        stop_sequences=["END"],
        stream=True,
        temperature=0,
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        unheard_of=1,
    )
    assert (request.max_tokens, request.stop, request.stream) == (9, ["END"], True)
    assert request.response_format == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert parse(GO, output_format={"type": "json_schema", "schema": schema}).response_format == request.response_format


def test_counting_needs_no_limit():
    assert PROVIDER.parse_countable is not None
    assert PROVIDER.parse_countable({"model": "m", "messages": [GO]}).messages == [GO]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: is missing; send an integer"),
    ({"model": 3}, "model: expected a string, got 3"),
    ({"messages": []}, "messages: is empty"),
    ({"messages": [GO, said(text("I"))]}, r"messages: the last one is the assistant's.* end with a user message"),
    ({"messages": [user()]}, r"messages\[0\]\.content: is empty"),
    ({"messages": [{"role": "critic", "content": ""}]}, r"messages\[0\]\.role: 'critic' is not a role; use user, ass"),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content: expected a string or a list of blocks"),
    ({"messages": [user({"type": "audio"})]}, r"messages\[0\]\.content\[0\]\.type: 'audio' is not supported here; use"),
    (
        {"messages": [user({"type": "document", "source": {"type": "file", "file_id": "f"}})]},
        r"messages\[0\]\.content\[0\]\.source\.type: 'file' documents cannot be read here; send their text",
    ),
    (
        {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
        r"messages\[0\]\.content\[0\]\.source\.type: 'file' is not supported: files are not stored",
    ),
    (
        {"messages": [GO, said({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}), GO]},
        r"messages\[1\]\.content\[0\]\.type: 'server_tool_use' is not supported: .* leave the block out",
    ),
    ({"messages": [GO, said(tool_use("a") | {"input": None}), GO]}, r"messages\[1\].*\.input: is missing"),
    (
        {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
        "thread.previous_message_id: 'msg_1' is not stored; send the whole conversation in `messages`",
    ),
    ({"compaction": {"type": "summary"}}, "compaction: .* is not supported: nothing is compacted here; ask for a summ"),
    ({"tools": [{"name": "run"}]}, r"tools\[0\]\.input_schema: is missing; send an object"),
    ({"tools": [RUN, RUN]}, r"tools\[1\]\.name: another tool is already called 'run'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' needs `tools`"),
    ({"tool_choice": {"type": "tool", "name": "gone"}}, "tool_choice: 'gone' is not among `tools`"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
        | {"tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice.name: 'web_search' is a tool of Anthropic's own",
    ),
    ({"output_config": {"format": {"type": "xml"}}}, "type: 'xml' is not supported: use json_schema"),
    ({"stop_sequences": ["a", 1]}, r"stop_sequences\[1\]: expected a string, got 1"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message for _, message in BAD])
def test_a_refusal_names_the_block_the_value_and_the_fix(wrong: dict[str, Any], message: str):
    with pytest.raises(BadRequestError, match=f"^{message}"):
        PROVIDER.parse({"model": "m", "max_tokens": 9, "messages": [GO], **wrong})


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engines", "anthropics"),
    [
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains at least 5000 input "
            "tokens, which exceeds this limit even without any output tokens.",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 4000 output tokens and your "
            "prompt contains 3000 input tokens, for a total of 7000 tokens.",
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains 90000 characters (more "
            "than 80000 characters, which is the upper bound for 4096 input tokens).",
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),
        (
            "You passed 5000 input tokens and requested 0 output tokens. However, the model's context length is only "
            "4096 tokens",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        ("no room", "prompt is too long: no room"),
    ],
)
def test_an_overflow_is_said_in_the_words_that_make_clients_compact(engines: str, anthropics: str):
    body = PROVIDER.error(400, "context_length", engines)
    assert body["error"] == {"type": "invalid_request_error", "message": anthropics}

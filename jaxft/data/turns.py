"""Messages of a chat, checked and brought to one spelling."""

import json
from dataclasses import dataclass
from typing import Any

from jaxft.data.rows import parse_json
from jaxft.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant"}
_FLAGS = ("train", "weight")  # ours, not the template's


@dataclass(frozen=True)
class Chat:
    """Messages as the template sees them, and for each whether it is to be learned."""

    messages: list[dict[str, Any]]
    trained: list[bool]
    origin: str

    @property
    def roles(self) -> str:
        """Role sequence, for messages."""
        return ", ".join(message["role"] for message in self.messages)


def parse_messages(messages: Any, origin: str, trained_from: int = 0) -> Chat:
    """Chat of a list of ``{"role", "content"}`` objects.

    The assistant's turns from index `trained_from` on are learned, except those marked
    ``"train": false`` or ``"weight": 0``. Roles are read in any case; human, gpt and model are
    other names of user and assistant. Arguments of tool calls may be JSON text or an object.
    Raises UserError naming the row: unknown role, content that is no text, empty answer, a chat
    without a turn to learn or with turns after the last answer.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{origin}: messages must be a list of at least one message")
    parsed, trained = [], []
    for number, message in enumerate(messages, start=1):
        where = f"{origin}: message {number}"
        if not isinstance(message, dict):
            raise UserError(f"{where} must be an object with role and content")
        if "role" not in message and {"from", "value"} <= message.keys():
            raise UserError(
                f"{where} has from and value, as ShareGPT names them: call the column conversations"
            )
        role = _role(message.get("role"), where)
        learn = _flagged(message, where)
        # A key that is null is one that is not there: templates would print "None".
        rest = {k: v for k, v in message.items() if k not in _FLAGS and v is not None}
        parsed.append({**rest, **_content(message, role, where), "role": role})
        trained.append(role == "assistant" and learn and number > trained_from)
    chat = Chat(parsed, trained, origin)
    if parsed[-1]["role"] != "assistant":
        raise UserError(f"{origin}: the chat does not end with an assistant turn ({chat.roles})")
    if not any(trained):
        raise UserError(f"{origin}: no assistant turn of this chat is to be trained ({chat.roles})")
    return chat


def read_list(value: Any, column: str, origin: str) -> Any:
    """Messages of a cell: the JSON list it holds as text, where the format knows no lists."""
    if not isinstance(value, str):
        return value
    reason = "no list"
    try:
        read = parse_json(value)
    except ValueError as error:
        read, reason = None, str(error)
    if not isinstance(read, list):
        raise UserError(
            f"{origin}: {column} must be a list of at least one message, or the JSON text of one; "
            f"it is other text ({reason})"
        )
    return read


def from_conversation(turns: Any, origin: str) -> Any:
    """Messages of a ShareGPT conversation, whose turns are ``{"from", "value"}``.

    human, gpt, system and tool are the roles of the same turns, function_call an assistant's turn
    of tool calls, observation what the tool answered. Turns of ``{"role", "content"}`` stay.
    Raises UserError naming the row where a turn's meaning is not plain.
    """
    if not isinstance(turns, list):
        return turns  # `parse_messages` says so
    return [
        _said(turn, f"{origin}: message {number}") for number, turn in enumerate(turns, start=1)
    ]


def _said(turn: Any, where: str) -> Any:
    given = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else {}
    if not given.keys() & {"from", "value"}:
        return turn
    if given.keys() & {"role", "content", "tool_calls"}:
        raise UserError(f"{where} has both from, value and role, content: {', '.join(given)}")
    rest = {k: v for k, v in given.items() if k not in ("from", "value")}
    speaker, value = given.get("from"), given.get("value")
    name = speaker.lower() if isinstance(speaker, str) else speaker
    if name == "function_call":
        return {**rest, "role": "assistant", "tool_calls": _called(value, where)}
    return {**rest, "role": "tool" if name == "observation" else speaker, "content": value}


def _called(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls of a function_call turn: JSON of one call or of a list of them."""
    try:
        read = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        read = None
    calls = read if isinstance(read, list) else [read]
    plain = (
        isinstance(call, dict)
        and call.keys() == {"name", "arguments"}
        and isinstance(call["name"], str)
        and isinstance(call["arguments"], str | dict)
        for call in calls
    )
    if not calls or not all(plain):
        raise UserError(
            f"{where} (function_call): the value must be JSON with name and arguments, nothing "
            "else, to be read as a tool call"
        )
    return [{"type": "function", "function": call} for call in calls]


def _role(role: Any, where: str) -> str:
    name = role.lower() if isinstance(role, str) else None
    name = _ALIASES.get(name, name) if name else None
    if name not in ROLES:
        raise UserError(
            f"{where} has the unknown role {role!r}; known: {', '.join(ROLES)} (human is read as "
            "user, gpt and model as assistant)"
        )
    return name


def _flagged(message: dict[str, Any], where: str) -> bool:
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise UserError(f"{where}: 'train' must be true or false, not {train!r}")
    if weight is not None and weight not in (0, 1):
        raise UserError(f"{where}: 'weight' must be 0 or 1, not {weight!r}")
    return train is not False and weight != 0


def _content(message: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """The keys `content` and `tool_calls`, normalised."""
    content, calls = message.get("content"), message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise UserError(f"{where} ({role}): tool_calls must be a list of an assistant's calls")
        content = "" if content is None else content
    if not isinstance(content, str):
        kind = "null" if content is None else type(content).__name__
        raise UserError(f"{where} ({role}): content must be text, it is {kind}")
    if role == "assistant" and not calls and not content.strip():
        raise UserError(f"{where} ({role}) is empty")
    if not calls:
        return {"content": content}
    return {"content": content, "tool_calls": [_call(call, where) for call in calls]}


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object.

    Templates print them with `tojson`, which would quote a JSON text a second time.
    """
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict):
        raise UserError(f"{where}: a tool call must be an object with name and arguments")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: tool call arguments are not JSON ({error.msg})") from error
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner

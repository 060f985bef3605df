"""Messages to token ids through any chat template, with the spans of the agent's own turns.

The template is rendered once per sequence of roles with place holders for the contents; literal
pieces and contents are then tokenised apart and joined. So

* the span of a content is known, never searched for;
* special tokens that stand inside a content are text;
* a prompt is a prefix of prompt + completion, for generation and training alike, and
* `|trim` or markup tricks of a template do not meet the contents.

Templates that know no system role, or want it before a user message, get the prompt as a user
message; those that demand alternation get neighbouring messages of one role merged. Where a
template writes a reply in the history differently from a reply being generated (Qwen3's think
block), the generation header is used in both places: what is trained is what is generated.

Torch is not needed here; the tokenizer is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from optima_lite.errors import ModelError

Message = dict[str, str]
_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters: no template writes them


@dataclass(frozen=True)
class Encoded:
    """A tokenised view.

    `ids` are the token ids. `spans` are the half-open ranges [start, end) of `ids` that hold the
    agent's own turns, each with its end-of-turn token. `messages` are the ranges of every message
    as (role, start, end), contents only.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    messages: list[tuple[str, int, int]]


class ChatEncoder:
    """Tokenises views for one tokenizer and its chat template.

    Raises ModelError when there is no template, when no arrangement of roles suits it, or when
    its end-of-turn cannot be told.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template: "
                "use an instruct model, or add chat_template.jinja to its directory"
            )
        # SentencePiece models put a space before the first word; ours are never the first.
        marker = tokenizer("\n", add_special_tokens=False).input_ids
        plain = tokenizer("\nx", add_special_tokens=False).input_ids[len(marker) :]
        alone = tokenizer("x", add_special_tokens=False).input_ids
        self._anchor = 0 if alone == plain else len(marker)
        self._literals = lru_cache(maxsize=4096)(self._render)
        self._literal_ids = lru_cache(maxsize=4096)(self._tokenize_literal)
        self._special = {
            i for i, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)
        self.system = self._accepts("system", "user", "assistant", "user", "assistant") and (
            self._accepts("system", "assistant", "user", "assistant") and self._accepts("system")
        )
        self.repeats = self._accepts("user", "user", "assistant", "user", "user")
        try:
            self._literals(("user", "assistant", "user", "assistant"), False)
        except ModelError as error:
            raise ModelError(
                f"{tokenizer.name_or_path}: its chat template cannot show a conversation "
                f"of user and assistant ({str(error).rpartition(': ')[2]})"
            ) from None
        before = self._literals(("user", "assistant"), False)[1]
        self._lead = " " if before.endswith(" ") and not before.endswith("  ") else ""
        probe = self.encode([_user("a"), _assistant("b"), _user("c"), _assistant("d")])
        self._check_prefixes()
        self.end_of_turn = probe.ids[probe.spans[-1][1] - 1]
        if self.end_of_turn not in self._special:
            raise ModelError(
                f"{tokenizer.name_or_path}: its chat template ends a reply with no special token, "
                "so a model could not learn to stop"
            )

    # -- views to tokens --------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a view up to where the agent's next turn begins."""
        arranged = self._arrange(messages)
        if not self.repeats and arranged and arranged[-1]["role"] == "assistant":
            arranged.append(_user("…"))  # as _arrange does between two turns of one agent
        return self._join(arranged, generate=True).ids

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """A view for training: everything up to the end of the last own turn.

        Messages after the agent's last turn have nothing to teach and are left out.
        """
        arranged = self._arrange(messages)
        while arranged and arranged[-1]["role"] != "assistant":
            arranged.pop()
        return self._join(arranged, generate=False) if arranged else Encoded([], [], [])

    def text(self, text: str) -> list[int]:
        """Token ids of a content; special tokens in it are not special."""
        ids = self.tokenizer(
            "\n" * bool(self._anchor) + text, add_special_tokens=False, split_special_tokens=True
        ).input_ids
        return ids[self._anchor :]

    def reply(self, text: str) -> list[int]:
        """Token ids of a turn as a view holds it: with the space that some templates put before a
        reply, without its end-of-turn."""
        return self.text(self._lead + text) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a generated turn, without special tokens, stripped."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).strip()

    def reply_header(self) -> list[int]:
        """What stands before a reply that follows nothing: BOS, if the template has one, and the
        assistant's header. Empty where the model has neither."""
        closed = self._literals(("user",), False)[-1]
        header = self._literals(("user",), True)[-1].removeprefix(closed)
        ids = list(self._literal_ids(header.removesuffix(self._lead)))
        bos = self.tokenizer.bos_token
        begins = bos and self._literals(("user",), True)[0].startswith(bos)
        if bos and (begins or not ids) and not header.startswith(bos):
            ids.insert(0, self.tokenizer.bos_token_id)
        return ids

    # -- arranging roles --------------------------------------------------------------------

    def _arrange(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in roles and order that this template accepts."""
        out: list[Message] = []
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "system" and not self.system:
                role = "user"
            merge = out and out[-1]["role"] == role and role != "assistant"
            if merge and (not self.repeats or role == "system" or message["role"] != role):
                out[-1] = {"role": role, "content": f"{out[-1]['content']}\n\n{content}"}
            elif out and not self.repeats and out[-1]["role"] == role == "assistant":
                # Two turns in a row by one agent: the template wants somebody in between.
                out += [_user("…"), {"role": role, "content": content}]
            else:
                out.append({"role": role, "content": content})
        return out

    def _check_prefixes(self) -> None:
        """Raise ModelError where what a template writes depends on the messages that follow."""
        system = {"role": "system", "content": "a"}
        view = [system, _assistant("b"), _user("c"), _user("d"), _assistant("e"), _user("f")]
        encoded = self.encode([*view, _assistant("g")])
        for turn, (start, _) in zip((1, 4, 6), encoded.spans, strict=True):
            if self.prompt(view[:turn]) != encoded.ids[:start]:
                raise ModelError(
                    f"{self.tokenizer.name_or_path}: its chat template shows a message differently "
                    "once others follow, so a prompt is no prefix of prompt and reply"
                )

    def _accepts(self, *roles: str) -> bool:
        try:
            self._literals(roles, roles[-1] != "assistant")
        except ModelError:
            return False
        return True

    # -- rendering and joining --------------------------------------------------------------

    def _render(self, roles: tuple[str, ...], generate: bool) -> tuple[str, ...]:
        """The template's literal text around the contents: len(roles) + 1 pieces."""
        pieces = self._pieces(roles, generate)
        if generate and pieces[-1] == self._pieces(roles, False)[-1]:
            # No header before a reply, or a template that forgets add_generation_prompt.
            with suppress(ModelError):
                before = self._pieces((*roles, "assistant"), False)[len(roles)]
                if before.startswith(pieces[-1]):
                    pieces[-1] = before.removesuffix(" ")
        for i, role in enumerate(roles):
            if role == "assistant" and i:
                header = self._literals(roles[:i], True)[-1]
                # Mistral's "[/INST]" + " Hello": the history has a space that a reply starts with.
                pieces[i] = header + " " * (pieces[i] == f"{header} ")
        return tuple(pieces)

    def _pieces(self, roles: tuple[str, ...], generate: bool) -> list[str]:
        """The same as the template writes it."""
        slots = [f"{_OPEN}{i}{_CLOSE}" for i in range(len(roles))]
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": r, "content": s} for r, s in zip(roles, slots, strict=True)],
                tokenize=False,
                add_generation_prompt=generate,
            )
        except (TemplateError, ValueError, TypeError, IndexError, KeyError) as error:
            raise ModelError(
                f"{self.tokenizer.name_or_path}: its chat template refuses "
                f"{', '.join(roles)}: {error}"
            ) from None
        pieces = []
        for slot in slots:
            before, found, text = text.partition(slot)
            if not found or slot in text:
                raise ModelError(
                    f"{self.tokenizer.name_or_path}: its chat template does not show each "
                    f"message once ({', '.join(roles)})"
                )
            pieces.append(before)
        pieces.append(text)
        return pieces

    def _tokenize_literal(self, text: str) -> tuple[int, ...]:
        ids = self.tokenizer("\n" * bool(self._anchor) + text, add_special_tokens=False).input_ids
        return tuple(ids[self._anchor :])

    def _join(self, messages: list[Message], generate: bool) -> Encoded:
        literals = self._literals(tuple(m["role"] for m in messages), generate)
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        ranges: list[tuple[str, int, int]] = []
        previous = ""
        for message, literal in zip([*messages, None], literals, strict=True):
            lead = ""
            if literal.endswith(" ") and not literal.endswith("  "):
                # "[INST] Hello": the space belongs to the word that follows it.
                literal, lead = literal[:-1], " "
            pieces = list(self._literal_ids(literal))
            if previous == "assistant":
                start = ranges[-1][1]
                close = self._close(pieces)
                spans.append((start, len(ids) + close))
                if message is None and not generate:
                    pieces = pieces[:close]
            ids += pieces
            if message:
                content = self.text(lead + message["content"])
                ranges.append((message["role"], len(ids), len(ids) + len(content)))
                ids += content
                previous = message["role"]
        return Encoded(ids, spans, ranges)

    def _close(self, ids: list[int]) -> int:
        """How many tokens of the text after a reply belong to its end: up to a special one."""
        for i, token in enumerate(ids):
            if token in self._special:
                return i + 1
        raise ModelError(
            f"{self.tokenizer.name_or_path}: its chat template ends a reply with no special token, "
            "so a model could not learn to stop"
        )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}

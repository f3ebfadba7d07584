"""Which tokens may come next in an answer that follows a JSON schema.

The engine asks while it samples and the trainer when it scores. Both walk the same grammar over the same tokens, so
both leave the same ids, and nothing but the schema has to be recorded.

``llguidance`` (MIT, no dependencies; the extra ``structured``) walks it. While the grammar forces text, only the
tokenizer's own spelling of it is left.
"""

import importlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from longarc.errors import ConfigError, ContractError
from longarc.records.constraint import Constraint, Reasoning
from longarc.tokens.tokenizer import Tokenizer

_MAX_BLANKS: Final = 40
"""Blanks in a row between two parts of the JSON; a model without a plan would write nothing else."""
_MAX_COMPILED: Final = 64
"""Grammars that are kept."""
_ANY: Final = "(?s:.)"
"""Any character, in a regular expression."""


class AllowedIds(Sequence[int]):
    """Ids that may come next, ascending, in one bit for each id of the vocabulary."""

    __slots__ = ("_num", "_packed", "_vocab_size")

    def __init__(self, is_allowed: npt.NDArray[np.bool_]) -> None:
        """Keep where the array is True."""
        self._num = int(is_allowed.sum())
        self._packed = np.packbits(is_allowed)
        self._vocab_size = len(is_allowed)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return whether each id of the vocabulary is one of them."""
        return np.unpackbits(self._packed, count=self._vocab_size).astype(bool)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        return self.mask().nonzero()[0].astype(dtype or np.int64)

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found: int | list[int] = self.mask().nonzero()[0][index].tolist()
        return found


class GrammarWalk:
    """One completion's way through a grammar."""

    def __init__(
        self, matcher: Any, stop_ids: Sequence[int], *, vocab_size: int, end_id: int
    ) -> None:
        """Begin; made by ``Grammars.walk``."""
        self._matcher = matcher
        self._stop_ids = [i for i in stop_ids if i < vocab_size]
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._num_taken = 0
        self._is_over = False

    @property
    def num_taken(self) -> int:
        """Tokens taken so far."""
        return self._num_taken

    def take(self, token_ids: Iterable[int]) -> None:
        """Go on over sampled tokens.

        Raises:
            ContractError: one of them is not among those that were allowed.
        """
        for token_id in token_ids:
            may_end = token_id in self._stop_ids and not self._is_over
            if self._is_over or not (may_end or self._matcher.consume_token(token_id)):
                raise ContractError(
                    f"token {self._num_taken} of a constrained completion is {token_id}, which its grammar does not "
                    f"allow there: the tokenizer, the schema or llguidance is another one than it was sampled with"
                )
            self._is_over = may_end
            self._num_taken += 1

    def allowed(self) -> AllowedIds:
        """Return the ids that may come next.

        Raises:
            ContractError: there is none, because the grammar outgrew the library's limits.
        """
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        is_allowed = np.zeros(self._vocab_size, dtype=bool)
        num = min(self._end_id, self._vocab_size)
        is_allowed[:num] = bits[:num]
        is_allowed[self._stop_ids] = bool(bits[self._end_id])
        found = AllowedIds(is_allowed)
        if self._is_over or self._matcher.is_error() or not len(found):
            raise ContractError(
                f"nothing may follow token {self._num_taken} of a constrained completion: "
                f"{self._matcher.get_error() or 'it has ended'}"
            )
        return found


class Grammars:
    """The grammars of one tokenizer and model."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        """Bind a tokenizer; the library is loaded with the first walk.

        Args:
            tokenizer: of the model.
            vocab_size: of the model, which may have more ids than its tokenizer or fewer [tokens].
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._library_tokenizer: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def walk(self, constraint: Constraint, stop_ids: Sequence[int]) -> GrammarWalk:
        """Begin a completion; takes long where the schema is large and new. Any thread may.

        Args:
            constraint: what it follows.
            stop_ids: the ids that may end it once the schema is satisfied; at least one.

        Raises:
            ConfigError: the schema cannot be followed, nothing could end the completion, the tokenizer's ids
                have no bytes of their own, or ``llguidance`` is not installed.
        """
        if not stop_ids:
            raise ConfigError(
                "a completion that follows a JSON schema needs an id that ends it; send stop_ids"
            )
        with self._lock:
            matcher = self._matcher(constraint).deep_copy()
        return GrammarWalk(
            matcher,
            stop_ids,
            vocab_size=self._vocab_size,
            end_id=self._tokenizer.vocab_size,
        )

    def _matcher(self, constraint: Constraint) -> Any:
        found = self._compiled.get(constraint)
        if found is None:
            library = _library()
            if self._library_tokenizer is None:
                self._library_tokenizer = _library_tokenizer(library, self._tokenizer)
            grammar = _grammar(constraint, self._tokenizer.special_tokens)
            found = library.LLMatcher(self._library_tokenizer, grammar, log_level=0)
            if found.is_error():
                raise _refused(found.get_error())
            self._compiled[constraint] = found
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return found


def check_schema(json_schema: str) -> None:
    """Refuse a schema that cannot be followed, whatever the tokenizer.

    Raises:
        ConfigError: it is none, asks for the impossible, or has a keyword that ``llguidance`` does not know, or that
            is not installed.
    """
    problem = _library().LLMatcher.validate_grammar(
        _grammar(Constraint(json_schema=json_schema), {})
    )
    if problem and not problem.startswith("WARNING"):
        raise _refused(problem)


def _refused(problem: str) -> ConfigError:
    first = " ".join(problem.split())
    if "coerce_one_of" in first:
        first = (
            "a oneOf has schemas that one value may fit together, as far as can be seen; use anyOf"
        )
    return ConfigError(
        f"the JSON schema cannot be followed: {first}; change it (llguidance's documentation lists the keywords that "
        f"it knows)"
    )


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigError(
            "output that follows a JSON schema needs llguidance, which is not installed: "
            "pip install 'longarc[structured]'"
        ) from error


class _Spelling:
    """A tokenizer in the form that the library reads, with one more id for the end of an answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        num = tokenizer.vocab_size
        self.eos_token_id = num
        self.bos_token_id = None
        self.tokens = [*(tokenizer.token_bytes(i) for i in range(num)), b"<end of the answer>"]
        self.special_token_ids = [*tokenizer.special_tokens.values(), num]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # the library tries both
            raise TypeError("text is needed")
        return self._encode(text)


def _library_tokenizer(library: Any, tokenizer: Tokenizer) -> Any:
    if not tokenizer.is_byte_level:
        raise ConfigError(
            "this tokenizer is not byte-level: its ids have no bytes of their own, so nobody knows which of them "
            "continue a JSON text; ask for plain text"
        )
    wrapped = library.TokenizerWrapper(_Spelling(tokenizer))
    return library.LLTokenizer(wrapped, slices=library.LLTokenizer.json_slices())


def _grammar(constraint: Constraint, special: dict[str, int]) -> str:
    """Return the grammar in the library's own JSON."""
    schema = _schema(constraint.json_schema)
    if isinstance(schema, dict):
        blanks = f"[ \\n\\r\\t]{{1,{_MAX_BLANKS}}}"
        schema = schema | {"x-guidance": {"whitespace_pattern": blanks}}
    answer = "@answer"
    rules = []
    if constraint.allows_calls:
        answer = "(@answer | call)"
        rules.append(f"call: {_tag('<tool_call>', constraint, special)} (/{_ANY}+/ | <[*]>)*")
    start, more = _reasoning_rules(constraint.reasoning, constraint, special)
    rules += [
        f"start: {start} BLANKS? {answer}",
        f"BLANKS: /[ \\n\\r\\t]{{1,{_MAX_BLANKS}}}/",
        *more,
    ]
    grammars = [
        {"lark_grammar": "\n".join(rules)},
        {"name": "answer", "json_schema": schema},
    ]
    try:
        return json.dumps({"grammars": grammars})
    except RecursionError as error:
        raise _refused("it is nested too deeply") from error


def _schema(text: str) -> object:
    """Return a schema; one that allows everything as an object.

    The library reads numbers as doubles, so what would become another number is refused.
    """
    try:
        schema = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is not JSON that can be read: {error}") from error
    return {} if schema is True else schema


def _whole(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{text[:40]} does not fit into 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no number")
    return value


def _reasoning_rules(
    reasoning: Reasoning, constraint: Constraint, special: dict[str, int]
) -> tuple[str, list[str]]:
    """Return what stands before the answer, and the rules of it."""
    if reasoning == "none":
        return "", []
    ends, rules = [], []
    if "</think>" in special:
        ends.append(f"FREE? <[{special['</think>']}]>")
    if not constraint.tags_by_id or not ends:
        ends.append("spelt")
        rules.append(f'spelt[suffix="</think>"]: /{_ANY}*/')
        rules.append(f"FREE: /{_ANY}+/ & ~/{_ANY}*<\\/think>{_ANY}*/")
    else:
        rules.append(f"FREE: /{_ANY}+/")
    rules.append(f"thought: {' | '.join(ends)}")
    if reasoning == "open":
        return "thought", rules
    return f"(BLANKS? {_tag('<think>', constraint, special)} thought)?", rules


def _tag(tag: str, constraint: Constraint, special: dict[str, int]) -> str:
    """Return what writes a tag."""
    ways = [f"<[{special[tag]}]>"] if tag in special else []
    if not constraint.tags_by_id or not ways:
        ways.append(f'"{tag}"')
    return f"({' | '.join(ways)})"

"""Words that a small byte-level BPE trained on Python source holds whole.

Generated tasks and texts name things with them. A name of one token can be copied in one step and looked
up by one match, which is what a model of a million parameters learns first; names that fall into several
tokens ask for the same skill several times over. No word begins another one. A
test trains a tokenizer and holds the list against it.
"""

from typing import Final

WORDS: Final = (
    *("name", "value", "file", "path", "class", "type", "data", "line", "object", "list"),
    *("set", "text", "string", "module", "key", "default", "new", "result", "code", "call"),
    *("context", "method", "read", "write", "format", "size", "bytes", "add"),
    *("message", "end", "error", "encoding", "index", "command", "source", "option", "version"),
    *("print", "event", "start", "use", "argument", "time", "base", "prefix", "mode", "number"),
    *("info", "frame", "header", "close", "join", "first", "node", "root", "item", "state"),
    *("tuple", "spec", "current", "instance", "open", "loop", "pass", "token", "parent"),
    *("check", "test", "func", "flags", "main", "create", "match"),
    *("server", "output", "group", "break", "parse", "handle", "level", "count", "run", "offset"),
    *("socket", "last", "buffer", "stack", "help", "protocol", "pattern"),
    *("stream", "target", "debug", "tag", "process", "width", "empty", "split", "input", "case"),
    *("cache", "host", "compile", "request", "indent", "section", "child", "range", "replace"),
    *("copy", "length", "build", "thread", "extra", "make", "package", "entry"),
    *("config", "property", "log", "continue", "insert", "block", "part", "remove", "map"),
)

# Names of different things are different words: "the last directory that was named" is then found by one
# attention head from what a word is, while telling two words of one kind apart takes a chain of heads.
# Words with a second job in a conversation or in Python are kept out: they led the list of wrong copies.
_SPOKEN_FOR: Final = frozenset(
    ("class", "command", "code", "format", "error", "print", "file", "path")
)
_NAMES: Final = tuple(word for word in WORDS if word not in _SPOKEN_FOR)
DIRECTORIES: Final = _NAMES[:8]
FILE_NAMES: Final = _NAMES[8:22]
FILE_IDS: Final = _NAMES[22:34]
CODE_WORDS: Final = (_NAMES[34:50], _NAMES[50:66])
"""First and second words of a code."""
OTHER_WORDS: Final = tuple(word for word in WORDS if word not in {*CODE_WORDS[0], *CODE_WORDS[1]})
"""Words that are no part of a code."""

"""A shell script as simple commands: words with their spans, its own variables put in.

By the shell's rules as far as launch scripts use them. A value that the script does not decide (an argument, a variable
of the environment, the output of a command, two assignments) is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

_TOKEN = re.compile(
    r"""\\\r?\n|[ \t\r]+|\n
    |\$\(|\$\{|`
    |(?:\d+|&)?(?:<<<|<<-?|<>|>>|>\||>&|<&|<(?!\()|>(?!\())
    |&&|\|\||[;|&]|\\.
    |'[^']*'|"
    |\$\w+|\$[@*\#?$!-]
    |[^\s;|&\\'"$`<>]+|.""",
    re.S | re.X,
)
_REDIRECTION = re.compile(r"(\d+|&)?(<<<|<<-?|<>|>>|>\||>&|<&|<|>)$")
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=")
_SELF = r'"?\$(?:0|BASH_SOURCE|\{(?:0|BASH_SOURCE(?:\[0\])?)\})"?'
_OWN_FOLDER = rf'dirname (?:-- )?(?:{_SELF}|"?\$\((?:readlink -f|realpath) {_SELF}\)"?)'
_FOLDER = re.compile(
    rf'(?:{_OWN_FOLDER}|cd (?:-P )?(?:-- )?"?\$\({_OWN_FOLDER}\)(?P<below>(?:/[\w.-]+)*)/?"?'
    r"(?: ?&?>/dev/null(?: 2>&1)?)? ?&& ?pwd(?: -P)?)"
)
"""What scripts write for the folder that they are in, or one below or above it: the inside of ``$(…)``."""
_DECLARING = {"export", "local", "readonly", "declare", "typeset"}
_RUNS_ITS_INPUT = {"sbatch", "bash", "sh", "zsh", "srun", "ssh"}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command and its span; ``unknown`` where the shell would put in what the script does not say."""

    text: str
    start: int
    end: int
    unknown: bool = False
    expanded: bool = False  # from a variable: its text is not in the file at this place
    bare: bool = False  # a variable and nothing else, without quotes: none, one or several words


@dataclass
class _Variables:
    """The script's own variables; None where their value is not known."""

    texts: dict[str, str | None] = field(default_factory=dict)
    lists: dict[str, list[Word]] = field(default_factory=dict)

    def assign(self, name: str, value: str | None) -> None:
        """An assignment: a second one of another value leaves the variable unknown."""
        known = name not in self.texts or self.texts[name] == value
        self.texts[name] = value if known else None


def split(text: str, folder: str | None = None) -> list[list[Word]]:
    """The text's simple commands as words. ``folder``: where the script is, which ``$(dirname "$0")`` stands for."""
    return _Splitter(text, folder).commands()


class _Splitter:
    def __init__(self, text: str, folder: str | None = None) -> None:
        self.text, self.folder = text, folder
        self.at = 0
        self.variables = _Variables()
        self.found: list[list[Word]] = []
        self.words: list[Word] = []
        self.parts: list[str] = []
        self.start = -1
        self.unknown = self.expanded = self.quoted = False
        self.only: str | None = None  # the variable that the word consists of
        self.skip = False  # the next word is a redirection's file
        self.markers: list[str] = []  # of here-documents that begin at the next line
        self.marker_next = False
        self._forget_what_is_assigned_twice()

    def _forget_what_is_assigned_twice(self) -> None:
        values: dict[str, set[str]] = {}
        for match in re.finditer(r"(?m)(?:^|[;&|(]|\s)([A-Za-z_]\w*)(\+?)=([^\s;&|]*)", self.text):
            line = self.text[self.text.rfind("\n", 0, match.start(1)) + 1 : match.start(1)]
            if not line.lstrip().startswith(("#", "-")) and " --" not in line:
                values.setdefault(match.group(1), set()).add(match.group(3) + match.group(2))
        loops = re.findall(r"\bfor\s+(\w+)\s+in\b|\bread\s+(?:-\w+\s+)*(\w+)", self.text)
        for name in [n for n, seen in values.items() if len(seen) > 1] + [n for pair in loops for n in pair if n]:
            self.variables.texts[name] = None

    def commands(self) -> list[list[Word]]:
        while self.at < len(self.text):
            match = _TOKEN.match(self.text, self.at)
            assert match is not None
            token, begin, self.at = match.group(), self.at, match.end()
            if token[0] in " \t\r" or token.startswith(("\\\n", "\\\r")):
                self._finish(begin)
            elif token in ("\n", ";", "|", "&", "&&", "||"):
                self._end(begin)
                if token == "\n":
                    self._here_documents()
            elif token[0] == "#" and self.start < 0:
                newline = self.text.find("\n", begin)
                self.at = newline if newline >= 0 else len(self.text)
            elif _REDIRECTION.match(token) and not (token[0].isdigit() and self.start >= 0):
                self._finish(begin)
                self.skip, self.marker_next = True, token.lstrip("0123456789&") in ("<<", "<<-")
            else:
                self._piece(token, begin)
        self._end(len(self.text))
        return self.found

    def _piece(self, token: str, begin: int) -> None:
        first = self.start < 0
        self.start = begin if first else self.start
        if token == '"':
            self.quoted = True
            self._quoted(begin)
            return
        if token[0] == "'" and len(token) > 1:
            self.quoted = True
            self.parts.append(token[1:-1])
        elif token in ("$(", "`"):
            self._unknown(begin, ")" if token == "$(" else "`")
        elif token == "${":
            self._braces(begin, first)
        elif token[0] == "$" and len(token) > 1:
            self._variable(token[1:], first)
        else:
            self.only = None
            self.parts.append(token[1:] if token[0] == "\\" and len(token) > 1 else token)
            if token.endswith("=(") or (token == "(" and "".join(self.parts).endswith("=(")):
                self._array()
        if not first:
            self.only = None

    def _quoted(self, begin: int) -> None:
        """The inside of double quotes."""
        first = not self.parts and not self.unknown
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                return
            match = re.compile(r"\$\(|\$\{|\$\w+|\$[@*#?!-]|`|\\.|[^$`\\\"]+|.", re.S).match(self.text, self.at)
            assert match is not None
            token, here, self.at = match.group(), self.at, match.end()
            if token in ("$(", "`"):
                self._unknown(here, ")" if token == "$(" else "`")
            elif token == "${":
                self._braces(here, first)
            elif token[0] == "$" and len(token) > 1:
                self._variable(token[1:], first)
            else:
                self.only = None
                self.parts.append(token[1:] if token[0] == "\\" and token[1:] in '"\\$`' else token)
            first = False

    def _unknown(self, begin: int, close: str) -> None:
        """`$(…)` or backticks: what the command prints, which is known of the script's own folder alone."""
        depth, self.only, inside = 1, None, self.at
        if close == "`":
            end = self.text.find("`", self.at)
            self.at = end + 1 if end >= 0 else len(self.text)
        while close == ")" and depth and self.at < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            self.at += 1
        words = " ".join(self.text[inside : self.at - 1].split())
        own = _FOLDER.fullmatch(words.replace("$( ", "$(").replace(" )", ")").replace("> /", ">/"))
        if own is not None and self.folder is not None:
            self.expanded = True
            self.parts.append(self.folder + (own["below"] or ""))
        else:
            self.unknown = True
            self.parts.append(self.text[begin : self.at])

    def _braces(self, begin: int, first: bool) -> None:
        """`${NAME}`; with an operator inside the value is unknown."""
        depth = 1
        while depth and self.at < len(self.text):
            depth += {"{": 1, "}": -1}.get(self.text[self.at], 0)
            self.at += 1
        inside = self.text[begin + 2 : self.at - 1]
        if re.fullmatch(r"\w+(\[[@*]\])?", inside):
            self._variable(inside, first)
        else:
            self.unknown = True
            self.only = "" if first and inside[:1] in "@*" else None
            self.parts.append(self.text[begin : self.at])

    def _variable(self, name: str, first: bool) -> None:
        value = None if "[" in name else self.variables.texts.get(name)
        self.only = name if first else None
        if value is None:
            self.unknown = True
            self.parts.append(f"${name}")
        else:
            self.expanded = True
            self.parts.append(value)

    def _array(self) -> None:
        """`NAME=( words )`."""
        name = "".join(self.parts)[:-2].rstrip("+")
        inner = _Splitter("", self.folder)
        inner.text, inner.variables = self.text, self.variables
        depth, end, quote = 1, self.at, ""
        while end < len(self.text) and depth:
            character = self.text[end]
            if quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character == "#" and self.text[end - 1].isspace():
                end = (self.text + "\n").find("\n", end) - 1
            else:
                depth += {"(": 1, ")": -1}.get(character, 0)
            end += 1
        inner.text, inner.at = self.text[: end - 1], self.at
        words = [word for command in inner.commands() for word in command]
        self.at, self.parts, self.start = end, [], -1
        known = self.variables.texts.get(name, "") is not None
        words = [replace(word, expanded=True) for word in words]
        self.variables.lists[name] = (self.variables.lists.get(name) or []) + words
        if not known:  # assigned more than once: what is there is not all, or not for certain
            self.variables.lists.pop(name)

    def _finish(self, end: int) -> None:
        if self.start < 0:
            return
        text, only = "".join(self.parts), self.only
        word = Word(text, self.start, end, self.unknown, self.expanded)
        if self.skip:
            self.markers += [text] if self.marker_next else []
            self.skip = self.marker_next = False
        elif only is not None and self.variables.lists.get(only.partition("[")[0]) is not None and "[" in only:
            listed = self.variables.lists[only.partition("[")[0]]
            self.words += [replace(item, start=self.start, end=end) for item in listed]
        elif only is not None and self.unknown:
            many = not self.quoted or only[-1:] in ("", "@", "*", "]")
            self.words.append(replace(word, bare=many))
        elif only is not None and not self.quoted:
            self.words += [Word(part, self.start, end, expanded=True) for part in text.split()]
        else:
            self.words.append(word)
        self.parts, self.start, self.only = [], -1, None
        self.unknown = self.expanded = self.quoted = False

    def _end(self, end: int) -> None:
        self._finish(end)
        words, self.words = self.words, []
        self.skip = self.marker_next = False
        if not words:
            return
        self.found.append(words)
        declared = words[1:] if words[0].text in _DECLARING else words
        if all(_ASSIGNMENT.match(word.text) or word.text.startswith("-") for word in declared):
            for word in declared:
                match = _ASSIGNMENT.match(word.text)
                if match:
                    plain = None if word.unknown or match.group(2) else word.text[match.end() :]
                    self.variables.assign(match.group(1), plain)

    def _here_documents(self) -> None:
        """Skip the text between the markers, unless the command before runs it."""
        markers, self.markers = self.markers, []
        runs = self.found and self.found[-1] and self.found[-1][0].text in _RUNS_ITS_INPUT
        for marker in markers if not runs else []:
            match = re.compile(rf"^\t*{re.escape(marker)}\s*$", re.M).search(self.text, self.at)
            self.at = match.end() if match else len(self.text)

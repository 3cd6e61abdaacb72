"""Pickles read as data: a small interpreter that can build plain values and inert records, and nothing else.

Python's own unpickler calls whatever a pickle names, allocates whatever it declares and recurses as deep as it
nests. This machine knows the opcodes that picklers write for checkpoints (protocols 2 to 5), calls nothing but the
constructors that its caller hands it by name, never imports, and is bounded in memory by the size of the file.
"""

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pickletools import opcodes

from tcm.foundation.errors import TcmError

# A file of EDM's CIFAR-10 network takes 45,000 operations, 0.1 MB of text and 20 levels.
MAX_OPERATIONS = 500_000
MAX_TEXT_BYTES = 64 * 2**20
MAX_DEPTH = 200
MAX_UNFOLDED = 500_000
MAX_KEY = 2**32

OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in opcodes}
STOP = ord(".")
Constructor = Callable[[tuple[object, ...]], object]


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a whitelisted class or function, as `module.name`; it cannot be called."""

    name: str


# Neither compared nor printed by content: a hostile pickle can share a record so often that both take forever.
@dataclass(slots=True, eq=False, repr=False)
class Record:
    """What the pickle meant to be an object: the name it asked for, the arguments and the state it brought."""

    name: str
    arguments: tuple[object, ...]
    state: object = None


CONTAINERS = (list, tuple, dict, Record)


class Refused(Exception):
    """Why a pickle cannot be read, in a few words; callers turn it into a `TcmError` that names the file."""


def shown(text: str) -> str:
    """Text from a foreign file, safe for a terminal: one line, ASCII, at most 80 characters."""
    return ascii(text[:80])[1:-1]


class Machine:
    """Runs the pickles in `data`, one after the other, with a whitelist of constructors.

    `resolve` turns persistent ids (torch's storages) into values; without it they are refused. Bytes stay where they
    are: they come back as views of `data`.

    >>> Machine(memoryview(b"\\x80\\x04]K\\x01a."), {}).run()
    [1]
    """

    def __init__(
        self,
        data: memoryview,
        constructors: Mapping[str, Constructor],
        resolve: Callable[[object], object] | None = None,
        max_operations: int = MAX_OPERATIONS,
    ) -> None:
        self.data = data
        self.position = 0
        self.constructors = constructors
        self.resolve = resolve
        self.operations_left = max_operations
        self.text_bytes = 0
        self.stack: list[object] = []
        self.outer_stacks: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        """Read one pickle from the current position on and return its value."""
        self.stack, self.outer_stacks, self.memo = [], [], {}
        while True:
            code = self.take(1)[0]
            if code == STOP:
                break
            self.operations_left -= 1
            if self.operations_left < 0:
                raise Refused("far more operations than a checkpoint needs")
            operation = OPERATIONS.get(code)
            if operation is None:
                raise Refused(f"opcode {OPCODE_NAMES.get(code, hex(code))}, which no checkpoint needs")
            operation(self)
        value = self.pop()
        if self.stack or self.outer_stacks:
            raise Refused("values are left over at its end")
        check_shape(value)
        return value

    def take(self, count: int) -> memoryview:
        """The next `count` bytes, which must exist."""
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise Refused(f"{count:,} bytes declared where {len(self.data) - start:,} are left (truncated?)")
        return self.data[start : self.position]

    def number(self, size: int) -> int:
        """An unsigned little-endian number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def text(self, size: int) -> str:
        """The next `size` bytes as text."""
        self.text_bytes += size
        if self.text_bytes > MAX_TEXT_BYTES:
            raise Refused(f"more than {MAX_TEXT_BYTES:,} bytes of text")
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            raise Refused("text that is not UTF-8") from None

    def line(self) -> str:
        """Text up to the next line break, as protocol 2 writes the names of globals."""
        window = bytes(self.data[self.position : self.position + 256])
        length = window.find(b"\n")
        if length < 0:
            raise Refused("a global's name without an end")
        name = self.text(length)
        self.position += 1
        return name

    def push(self, value: object) -> None:
        """Put a value on the current stack."""
        self.stack.append(value)

    def pop(self) -> object:
        """The topmost value of the current stack."""
        if not self.stack:
            raise Refused("an operation without its operand")
        return self.stack.pop()

    def pop_mark(self) -> list[object]:
        """All values since the last mark."""
        if not self.outer_stacks:
            raise Refused("an operation without its mark")
        items, self.stack = self.stack, self.outer_stacks.pop()
        return items

    def top(self) -> object:
        """The topmost value, left in place."""
        if not self.stack:
            raise Refused("an operation without its operand")
        return self.stack[-1]

    def mark(self) -> None:
        """Begin a group of values."""
        if len(self.outer_stacks) >= MAX_DEPTH:
            raise Refused(f"nested more than {MAX_DEPTH} levels deep")
        self.outer_stacks.append(self.stack)
        self.stack = []

    def remember(self, index: int) -> None:
        """Note the topmost value under `index`; the memo is a dict, so that a large index costs nothing."""
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        """Push what was remembered under `index`."""
        if index not in self.memo:
            raise Refused(f"memo entry {index}, which was never written")
        self.push(self.memo[index])

    def push_tuple(self, count: int) -> None:
        """Replace the last `count` values by a tuple of them."""
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def push_global(self, module: object, name: object) -> None:
        """Push a whitelisted name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise Refused("a global whose name is not text")
        full_name = f"{module}.{name}"
        if full_name not in self.constructors:
            raise Refused(f"the global {shown(full_name)}, which is not on the list of what checkpoints need")
        self.push(Global(full_name))

    def construct(self) -> None:
        """REDUCE and NEWOBJ: hand the arguments to the whitelisted constructor."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Global) or not isinstance(arguments, tuple):
            raise Refused("a call of something that is not a global")
        self.push(self.constructors[called.name](arguments))

    def build(self) -> None:
        """BUILD: give a record its state. What an OrderedDict or EasyDict carries besides its items is left out."""
        state, built = self.pop(), self.top()
        if isinstance(built, Record) and built.state is None:
            built.state = state
        elif type(built) is not dict or type(state) is not dict:
            raise Refused("a state for something that is not a record")

    def append(self, items: list[object]) -> None:
        """Add items to the list on top of the stack."""
        target = self.top()
        if type(target) is not list:
            raise Refused("an append to something that is not a list")
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        """Add keys and values, in turn, to the dict on top of the stack."""
        target = self.top()
        if type(target) is not dict or len(items) % 2:
            raise Refused("an assignment to something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[checked_key(key)] = value

    def add_items(self, items: list[object]) -> None:
        """Add items to the set on top of the stack."""
        target = self.top()
        if type(target) is not set:
            raise Refused("an addition to something that is not a set")
        target.update(checked_key(item) for item in items)

    def persistent(self) -> None:
        """BINPERSID: let the caller say what the id stands for."""
        if self.resolve is None:
            raise Refused("a persistent id")
        self.push(self.resolve(self.pop()))

    def frame(self) -> None:
        """FRAME: only a hint for buffering; checked so that a truncated file is noticed early."""
        length = self.number(8)
        if length > len(self.data) - self.position:
            raise Refused(f"a frame of {length:,} bytes where {len(self.data) - self.position:,} are left (truncated?)")

    def protocol(self) -> None:
        """PROTO: the version of the format."""
        version = self.number(1)
        if not 2 <= version <= 5:
            raise Refused(f"pickle protocol {version} (2 to 5 are read)")

    def set_one(self) -> None:
        """SETITEM: one key and one value."""
        value, key = self.pop(), self.pop()
        self.set_items([key, value])


def checked_key(key: object) -> object:
    """A key whose hash is cheap and cannot be made to collide: text or a small number."""
    if type(key) is str or (type(key) is int and 0 <= key < MAX_KEY):
        return key
    raise Refused(f"a key of type {type(key).__name__}; text or a small number is expected")


def check_shape(root: object) -> None:
    """Refuse a value that contains itself, nests too deep, or shares its parts so often that a walk takes forever.

    With h the height and n the number of values when unfolded: h = 1 + max h(child), n = 1 + sum n(child), each
    computed once for a shared part.
    """
    measured: dict[int, tuple[int, int]] = {}
    on_path: set[int] = set()
    pending: list[tuple[object, bool]] = [(root, False)]
    while pending:
        value, inside_done = pending.pop()
        inside = children(value)
        if inside_done:
            on_path.discard(id(value))
            sizes = [measured.get(id(child), (1, 1)) for child in inside]
            height = 1 + max((h for h, _ in sizes), default=0)
            unfolded = 1 + sum(n for _, n in sizes)
            if height > MAX_DEPTH:
                raise Refused(f"nested more than {MAX_DEPTH} levels deep")
            if unfolded > MAX_UNFOLDED:
                raise Refused(f"shared parts that unfold to more than {MAX_UNFOLDED:,} values")
            measured[id(value)] = (height, unfolded)
        elif id(value) in on_path:
            raise Refused("a value that contains itself")
        elif id(value) not in measured:
            on_path.add(id(value))
            pending.append((value, True))
            pending.extend((child, False) for child in inside if isinstance(child, CONTAINERS))


def children(value: object) -> Collection[object]:
    """The values directly inside a value."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, Record):
        return (value.arguments, value.state)
    return ()


NAMED_OPERATIONS: dict[str, Callable[[Machine], None]] = {
    "PROTO": Machine.protocol,
    "FRAME": Machine.frame,
    "MARK": Machine.mark,
    "NONE": lambda m: m.push(None),
    "NEWTRUE": lambda m: m.push(True),
    "NEWFALSE": lambda m: m.push(False),
    "BININT": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    "BININT1": lambda m: m.push(m.number(1)),
    "BININT2": lambda m: m.push(m.number(2)),
    "LONG1": lambda m: m.push(int.from_bytes(m.take(m.number(1)), "little", signed=True)),
    "BINFLOAT": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    "SHORT_BINUNICODE": lambda m: m.push(m.text(m.number(1))),
    "BINUNICODE": lambda m: m.push(m.text(m.number(4))),
    "BINUNICODE8": lambda m: m.push(m.text(m.number(8))),
    "SHORT_BINBYTES": lambda m: m.push(m.take(m.number(1))),
    "BINBYTES": lambda m: m.push(m.take(m.number(4))),
    "BINBYTES8": lambda m: m.push(m.take(m.number(8))),
    "EMPTY_LIST": lambda m: m.push([]),
    "EMPTY_DICT": lambda m: m.push({}),
    "EMPTY_SET": lambda m: m.push(set()),
    "EMPTY_TUPLE": lambda m: m.push(()),
    "TUPLE": lambda m: m.push(tuple(m.pop_mark())),
    "TUPLE1": lambda m: m.push_tuple(1),
    "TUPLE2": lambda m: m.push_tuple(2),
    "TUPLE3": lambda m: m.push_tuple(3),
    "APPEND": lambda m: m.append([m.pop()]),
    "APPENDS": lambda m: m.append(m.pop_mark()),
    "SETITEM": Machine.set_one,
    "SETITEMS": lambda m: m.set_items(m.pop_mark()),
    "ADDITEMS": lambda m: m.add_items(m.pop_mark()),
    "BINPUT": lambda m: m.remember(m.number(1)),
    "LONG_BINPUT": lambda m: m.remember(m.number(4)),
    "MEMOIZE": lambda m: m.remember(len(m.memo)),
    "BINGET": lambda m: m.recall(m.number(1)),
    "LONG_BINGET": lambda m: m.recall(m.number(4)),
    "GLOBAL": lambda m: m.push_global(m.line(), m.line()),
    "STACK_GLOBAL": lambda m: m.push_global(*reversed((m.pop(), m.pop()))),
    "REDUCE": Machine.construct,
    "NEWOBJ": Machine.construct,
    "BUILD": Machine.build,
    "BINPERSID": Machine.persistent,
}
OPERATIONS = {code: NAMED_OPERATIONS[name] for code, name in OPCODE_NAMES.items() if name in NAMED_OPERATIONS}


def read_pickle(data: memoryview, constructors: Mapping[str, Constructor], name: str) -> object:
    """The value of the one pickle in `data`, as plain values and inert records; nothing in it is run.

    >>> read_pickle(memoryview(b"\\x80\\x04cos\\nsystem\\n."), {}, "evil.pkl")
    Traceback (most recent call last):
    ...
    tcm.foundation.errors.TcmError: evil.pkl: refused: the global os.system, ...; nothing in it was run...
    """
    machine = Machine(data, constructors)
    try:
        value = machine.run()
        if machine.position != len(data):
            raise Refused(f"{len(data) - machine.position:,} bytes follow its end")
    except Refused as reason:
        raise refusal(name, reason) from None
    return value


def refusal(name: str, reason: Refused) -> TcmError:
    """The one line that a user sees for a file that is not read."""
    return TcmError(
        f"{name}: refused: {reason}; nothing in it was run; "
        "download the file again from its publisher and compare its checksum"
    )

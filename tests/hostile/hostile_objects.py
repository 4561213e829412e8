"""Documents of typed JSON that are hostile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostile_case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator


def object_cases() -> Iterator[Case]:
    texts: list[tuple[str, str, bytes]] = [
        ("deep-lists", "10,000 brackets", b"[" * 10000 + b"]" * 10000),
        ("deep-open", "10,000 open brackets", b"[" * 10000),
        ("deep-values", "201 lists", b"[" * 201 + b"]" * 201),
        ("deep-tag", "a tag that is 400 lists", b'{"$":' + b"[" * 400 + b"]" * 400 + b"}"),
        ("deep-tuples", "201 tuples", b'{"$":"tuple","items":[' * 201 + b"]}" * 201),
        ("deep-ext", "201 extensions", b'{"$":"ext","tag":"","value":' * 201 + b"1" + b"}" * 201),
        ("tag-unknown", "an unknown tag", b'{"$":"eval","items":["1"]}'),
        ("tag-number", "a tag that is a number", b'{"$":1}'),
        ("tag-list", "a tag that cannot be hashed", b'{"$":[]}'),
        ("tag-null", "a tag that is null", b'{"$":null}'),
        ("field-missing", "a tuple without items", b'{"$":"tuple"}'),
        ("field-extra", "a tuple with more than items", b'{"$":"tuple","items":[],"x":1}'),
        ("items-text", "items that are text", b'{"$":"tuple","items":"abc"}'),
        ("pairs-odd", "a key without a value", b'{"$":"dict","items":[1]}'),
        ("pairs-twice", "a key twice in pairs", b'{"$":"dict","items":[1,2,1,3]}'),
        ("pairs-twice-equal", "equal keys, 1 and true", b'{"$":"dict","items":[1,2,true,3]}'),
        ("pairs-unhashable", "a list as a key", b'{"$":"dict","items":[[],1]}'),
        ("set-unhashable", "a dict in a set", b'{"$":"set","items":[{}]}'),
        ("set-twice", "an item twice in a set", b'{"$":"set","items":[1,1]}'),
        ("key-twice", "a key twice in a dict", b'{"a":1,"a":1}'),
        ("int-huge", "an int of 5,000 digits", b"9" * 5000),
        ("int-wide", "an int of 65 bits in decimal", str(1 << 64).encode()),
        ("int-hex", "an int that is no hex", b'{"$":"int","hex":"0x1f"}'),
        ("int-underscore", "hex with underscores", b'{"$":"int","hex":"1_0"}'),
        ("float-bits", "a float of too few bits", b'{"$":"float","bits":"7ff8"}'),
        ("float-range", "a float beyond all floats", b"1e999"),
        ("nan", "a bare NaN", b"NaN"),
        ("complex-parts", "a complex number of ints", b'{"$":"complex","re":1,"im":2}'),
        ("base64", "bytes that are no base64", b'{"$":"bytes","base64":"***"}'),
        ("base64-unicode", "base64 with an umlaut", '{"$":"bytes","base64":"äääa"}'.encode()),
        ("str-utf8", "a str that is no UTF-8", b'{"$":"str","base64":"/w=="}'),
        ("range-zero", "a range with step 0", b'{"$":"range","items":[0,1,0]}'),
        ("range-text", "a range of text", b'{"$":"range","items":["a","b","c"]}'),
        ("slice-short", "a slice of two parts", b'{"$":"slice","items":[1,2]}'),
        ("deque-short", "more items than maxlen", b'{"$":"deque","maxlen":1,"items":[1,2]}'),
        (
            "deque-huge",
            "a maxlen of 64 bits",
            b'{"$":"deque","maxlen":18446744073709551615,"items":[]}',
        ),
        ("deque-bool", "a maxlen that is true", b'{"$":"deque","maxlen":true,"items":[]}'),
        (
            "named-fields",
            "fewer fields than items",
            b'{"$":"namedtuple","type":"P","fields":["x"],"items":[1,2]}',
        ),
        (
            "named-code",
            "code for a field name",
            b'{"$":"namedtuple","type":"P","fields":["x=exit()"],"items":[1]}',
        ),
        (
            "named-type",
            "code for a class name",
            b'{"$":"namedtuple","type":"P(exit())","fields":[],"items":[]}',
        ),
        (
            "named-twice",
            "a field twice",
            b'{"$":"namedtuple","type":"P","fields":["x","x"],"items":[1,2]}',
        ),
        ("tensor-name", "a tensor whose name is a number", b'{"$":"tensor","name":1}'),
        ("ext-tag", "an extension whose tag is a list", b'{"$":"ext","tag":[],"value":1}'),
        ("trailing", "text behind the document", b"1 2"),
        ("empty", "no bytes at all", b""),
        ("utf8", "text that is no UTF-8", b'"\xff"'),
        ("surrogate", "a lone surrogate", b'"\\ud800"'),
        ("bom", "a byte order mark", b"\xef\xbb\xbf1"),
    ]
    for name, why, data in texts:
        yield Case(name=f"object-{name}.json", raises="CorruptError", why=why, data=data)

from convoy.launch import wire_pb2 as _wire_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Description(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("digest", "numbers")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    numbers: bytes
    def __init__(self, digest: _Optional[str] = ..., numbers: _Optional[bytes] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("numbers", "images", "labels", "checksum")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    images: bytes
    labels: bytes
    checksum: int
    def __init__(self, numbers: _Optional[bytes] = ..., images: _Optional[bytes] = ..., labels: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

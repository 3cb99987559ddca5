from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Up(_message.Message):
    __slots__ = ("push", "data")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    push: Push
    data: bytes
    def __init__(self, push: _Optional[_Union[Push, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("run", "node", "incarnation", "number", "base", "model", "length", "checksum", "coding", "shared", "trained", "protocol", "last", "rests", "turn", "looks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    run: str
    node: int
    incarnation: str
    number: int
    base: int
    model: str
    length: int
    checksum: int
    coding: str
    shared: str
    trained: Trained
    protocol: int
    last: int
    rests: bool
    turn: int
    looks: bool
    def __init__(self, run: _Optional[str] = ..., node: _Optional[int] = ..., incarnation: _Optional[str] = ..., number: _Optional[int] = ..., base: _Optional[int] = ..., model: _Optional[str] = ..., length: _Optional[int] = ..., checksum: _Optional[int] = ..., coding: _Optional[str] = ..., shared: _Optional[str] = ..., trained: _Optional[_Union[Trained, _Mapping]] = ..., protocol: _Optional[int] = ..., last: _Optional[int] = ..., rests: _Optional[bool] = ..., turn: _Optional[int] = ..., looks: _Optional[bool] = ...) -> None: ...

class Trained(_message.Message):
    __slots__ = ("samples", "correct", "loss", "rate", "busy_s", "step_s", "exchange_s")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    samples: int
    correct: int
    loss: float
    rate: float
    busy_s: float
    step_s: float
    exchange_s: float
    def __init__(self, samples: _Optional[int] = ..., correct: _Optional[int] = ..., loss: _Optional[float] = ..., rate: _Optional[float] = ..., busy_s: _Optional[float] = ..., step_s: _Optional[float] = ..., exchange_s: _Optional[float] = ...) -> None: ...

class Down(_message.Message):
    __slots__ = ("told", "data", "wait")
    TOLD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    told: Told
    data: bytes
    wait: Done
    def __init__(self, told: _Optional[_Union[Told, _Mapping]] = ..., data: _Optional[bytes] = ..., wait: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("number", "version", "length", "checksum", "order", "over", "refused", "waited_s", "coding", "shared")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    length: int
    checksum: int
    order: str
    over: bool
    refused: str
    waited_s: float
    coding: str
    shared: str
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ..., length: _Optional[int] = ..., checksum: _Optional[int] = ..., order: _Optional[str] = ..., over: _Optional[bool] = ..., refused: _Optional[str] = ..., waited_s: _Optional[float] = ..., coding: _Optional[str] = ..., shared: _Optional[str] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("node", "incarnation", "speed", "threads")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    node: int
    incarnation: str
    speed: float
    threads: int
    def __init__(self, node: _Optional[int] = ..., incarnation: _Optional[str] = ..., speed: _Optional[float] = ..., threads: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ask(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: str
    def __init__(self, values: _Optional[str] = ...) -> None: ...

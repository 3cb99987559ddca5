from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("hello", "prepared", "ready", "alive", "event", "aside", "failure", "done", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ASIDE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prepared: Prepared
    ready: Ready
    alive: Alive
    event: str
    aside: Aside
    failure: Failure
    done: Done
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., event: _Optional[str] = ..., aside: _Optional[_Union[Aside, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "name", "pid", "slot")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    version: str
    name: str
    pid: int
    slot: int
    def __init__(self, version: _Optional[str] = ..., name: _Optional[str] = ..., pid: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("data", "model", "device", "threads")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    data: str
    model: str
    device: str
    threads: int
    def __init__(self, data: _Optional[str] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., threads: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("speed",)
    SPEED_FIELD_NUMBER: _ClassVar[int]
    speed: float
    def __init__(self, speed: _Optional[float] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("speed", "step")
    SPEED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    speed: float
    step: int
    def __init__(self, speed: _Optional[float] = ..., step: _Optional[int] = ...) -> None: ...

class Aside(_message.Message):
    __slots__ = ("reason", "speed")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    speed: float
    def __init__(self, reason: _Optional[str] = ..., speed: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "exit_code", "fatal")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    exit_code: int
    fatal: bool
    def __init__(self, reason: _Optional[str] = ..., exit_code: _Optional[int] = ..., fatal: _Optional[bool] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class FromLead(_message.Message):
    __slots__ = ("welcome", "admitted", "form", "lost", "stop", "leave", "aside")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    ASIDE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    admitted: Nothing
    form: Nothing
    lost: str
    stop: Nothing
    leave: Nothing
    aside: Nothing
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., admitted: _Optional[_Union[Nothing, _Mapping]] = ..., form: _Optional[_Union[Nothing, _Mapping]] = ..., lost: _Optional[str] = ..., stop: _Optional[_Union[Nothing, _Mapping]] = ..., leave: _Optional[_Union[Nothing, _Mapping]] = ..., aside: _Optional[_Union[Nothing, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("number", "identity", "config", "lighthouse", "store", "address", "has_state", "service", "run", "data_card")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LIGHTHOUSE_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    DATA_CARD_FIELD_NUMBER: _ClassVar[int]
    number: int
    identity: str
    config: str
    lighthouse: str
    store: str
    address: str
    has_state: bool
    service: str
    run: str
    data_card: str
    def __init__(self, number: _Optional[int] = ..., identity: _Optional[str] = ..., config: _Optional[str] = ..., lighthouse: _Optional[str] = ..., store: _Optional[str] = ..., address: _Optional[str] = ..., has_state: _Optional[bool] = ..., service: _Optional[str] = ..., run: _Optional[str] = ..., data_card: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("reason", "data")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    reason: str
    data: bytes
    def __init__(self, reason: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("problem",)
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    problem: str
    def __init__(self, problem: _Optional[str] = ...) -> None: ...

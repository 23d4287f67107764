"""Send streams as file objects."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional
from uuid import UUID

if TYPE_CHECKING:
    from . import _ubtrfs

__all__ = ["ReceiveReport", "ReceiveStream", "ReceivedSubvolume", "SendStream"]

#: Called with the number of bytes so far. An exception ends the work.
Progress = Optional[Callable[[int], object]]

#: Bytes that are copied at once.
COPY_BYTES = 1 << 20


class SendStream(io.RawIOBase):
    """A readable file object: the stream of a subvolume, which a thread makes while it is read.

    An error of the send is raised by the read that meets it. `close` before the end cancels the send.
    """

    def __init__(self, send: _ubtrfs.Send, progress: Progress = None) -> None:
        """Wraps a send that was started."""
        super().__init__()
        self._send = send
        self._progress = progress
        self.bytes_read = 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Reads into `buffer`, and returns the number of bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads up to `size` bytes, or everything up to the end."""
        if size is None or size < 0:
            return self.readall()
        return self._read(size)

    def _read(self, size: int) -> bytes:
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        data = self._send.read(size)
        self.bytes_read += len(data)
        if self._progress is not None and data:
            try:
                self._progress(self.bytes_read)
            except BaseException:
                self.close()
                raise
        return data

    def close(self) -> None:
        """Ends the send, also before its end."""
        if not self.closed:
            try:
                super().close()
            finally:
                self._send.close()


@dataclass(frozen=True)
class ReceivedSubvolume:
    """A subvolume that a receive has made."""

    #: The path below the directory of the receive.
    path: str
    id: int
    #: UUID of the subvolume that was sent.
    uuid: UUID
    #: Whether the subvolume began as a snapshot of a parent.
    is_snapshot: bool


@dataclass(frozen=True)
class ReceiveReport:
    """The result of a receive."""

    subvolumes: list[ReceivedSubvolume]
    nr_commands: int
    #: Bytes of the stream, without headers.
    nr_bytes: int
    #: Commands that failed and were passed over, if `max_errors` allows that.
    errors: list[str]


class ReceiveStream(io.RawIOBase):
    """A writable file object: what is written is received by a thread.

    `close` waits for the end of the receive, and raises its error. Leaving a `with` block by an exception cancels the
    receive, and so does an exception of `write`. After `close`, `report` tells what was received.
    """

    def __init__(self, receive: _ubtrfs.Receive, progress: Progress = None) -> None:
        """Wraps a receive that was started."""
        super().__init__()
        self._receive = receive
        self._progress = progress
        self.bytes_written = 0
        self.report: ReceiveReport | None = None

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, data: Any, /) -> int:
        """Passes all of `data` to the receive. Raises its error if it has failed."""
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        content = data if type(data) is bytes else memoryview(data).tobytes()
        try:
            if content:
                self._receive.write(content)
            self.bytes_written += len(content)
            if self._progress is not None:
                self._progress(self.bytes_written)
        except BaseException:
            # A later `close` must not hide this exception by one of its own.
            self.cancel()
            raise
        return len(content)

    def cancel(self) -> None:
        """Ends the receive, and deletes the incomplete subvolume."""
        if not self.closed:
            super().close()
            self._receive.cancel()

    def close(self) -> None:
        """Ends the input, and waits for the receive."""
        if self.closed:
            return
        super().close()
        subvolumes, commands, nr_bytes, errors = self._receive.finish()
        made = [
            ReceivedSubvolume(path.decode("utf-8", "surrogateescape"), number, UUID(sent), is_snapshot)
            for path, number, sent, is_snapshot in subvolumes
        ]
        self.report = ReceiveReport(made, commands, nr_bytes, errors)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the receive; cancels it after an exception."""
        if kind is None:
            self.close()
        else:
            self.cancel()

    def __del__(self) -> None:
        """Cancels a receive that nobody has ended."""
        self.cancel()


def receive_all(stream: Any, into: ReceiveStream) -> ReceiveReport:
    """Receives everything that a file object has."""
    with into:
        while data := stream.read(COPY_BYTES):
            into.write(data)
    assert into.report is not None
    return into.report
